#!/usr/bin/env bash
# Requests a second of the service on memory against servers that do nothing, in one run: the contestants take turns, and
# the ratio of each pair is printed with the spread. Usage: bench/http.sh [ROUNDS] [SECONDS]
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-5} seconds=${2:-4}
for tool in wrk h2load python3; do
  command -v "$tool" >/dev/null || { echo "$tool is missing: apt-get install wrk nghttp2-client python3" >&2; exit 2; }
done
cargo build --release --quiet --locked
cargo build --release --quiet --manifest-path bench/Cargo.toml

folder=$(mktemp -d)
pids=()
trap 'for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; rm -rf "$folder"' EXIT
cat > "$folder/tidegate.yaml" <<YAML
listen: {http: '127.0.0.1:18180', grpc: '127.0.0.1:18181', admin: '127.0.0.1:18182'}
envoy: {files: [ratelimit.yaml]}
policies:
  - {name: p, key: [ip], algorithm: token-bucket, limit: 1000000000, window: 1s}
YAML
cat > "$folder/ratelimit.yaml" <<YAML
domain: bench
descriptors:
  - {key: user, rate_limit: {unit: second, requests_per_unit: 1000000000}}
YAML
target/release/tidegate serve --config "$folder/tidegate.yaml" > "$folder/log" 2>&1 & pids+=($!)
bench/target/release/tidegate-bench 127.0.0.1:18190 127.0.0.1:18191 & pids+=($!)

cat > "$folder/post.lua" <<'LUA'
wrk.method = 'POST'
wrk.body = '{"policy": "p", "key": "user123"}'
wrk.headers['Content-Type'] = 'application/json'
LUA
# One gRPC message: domain "bench", one descriptor user=user123.
python3 - "$folder/message" <<'PY'
import sys
field = lambda number, data: bytes([number << 3 | 2, len(data)]) + data
entry = field(1, b'user') + field(2, b'user123')
message = field(1, b'bench') + field(2, field(1, entry))
open(sys.argv[1], 'wb').write(b'\0' + len(message).to_bytes(4, 'big') + message)
PY
for port in 18180 18181 18190 18191; do
  for _ in $(seq 100); do (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break; sleep 0.05; done
done

http() { wrk -t1 -c64 -d"${seconds}s" -s "$folder/post.lua" "http://127.0.0.1:$1/v1/acquire" | awk '/Requests\/sec/ {print $2}'; }
grpc() {
  h2load -t1 -c8 -m32 -D "$seconds" --warm-up-time 1 -d "$folder/message" -H 'content-type: application/grpc' -H 'te: trailers' \
    "http://127.0.0.1:$1/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit" | awk '/^finished/ {print $4}'
}
for kind in http grpc; do
  if [ $kind = http ]; then ours=18180 nothing=18190; else ours=18181 nothing=18191; fi
  : > "$folder/$kind"
  for round in $(seq "$rounds"); do
    # Who goes first alternates.
    if [ $((round % 2)) = 0 ]; then a=$($kind $ours); b=$($kind $nothing); else b=$($kind $nothing); a=$($kind $ours); fi
    echo "$kind round $round: tidegate $a/s, doing nothing $b/s"
    echo "$a $b" >> "$folder/$kind"
  done
  awk '{print $1 / $2}' "$folder/$kind" | sort -n | awk -v kind=$kind '{r[NR] = $1} END {printf "%s: %.2f of doing nothing (median of %d, from %.2f to %.2f)\n", kind, r[int((NR + 1) / 2)], NR, r[1], r[NR]}'
done
