//! The binary under the name of envoyproxy/ratelimit's program, with the variables that Envoy
//! Gateway sets.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tidegate_api::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tonic::transport::Channel;

use crate::support::{self, Redis, Response, TEST_TIMEOUT, free_port};

const BINARY: &str = env!("CARGO_BIN_EXE_tidegate");

/// Running program, with its folder.
pub(crate) struct Program {
    process: Child,
    output: Arc<Mutex<String>>,
    pub(crate) http: String,
    pub(crate) grpc: String,
    pub(crate) debug: String,
    pub(crate) metrics: String,
    _folder: tempfile::TempDir,
}

/// Variables of a program.
#[derive(Clone, Default)]
pub(crate) struct Variables(pub(crate) BTreeMap<String, String>);

impl Variables {
    /// Returns those that Envoy Gateway sets, on free ports of this host, without TLS.
    pub(crate) fn of_gateway(control_plane: &str, redis: &Redis) -> Self {
        let port = || free_port().to_string();
        let redis = format!("127.0.0.1:{}", redis.port());
        let metrics = format!("127.0.0.1:{}", free_port());
        Self::default()
            .with("CONFIG_TYPE", "GRPC_XDS_SOTW")
            .with("CONFIG_GRPC_XDS_SERVER_URL", control_plane)
            .with("CONFIG_GRPC_XDS_NODE_ID", "envoy-ratelimit")
            .with("FORCE_START_WITHOUT_INITIAL_CONFIG", "true")
            .with("RUNTIME_ROOT", "/data")
            .with("RUNTIME_SUBDIRECTORY", "ratelimit")
            .with("RUNTIME_IGNOREDOTFILES", "true")
            .with("RUNTIME_WATCH_ROOT", "false")
            .with("LOG_LEVEL", "info")
            .with("USE_STATSD", "false")
            .with("REDIS_SOCKET_TYPE", "tcp")
            .with("REDIS_URL", &redis)
            .with("USE_PROMETHEUS", "true")
            .with("PROMETHEUS_ADDR", &metrics)
            .with("HOST", "127.0.0.1")
            .with("PORT", &port())
            .with("GRPC_HOST", "127.0.0.1")
            .with("GRPC_PORT", &port())
            .with("DEBUG_HOST", "127.0.0.1")
            .with("DEBUG_PORT", &port())
            .with("TIDEGATE_LISTEN_ADMIN", "127.0.0.1:0")
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.0.insert(name.to_owned(), value.to_owned());
        self
    }

    fn address(&self, host: &str, port: &str) -> String {
        format!("{}:{}", self.0[host], self.0[port])
    }
}

/// Returns the program in a folder, under its other name.
pub(crate) fn program_in(folder: &Path) -> Command {
    let program = folder.join("ratelimit");
    symlink(BINARY, &program).expect("a symlink");
    Command::new(program)
}

impl Program {
    pub(crate) fn start(variables: &Variables) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        Self::start_by(program_in(folder.path()), folder, variables)
    }

    /// Starts a command that runs the program.
    pub(crate) fn start_by(
        mut command: Command,
        folder: tempfile::TempDir,
        variables: &Variables,
    ) -> Self {
        let mut process = command
            .env_clear()
            .envs(&variables.0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let output = Arc::default();
        support::collect(process.stderr.take().expect("piped"), Arc::clone(&output));
        let program = Self {
            process,
            output,
            http: variables.address("HOST", "PORT"),
            grpc: variables.address("GRPC_HOST", "GRPC_PORT"),
            debug: variables.address("DEBUG_HOST", "DEBUG_PORT"),
            metrics: variables.0["PROMETHEUS_ADDR"].clone(),
            _folder: folder,
        };
        program.wait_until_logged("listening as envoyproxy/ratelimit");
        program
    }

    pub(crate) fn output(&self) -> String {
        self.output.lock().expect("no panic").clone()
    }

    pub(crate) fn wait_until(&self, what: &str, mut happened: impl FnMut() -> bool) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !happened() {
            let output = self.output();
            assert!(Instant::now() < deadline, "timeout while waiting until {what}:\n{output}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn wait_until_logged(&self, text: &str) {
        self.wait_until(&format!("{text:?} is logged"), || self.output().contains(text));
    }

    pub(crate) fn health(&self) -> (u16, String) {
        let response = get(&self.http, "/healthcheck");
        (response.status, response.body)
    }

    pub(crate) fn json(&self, body: &str) -> Response {
        support::request(&self.http, "POST", "/json", &[], body.as_bytes())
    }

    pub(crate) fn rules(&self) -> String {
        get(&self.debug, "/rlconfig").body
    }

    /// Returns the value of a metric.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = get(&self.metrics, "/metrics").body;
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().expect("a number")
    }

    pub(crate) async fn client(&self) -> RateLimitServiceClient<Channel> {
        let address = format!("http://{}", self.grpc);
        let channel = Channel::from_shared(address).expect("an address").connect().await;
        RateLimitServiceClient::new(channel.expect("the program listens"))
    }

    pub(crate) fn terminate(&self) {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").arg(id).status().expect("kill runs").success());
    }

    pub(crate) fn wait_for_exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            if let Some(status) = self.process.try_wait().expect("our own child") {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not exit:\n{}", self.output());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

pub(crate) fn get(address: &str, path: &str) -> Response {
    support::request(address, "GET", path, &[], b"")
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
