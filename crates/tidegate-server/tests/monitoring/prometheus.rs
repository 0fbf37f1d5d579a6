//! [`Prometheus`]: a real Prometheus that scrapes services once per second, and [`Load`].

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{free_port, raw};

/// Time for everything that a test waits for. It is long because the machine may be busy.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) struct Prometheus {
    process: Child,
    address: String,
    _folder: tempfile::TempDir,
}

impl Prometheus {
    /// Starts a server with these rules that scrapes these services: the job and the address of
    /// each. Services may share a job.
    pub(crate) fn start(rules: &str, targets: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let mut config = "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: \
                          1s}\nrule_files: [rules.yaml]\nscrape_configs:\n"
            .to_owned();
        let jobs: BTreeSet<&str> = targets.iter().map(|(job, _)| *job).collect();
        for job in jobs {
            let of_job = targets.iter().filter(|(other, _)| *other == job);
            let addresses = of_job.map(|(_, address)| format!("'{address}'")).collect::<Vec<_>>();
            let addresses = addresses.join(", ");
            let _ = writeln!(
                config,
                "  - {{job_name: {job}, static_configs: [{{targets: [{addresses}]}}]}}"
            );
        }
        std::fs::write(folder.path().join("prometheus.yaml"), config).expect("written");
        std::fs::write(folder.path().join("rules.yaml"), rules).expect("written");
        // Another process may take the port before Prometheus does: then try another one.
        for _ in 0..5 {
            if let Some((process, address)) = launch(folder.path()) {
                return Self { process, address, _folder: folder };
            }
        }
        panic!("prometheus did not start");
    }

    /// Calls the HTTP API, and returns its data.
    fn get(&self, path: &str) -> Value {
        // HTTP/1.0, because a response of HTTP/1.1 may be chunked.
        let request = format!("GET {path} HTTP/1.0\r\nHost: {}\r\n\r\n", self.address);
        let response = raw(&self.address, request.as_bytes());
        let mut body = response.json();
        assert_eq!(body["status"], "success", "{path}: {body}");
        body["data"].take()
    }

    /// Evaluates a query now, and returns the series of its result.
    pub(crate) fn query(&self, query: &str) -> Vec<Value> {
        let mut path = "/api/v1/query?query=".to_owned();
        for byte in query.bytes() {
            let _ = write!(path, "%{byte:02X}");
        }
        match self.get(&path)["result"].take() {
            Value::Array(series) => series,
            other => panic!("{query}: {other}"),
        }
    }

    /// Returns the alerts that fire, each with its name and job.
    pub(crate) fn firing(&self) -> Vec<(String, String)> {
        let alerts = self.get("/api/v1/alerts")["alerts"].take();
        let alerts = alerts.as_array().expect("a list").iter();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        alerts
            .filter(|alert| alert["state"] == "firing")
            .map(|alert| (text(&alert["labels"]["alertname"]), text(&alert["labels"]["job"])))
            .collect()
    }

    /// Waits until a condition holds. The condition returns an error that says what is missing.
    pub(crate) fn wait_until(&self, mut condition: impl FnMut(&Self) -> Result<(), String>) {
        let deadline = Instant::now() + DEADLINE;
        while let Err(missing) = condition(self) {
            assert!(Instant::now() < deadline, "still missing: {missing}");
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts Prometheus in a folder. Returns `None` if its port is in use.
fn launch(folder: &Path) -> Option<(Child, String)> {
    let address = format!("127.0.0.1:{}", free_port());
    let mut process = Command::new("prometheus")
        .arg("--config.file=prometheus.yaml")
        .arg(format!("--web.listen-address={address}"))
        .args(["--storage.tsdb.path=data", "--log.level=error"])
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| {
            panic!("prometheus cannot be started ({error}): `make setup` installs it")
        });
    let deadline = Instant::now() + DEADLINE;
    while process.try_wait().expect("our own child").is_none() {
        assert!(Instant::now() < deadline, "prometheus does not listen");
        let is_ready = TcpStream::connect(&address).is_ok() && {
            let request = format!("GET /-/ready HTTP/1.0\r\nHost: {address}\r\n\r\n");
            raw(&address, request.as_bytes()).status == 200
        };
        if is_ready {
            return Some((process, address));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    None
}

/// `tidegate bench` against a service, until it is dropped.
pub(crate) struct Load(Child);

impl Load {
    /// Sends this number of requests per second to a policy.
    pub(crate) fn start(address: &str, policy: &str, rate: u32, keys: u32) -> Self {
        let process = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["bench", "--http", &format!("http://{address}"), "--policy", policy])
            .args(["--rate", &rate.to_string(), "--keys", &keys.to_string()])
            .args(["--duration", "10m", "--warmup", "0s", "--timeout", "60s"])
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(process.expect("the binary starts"))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs promtool in the folder of the rules, and returns its output.
pub(crate) fn promtool(arguments: &[&str], input: &str) -> String {
    use std::io::Write as _;
    let mut process = Command::new("promtool")
        .args(arguments)
        .current_dir(crate::repository("deploy/prometheus"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| {
            panic!("promtool cannot be started ({error}): `make setup` installs it")
        });
    let mut stdin = process.stdin.take().expect("piped");
    stdin.write_all(input.as_bytes()).expect("promtool reads its input");
    drop(stdin);
    let output = process.wait_with_output().expect("promtool exits");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "promtool {arguments:?}: {text}");
    text
}
