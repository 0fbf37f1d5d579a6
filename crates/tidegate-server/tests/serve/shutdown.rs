//! Shutdown without failed requests: alone, and behind a load balancer that follows `/readyz`.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Service, TEST_TIMEOUT, free_port};

const POLICY: &str =
    "policies: [{name: all, limit: 1000000000000, window: 1h, algorithm: fixed-window}]\n";
const BODY: &str = r#"{"policy": "all", "key": "k"}"#;
/// Number of clients that send requests without a pause.
const CLIENTS: usize = 4;

fn service(delay: &str) -> Service {
    Service::start(&format!(
        "listen: {{http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0', \
         shutdown_delay: {delay}}}\n{POLICY}"
    ))
}

#[test]
fn requests_are_accepted_until_the_delay_ends() {
    let mut service = service("3s");
    let start = Instant::now();
    service.signal("TERM");
    service.wait_until("it is not ready", |service| service.admin("/readyz").status == 503);
    if start.elapsed() < Duration::from_millis(2_500) {
        assert_eq!(service.acquire(&json!({"policy": "all", "key": "k"})).status, 200);
    }
    assert!(service.wait_for_exit().success());
    assert!(start.elapsed() >= Duration::from_secs(3));
    let output = service.output();
    assert!(output.contains("not ready, accepting requests until"), "{output}");
}

#[test]
fn second_signal_ends_the_delay() {
    for second in ["TERM", "INT"] {
        let mut service = service("5m");
        service.signal("TERM");
        service.wait_until("it is not ready", |service| service.admin("/readyz").status == 503);
        assert_eq!(service.acquire(&json!({"policy": "all", "key": "k"})).status, 200);
        service.signal(second);
        assert!(service.wait_for_exit().success());
    }
}

/// Load balancer in front of two instances. It repeats no request.
struct Balancer {
    process: Child,
    port: u16,
    stats_port: u16,
    folder: tempfile::TempDir,
}

impl Balancer {
    fn start(instances: &[&Service], check_interval: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let (port, stats_port) = (free_port(), free_port());
        let servers = instances.iter().enumerate().map(|(index, service)| {
            let admin = service.admin.rsplit(':').next().expect("a port");
            format!(
                "  server s{index} {} check port {admin} inter {check_interval} fall 1 rise 1\n",
                service.http
            )
        });
        let config = format!(
            "defaults\n  mode http\n  retries 0\n  timeout connect 5s\n  timeout client 20s\n  \
             timeout server 20s\n  timeout check 5s\n\
             frontend in\n  bind 127.0.0.1:{port}\n  default_backend tidegate\n\
             backend tidegate\n  balance roundrobin\n  option httpchk GET /readyz\n\
             {}listen stats\n  bind 127.0.0.1:{stats_port}\n  stats enable\n  stats uri /stats\n",
            servers.collect::<String>()
        );
        let file = folder.path().join("haproxy.cfg");
        fs::write(&file, config).expect("written");
        let log = File::create(folder.path().join("log")).expect("a log");
        let process = Command::new("/usr/sbin/haproxy")
            .args(["-db", "-f"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log"))
            .stderr(log)
            .spawn()
            .expect("haproxy is installed by `make setup`");
        let balancer = Self { process, port, stats_port, folder };
        balancer.wait_for_states(&vec!["UP"; instances.len()]);
        balancer
    }

    /// Waits until the instances have these states.
    fn wait_for_states(&self, expected: &[&str]) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let states = self.states();
            if states.len() == expected.len()
                && states.iter().zip(expected).all(|(state, expected)| state.starts_with(expected))
            {
                return;
            }
            let log = || fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "states {states:?}; output:\n{}", log());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the states of the instances, such as UP or DOWN.
    fn states(&self) -> Vec<String> {
        let response = exchange(self.stats_port, "GET /stats;csv HTTP/1.0\r\n\r\n");
        let rows = response.unwrap_or_default();
        let rows = rows.lines().filter(|line| line.starts_with("tidegate,s"));
        rows.filter_map(|row| row.split(',').nth(17).map(str::to_owned)).collect()
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn exchange(port: u16, request: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(TEST_TIMEOUT))?;
    stream.write_all(request.as_bytes())?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    Ok(response)
}

/// Sends requests by several clients while `action` runs. Returns the numbers of requests and of
/// failures.
fn under_load(port: u16, action: impl FnOnce(&AtomicU64)) -> (u64, u64) {
    let (stop, sent, failed) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let request = format!(
        "POST /v1/acquire HTTP/1.1\r\nHost: tidegate\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let response = exchange(port, &request);
                    let is_ok = response.is_ok_and(|text| text.starts_with("HTTP/1.1 200 "));
                    failed.fetch_add(u64::from(!is_ok), Ordering::Relaxed);
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        action(&sent);
        stop.store(true, Ordering::Relaxed);
    });
    (sent.into_inner(), failed.into_inner())
}

/// Waits until this number of further requests was answered.
fn wait_for_requests(sent: &AtomicU64, count: u64) {
    let (start, deadline) = (sent.load(Ordering::Relaxed), Instant::now() + TEST_TIMEOUT);
    while sent.load(Ordering::Relaxed) < start + count {
        assert!(Instant::now() < deadline, "{} requests", sent.load(Ordering::Relaxed) - start);
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn no_request_fails_behind_a_balancer_that_follows_readyz() {
    let (mut stopping, staying) = (service("5m"), service("5m"));
    let balancer = Balancer::start(&[&stopping, &staying], "100ms");
    let (sent, failed) = under_load(balancer.port, |sent| {
        wait_for_requests(sent, 200);
        stopping.signal("TERM");
        balancer.wait_for_states(&["DOWN", "UP"]);
        wait_for_requests(sent, 100);
        // The delay is longer than any test; a second signal ends it.
        stopping.signal("TERM");
        assert!(stopping.wait_for_exit().success());
        wait_for_requests(sent, 200);
    });
    println!("{sent} requests, {failed} failed");
    assert_eq!(failed, 0, "of {sent}");
    assert!(stopping.output().contains("stopped"), "{}", stopping.output());
}

/// The same without a delay, to show that the test above can fail: requests fail until the balancer
/// notices.
#[test]
fn requests_fail_behind_a_balancer_without_a_delay() {
    let (mut stopping, staying) = (service("0s"), service("0s"));
    let balancer = Balancer::start(&[&stopping, &staying], "2s");
    let (sent, failed) = under_load(balancer.port, |sent| {
        wait_for_requests(sent, 200);
        stopping.signal("TERM");
        assert!(stopping.wait_for_exit().success());
        balancer.wait_for_states(&["DOWN", "UP"]);
        wait_for_requests(sent, 100);
    });
    println!("{sent} requests, {failed} failed");
    assert!(failed > 0, "of {sent}");
}
