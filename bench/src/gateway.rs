//! The gateway with a limit on memory, compared with nginx and its `limit_req` and with a no-op
//! proxy: small answers, and bodies of a gigabyte in both directions. All processes share the same
//! cores.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::generator::{Protocol, Request};
use crate::latency;
use crate::load::wrk;
use crate::process::{Server, free_port, own_binary};

/// Cases, with the metric of each.
pub(crate) const CASES: [(&str, &str); 3] = [
    ("small answers", "per_second"),
    ("download of 1 GB", "megabytes_per_second"),
    ("upload of 1 GB", "megabytes_per_second"),
];

/// Name of the proxy that limits nothing.
pub(crate) const NO_OP: &str = "no-op hyper";

/// Longest wait for the next bytes of a body.
const TIMEOUT: Duration = Duration::from_secs(30);
const BUFFER_BYTES: usize = 256 * 1024;

struct Candidate {
    name: &'static str,
    server: Server,
    port: u16,
}

pub(crate) fn run(plan: Plan) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let body_bytes = if plan == Plan::Full { 1 << 30 } else { 1 << 28 };
    // A file with holes takes no space on the disk.
    File::create(folder.path().join("body"))?.set_len(body_bytes)?;
    let (port, sink) = (free_port()?, start_sink()?);
    let _upstream =
        nginx(folder.path(), "upstream", port, 1, &upstream_config(folder.path(), port, sink))?;
    let candidates =
        [tidegate(folder.path(), port)?, limit_req(folder.path(), port)?, no_op_proxy(port)?];
    let script = folder.path().join("get.lua");
    std::fs::write(&script, "wrk.method = 'GET'\n")?;
    let mut results = Results::new("gateway", plan);
    for (case, metric) in CASES {
        let measure = |candidate: &Candidate, plan: Plan| -> Result<f64> {
            Ok(match case {
                "small answers" => {
                    let url = format!("http://127.0.0.1:{}/", candidate.port);
                    wrk(&candidate.server, &script, &url, plan.turn())?.per_second
                }
                "download of 1 GB" => download(candidate.port, body_bytes)?,
                _ => upload(candidate.port, body_bytes)?,
            })
        };
        for candidate in &candidates {
            measure(candidate, Plan::Quick)?;
        }
        for round in 0..plan.rounds() {
            for turn in 0..candidates.len() {
                // Rotate the order of the candidates in each round.
                let candidate = &candidates[(turn + round) % candidates.len()];
                results.add(case, candidate.name, metric, measure(candidate, plan)?);
            }
        }
        for candidate in ["tidegate", NO_OP] {
            if let Some(ratio) = results.ratio(metric, (case, candidate), (case, "nginx")) {
                println!("{case}: {candidate}/nginx: {ratio}");
            }
        }
    }
    let request = |candidate: &Candidate| {
        let bytes = format!("GET / HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n\r\n", candidate.port);
        (candidate.name, Request::new(candidate.port, Protocol::Http, bytes.into_bytes()))
    };
    latency::measure(plan, "gateway", &candidates.each_ref().map(request), &mut results)?;
    for candidate in &candidates {
        candidate.server.record_memory("memory", candidate.name, &mut results)?;
    }
    results.save()
}

/// Starts nginx. The upstream has one worker, a proxy one for each core.
fn nginx(folder: &Path, name: &str, port: u16, workers: usize, http: &str) -> Result<Server> {
    let path = |suffix: &str| folder.join(format!("{name}-{suffix}")).display().to_string();
    let (pid, log, config) = (path("pid"), path("log"), path("conf"));
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {};", path(kind)))
        .join(" ");
    let workers = if workers == 0 { "auto".to_owned() } else { workers.to_string() };
    std::fs::write(
        &config,
        format!(
            "daemon off; pid {pid}; error_log {log}; worker_processes {workers};\n\
             events {{ worker_connections 4096; }}\n\
             http {{ access_log off; keepalive_requests 1000000000; client_max_body_size 0;\n\
             {temporary}\n{http} }}\n"
        ),
    )?;
    Server::start(name, Command::new("nginx").args(["-c", &config, "-e", &log]), &[port])
        .context("nginx is missing: apt-get install nginx-light")
}

fn upstream_config(folder: &Path, port: u16, sink: u16) -> String {
    format!(
        "sendfile on; server {{ listen 127.0.0.1:{port};\n\
         location = / {{ return 200 \"0123456789\"; }}\n\
         location = /body {{ root {}; }}\n\
         location = /sink {{ proxy_pass http://127.0.0.1:{sink}; proxy_http_version 1.1; \
         proxy_request_buffering off; }} }}",
        folder.display()
    )
}

