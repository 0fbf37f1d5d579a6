#!/usr/bin/env bash
# Measures the requests per second through the gateway with a limit on memory, through the gateway
# without a policy, and through nginx with limit_req, all with the same upstream. The candidates
# take turns in each round. The script prints the ratio of each pair with its spread, for the
# throughput and for the CPU time per request, which depends less on the load of the machine.
# Usage: bench/gateway.sh [ROUNDS] [SECONDS]
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-7} seconds=${2:-4}
for tool in wrk nginx; do
  command -v "$tool" >/dev/null || {
    echo "$tool is missing: apt-get install wrk nginx-light" >&2
    exit 2
  }
done
cargo build --release --quiet --locked
binary=${CARGO_TARGET_DIR:-target}/release/tidegate

folder=$(mktemp -d)
pids=()
clean_up() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait
  rm -rf "$folder"
}
trap clean_up EXIT

# The upstream has one worker; each proxy has one thread or worker per core.
nginx_config() {
  cat <<CONF
daemon off; pid $folder/$1.pid; error_log $folder/$1.log; worker_processes $2;
events { worker_connections 4096; }
http {
  access_log off; keepalive_requests 1000000000;
  client_body_temp_path $folder/$1-body; proxy_temp_path $folder/$1-proxy;
  fastcgi_temp_path $folder/$1-fastcgi; uwsgi_temp_path $folder/$1-uwsgi;
  scgi_temp_path $folder/$1-scgi;
  $3
}
CONF
}
nginx_config upstream 1 '
  server { listen 127.0.0.1:18290; location / { return 200 "0123456789"; } }
' > "$folder/upstream.conf"
nginx_config proxy auto '
  limit_req_zone $binary_remote_addr zone=clients:10m rate=1000000000r/s;
  upstream application { server 127.0.0.1:18290; keepalive 256; keepalive_requests 1000000000; }
  server {
    listen 127.0.0.1:18283;
    location / {
      limit_req zone=clients burst=1000000000 nodelay;
      proxy_pass http://application; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_set_header Host $host; proxy_set_header X-Forwarded-For $remote_addr;
      proxy_set_header X-Forwarded-Proto $scheme;
    }
  }' > "$folder/proxy.conf"
for name in upstream proxy; do
  nginx -c "$folder/$name.conf" -e "$folder/$name.log" &
  pids+=($!)
done

gateway() {
  cat > "$folder/$1.yaml"
  "$binary" gateway --config "$folder/$1.yaml" --listen "127.0.0.1:$2" \
    --upstream http://127.0.0.1:18290 > "$folder/$1.log" 2>&1 &
  pids+=($!)
}
gateway limited 18281 <<'YAML'
listen: {admin: '127.0.0.1:18284'}
policies:
  - {name: clients, key: [ip], algorithm: token-bucket, limit: 1000000000, window: 1s}
YAML
gateway free 18282 <<'YAML'
listen: {admin: '127.0.0.1:18285'}
YAML
for port in 18281 18282 18283 18290; do
  for _ in $(seq 100); do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break
    sleep 0.05
  done
done
curl -sf -D - http://127.0.0.1:18281/ -o /dev/null | grep -qi '^ratelimit:' || {
  echo 'the gateway sends no RateLimit header' >&2
  exit 1
}

# Prints the CPU time of a process and its children, in ticks.
ticks() {
  for pid in "$1" $(pgrep -P "$1"); do awk '{print $14 + $15}' "/proc/$pid/stat"; done |
    awk '{sum += $1} END {print sum}'
}
# Prints the requests per second, and the CPU time per request in microseconds.
measure() {
  local process=${pids[$2]} before after
  before=$(ticks "$process")
  wrk -t1 -c64 -d"${seconds}s" "http://127.0.0.1:$1/" > "$folder/wrk"
  ! grep -q 'Non-2xx' "$folder/wrk" || { cat "$folder/wrk" >&2; exit 1; }
  after=$(ticks "$process")
  awk -v ticks=$((after - before)) -v hertz="$(getconf CLK_TCK)" \
    '/requests in/ {count = $1}
     /Requests\/sec/ {printf "%s %.1f\n", $2, ticks / hertz * 1e6 / count}' "$folder/wrk"
}
# Index of the process of each candidate: the gateways were started after the two nginx.
process=(- 2 3 1)
for candidate in 1 2 3; do measure "1828$candidate" "${process[$candidate]}" > /dev/null; done
for round in $(seq "$rounds"); do
  # Rotate the order of the candidates in each round.
  case $((round % 3)) in 0) order='1 2 3';; 1) order='2 3 1';; 2) order='3 1 2';; esac
  for candidate in $order; do
    read -r "rate[$candidate]" "cost[$candidate]" \
      <<< "$(measure "1828$candidate" "${process[$candidate]}")"
  done
  echo "round $round: gateway with limit ${rate[1]}/s (${cost[1]} µs)," \
    "without limit ${rate[2]}/s (${cost[2]} µs), nginx limit_req ${rate[3]}/s (${cost[3]} µs)"
  echo "${rate[1]} ${rate[2]} ${rate[3]} ${cost[1]} ${cost[2]} ${cost[3]}" >> "$folder/rates"
done
ratio() {
  awk -v one="$3" -v other="$4" '{print $one / $other}' "$folder/rates" | sort -n |
    awk -v what="$1" -v name="$2" '{r[NR] = $1} END {
      printf "gateway with limit: %.2f of the %s of %s (median of %d, from %.2f to %.2f)\n",
        r[int((NR + 1) / 2)], what, name, NR, r[1], r[NR]}'
}
ratio throughput 'the gateway without limit' 1 2
ratio 'CPU time' 'the gateway without limit' 4 5
ratio throughput 'nginx limit_req' 1 3
ratio 'CPU time' 'nginx limit_req' 4 6