fn limit_req(folder: &Path, upstream: u16) -> Result<Candidate> {
    let port = free_port()?;
    // Bodies are streamed, not written to files.
    let http = format!(
        "limit_req_zone $binary_remote_addr zone=clients:10m rate=1000000000r/s;\n\
         upstream application {{ server 127.0.0.1:{upstream}; keepalive 256; \
         keepalive_requests 1000000000; }}\n\
         server {{ listen 127.0.0.1:{port}; location / {{\n\
         limit_req zone=clients burst=1000000000 nodelay;\n\
         proxy_pass http://application; proxy_http_version 1.1; proxy_set_header Connection \"\";\n\
         proxy_request_buffering off; proxy_max_temp_file_size 0;\n\
         proxy_set_header Host $host; proxy_set_header X-Forwarded-For $remote_addr;\n\
         proxy_set_header X-Forwarded-Proto $scheme; }} }}"
    );
    Ok(Candidate { name: "nginx", server: nginx(folder, "limit_req", port, 0, &http)?, port })
}

fn tidegate(folder: &Path, upstream: u16) -> Result<Candidate> {
    let (port, admin) = (free_port()?, free_port()?);
    let config = folder.join("gateway.yaml");
    std::fs::write(
        &config,
        format!(
            "listen: {{admin: '127.0.0.1:{admin}'}}\n\
             policies:\n  - {{name: clients, key: [ip], algorithm: token-bucket, \
             limit: 1000000000, window: 1s}}\n"
        ),
    )?;
    let mut command = Command::new(own_binary("tidegate")?);
    command.arg("gateway").arg("--config").arg(config);
    command.args(["--listen", &format!("127.0.0.1:{port}")]);
    command.args(["--upstream", &format!("http://127.0.0.1:{upstream}")]);
    Ok(Candidate {
        name: "tidegate",
        server: Server::start("tidegate", &mut command, &[port])?,
        port,
    })
}

/// Bare hyper, which limits nothing.
fn no_op_proxy(upstream: u16) -> Result<Candidate> {
    let port = free_port()?;
    let mut command = Command::new(own_binary("no_op_proxy")?);
    command.args([format!("127.0.0.1:{port}"), format!("127.0.0.1:{upstream}")]);
    let server = Server::start("no-op proxy", &mut command, &[port])?;
    Ok(Candidate { name: NO_OP, server, port })
}

/// Starts a thread that answers an upload with the number of its bytes, and returns its port.
fn start_sink() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || receive(stream));
        }
    });
    Ok(port)
}

/// Reads one request, and answers it. The connection is closed on an error.
fn receive(mut stream: TcpStream) -> Result<()> {
    let (length, rest) = read_head(&mut stream)?;
    let received = read_body(&mut stream, length, &rest)?.to_string();
    let length = received.len();
    write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n")?;
    Ok(stream.write_all(received.as_bytes())?)
}

/// Reads a head, and returns the length of the body and the bytes of it that came along.
fn read_head(stream: &mut TcpStream) -> Result<(u64, Vec<u8>)> {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    let end = loop {
        let read = stream.read(&mut buffer)?;
        ensure!(read > 0 && bytes.len() < 65_536, "no complete head");
        bytes.extend_from_slice(&buffer[..read]);
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
    ensure!(!head.starts_with("http") || head.contains(" 200 "), "no success: {head}");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length = length.context("no content-length")?.trim().parse()?;
    Ok((length, bytes.split_off(end)))
}

/// Reads a body to its end, and returns the number of its bytes.
fn read_body(stream: &mut TcpStream, length: u64, rest: &[u8]) -> Result<u64> {
    let (mut received, mut buffer) = (rest.len() as u64, vec![0; BUFFER_BYTES]);
    while received < length {
        let read = stream.read(&mut buffer)?;
        ensure!(read > 0, "the body ended after {received} of {length} bytes");
        received += read as u64;
    }
    Ok(received)
}

fn connect(port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Returns the megabytes per second of a download, whose length is checked.
fn download(port: u16, bytes: u64) -> Result<f64> {
    let mut stream = connect(port)?;
    let start = Instant::now();
    stream.write_all(b"GET /body HTTP/1.1\r\nhost: bench\r\n\r\n")?;
    let (length, rest) = read_head(&mut stream)?;
    let received = read_body(&mut stream, length, &rest)?;
    ensure!(received == bytes, "{received} of {bytes} bytes arrived");
    Ok(bytes as f64 / 1e6 / start.elapsed().as_secs_f64())
}

/// Returns the megabytes per second of an upload, whose length the upstream reports.
fn upload(port: u16, bytes: u64) -> Result<f64> {
    let (mut stream, block) = (connect(port)?, vec![0; BUFFER_BYTES]);
    let start = Instant::now();
    write!(stream, "POST /sink HTTP/1.1\r\nhost: bench\r\ncontent-length: {bytes}\r\n\r\n")?;
    for _ in 0..bytes / BUFFER_BYTES as u64 {
        stream.write_all(&block)?;
    }
    let (length, mut answer) = read_head(&mut stream)?;
    stream.take(length - answer.len() as u64).read_to_end(&mut answer)?;
    let received: u64 = String::from_utf8(answer)?.parse()?;
    ensure!(received == bytes, "{received} of {bytes} bytes arrived");
    Ok(bytes as f64 / 1e6 / start.elapsed().as_secs_f64())
}
