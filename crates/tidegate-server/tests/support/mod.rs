//! Runs the real service for tests: on free ports, called over the network, killed by process id.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

#[path = "../../../tidegate/tests/support/cluster.rs"]
mod cluster;
#[path = "../../../tidegate/tests/support/server.rs"]
mod server;
#[path = "../../../tidegate/tests/support/strict.rs"]
mod strict;
#[allow(unused_imports, reason = "each test binary uses its own part")]
pub(crate) use cluster::Cluster;
#[allow(unused_imports, reason = "each test binary uses its own part")]
pub(crate) use server::{Redis, folder_in_memory, free_port, valkey_9};
#[allow(unused_imports, reason = "each test binary uses its own part")]
pub(crate) use strict::{ClusterView, Databases, Refusal, Restrictions, ScriptCache, StrictServer};

/// Time after which a test is considered hanging.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(20);

const BINARY: &str = env!("CARGO_BIN_EXE_tidegate");

pub(crate) struct Service {
    process: Child,
    pub(crate) http: String,
    pub(crate) grpc: Option<String>,
    pub(crate) admin: String,
    output: Arc<Mutex<String>>,
    folder: tempfile::TempDir,
}

/// HTTP response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Service {
    /// Starts the service with a configuration, on free loopback ports.
    pub(crate) fn start(config: &str) -> Self {
        Self::start_with(config, &[])
    }

    pub(crate) fn start_with(config: &str, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, with_free_ports(config)).expect("written");
        Self::start_on(folder, &file, arguments)
    }

    /// Starts the service with only these environment variables.
    pub(crate) fn start_with_environment(config: &str, environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, with_free_ports(config)).expect("written");
        Self::launch("serve", folder, &file, &[], environment)
    }

    /// Starts a gateway. Its address is in `http`.
    pub(crate) fn gateway(config: &str, upstreams: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(folder.path().join("tidegate.yaml"), with_free_ports(config))
            .expect("written");
        Self::gateway_in(folder, upstreams)
    }

    /// Starts a gateway with these variables in its environment, which has no others.
    pub(crate) fn gateway_with_env(
        config: &str,
        upstreams: &[&str],
        environment: &[(&str, &str)],
    ) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, with_free_ports(config)).expect("written");
        let mut arguments = vec!["--listen", "127.0.0.1:0"];
        arguments.extend(upstreams.iter().flat_map(|upstream| ["--upstream", upstream]));
        Self::launch("gateway", folder, &file, &arguments, environment)
    }

    /// Starts a gateway on a directory with a tidegate.yaml and the files that it names.
    pub(crate) fn gateway_in(folder: tempfile::TempDir, upstreams: &[&str]) -> Self {
        let file = folder.path().join("tidegate.yaml");
        let config = std::fs::read_to_string(&file).expect("a configuration");
        let mut arguments = if config.contains("gateway: '127.") {
            vec![]
        } else {
            vec!["--listen", "127.0.0.1:0"]
        };
        arguments.extend(upstreams.iter().flat_map(|upstream| ["--upstream", upstream]));
        Self::launch("gateway", folder, &file, &arguments, &[])
    }

    /// Starts a gateway that may have only this number of open files.
    pub(crate) fn gateway_with_files(config: &str, upstreams: &[&str], files: u32) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, with_free_ports(config)).expect("written");
        let mut arguments = vec!["--listen", "127.0.0.1:0"];
        arguments.extend(upstreams.iter().flat_map(|upstream| ["--upstream", upstream]));
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(format!("ulimit -n {files} && exec \"$0\" \"$@\"")).arg(BINARY);
        Self::launch_by(shell, "gateway", folder, &file, &arguments, &[])
    }

    /// Starts a gateway on a directory with a tidegate.yaml, with these arguments.
    pub(crate) fn gateway_on(folder: tempfile::TempDir, arguments: &[&str]) -> Self {
        let file = folder.path().join("tidegate.yaml");
        Self::launch("gateway", folder, &file, arguments, &[])
    }

    pub(crate) fn start_on(folder: tempfile::TempDir, file: &Path, arguments: &[&str]) -> Self {
        Self::launch("serve", folder, file, arguments, &[])
    }

    fn launch(
        command: &str,
        folder: tempfile::TempDir,
        file: &Path,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Self {
        Self::launch_by(Command::new(BINARY), command, folder, file, arguments, environment)
    }

    /// Starts the service with a terminal as its standard output.
    pub(crate) fn start_on_terminal(config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, with_free_ports(config)).expect("written");
        Self::launch_on_terminal("serve", folder, &[])
    }

    /// Starts a command on a directory with a tidegate.yaml, with a terminal as its standard output.
    pub(crate) fn launch_on_terminal(
        command: &str,
        folder: tempfile::TempDir,
        arguments: &[&str],
    ) -> Self {
        let file = folder.path().join("tidegate.yaml");
        let (terminal, screen) = open_terminal();
        let mut program = Command::new(BINARY);
        program.stdout(terminal);
        let service = Self::launch_with(program, command, folder, &file, arguments, &[]);
        collect(screen, Arc::clone(&service.output));
        service
    }

    fn launch_by(
        mut program: Command,
        command: &str,
        folder: tempfile::TempDir,
        file: &Path,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Self {
        program.stdout(Stdio::piped());
        Self::launch_with(program, command, folder, file, arguments, environment)
    }

    /// Starts a program whose standard output is set.
    fn launch_with(
        mut program: Command,
        command: &str,
        folder: tempfile::TempDir,
        file: &Path,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Self {
        let mut process = program
            .args([command, "--config"])
            .arg(file)
            .args(arguments)
            .env_clear()
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        // A terminal ends when the last process has closed it.
        drop(program);
        let output = Arc::new(Mutex::new(String::new()));
        collect(process.stderr.take().expect("piped"), Arc::clone(&output));
        if let Some(stdout) = process.stdout.take() {
            collect(stdout, Arc::clone(&output));
        }
        let mut service =
            Self { process, http: String::new(), grpc: None, admin: String::new(), output, folder };
        let address = |output: &str, name: &str| {
            let (text, json) = (format!(" {name}="), format!("\"{name}\":\""));
            let (_, line) = output.split_once("listening")?;
            let (_, rest) = line.split_once(&text).or_else(|| line.split_once(&json))?;
            Some(rest.split([' ', '"', '\n']).next()?.to_owned())
        };
        service.wait_until("the service listens", |service| service.output().contains("listening"));
        let text = service.output();
        service.http = address(&text, "http").expect("an address for http");
        service.grpc = address(&text, "grpc");
        service.admin = address(&text, "admin").expect("an address for admin");
        service
    }

    pub(crate) fn folder(&self) -> PathBuf {
        self.folder.path().to_owned()
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("tidegate.yaml")
    }

    /// Returns its output so far.
    pub(crate) fn output(&self) -> String {
        self.output.lock().expect("no panic").clone()
    }

    /// Waits until a condition holds.
    pub(crate) fn wait_until(&self, what: &str, happened: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !happened(self) {
            assert!(
                Instant::now() < deadline,
                "timeout while waiting until {what}; output:\n{}",
                self.output()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the output contains a text: a thread of its own writes log lines.
    pub(crate) fn wait_until_logged(&self, text: &str) {
        self.wait_until(&format!("{text:?} is logged"), |service| service.output().contains(text));
    }

    pub(crate) fn acquire(&self, body: &Value) -> Response {
        self.post("/v1/acquire", &body.to_string())
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Response {
        request(&self.http, "POST", path, &[], body.as_bytes())
    }

    pub(crate) fn admin(&self, path: &str) -> Response {
        request(&self.admin, "GET", path, &[], b"")
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .arg(format!("-{name}"))
            .arg(self.process.id().to_string())
            .status();
        assert!(sent.expect("kill runs").success());
    }

    /// Waits until the process exits.
    pub(crate) fn wait_for_exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            if let Some(status) = self.process.try_wait().expect("our own child") {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "the process does not exit; output:\n{}",
                self.output()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the soft and the hard limit on open files.
    pub(crate) fn file_limits(&self) -> (String, String) {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", self.process.id()))
            .expect("the process runs");
        let line =
            limits.lines().find_map(|line| line.strip_prefix("Max open files")).expect("its limit");
        let mut words = line.split_whitespace().map(str::to_owned);
        (words.next().expect("soft"), words.next().expect("hard"))
    }

    /// Returns the number of open files.
    pub(crate) fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.process.id()))
            .expect("the process runs")
            .count()
    }

    /// Returns the resident memory in KiB.
    pub(crate) fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))
            .expect("the process runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Opens a new terminal, and returns it and the file from which its text is read.
fn open_terminal() -> (File, File) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    const O_NOCTTY: i32 = 0o400;
    let screen = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&screen).and_then(|()| unlockpt(&screen)).expect("its other side");
    let name = ptsname(&screen, Vec::new()).expect("its name").into_string().expect("UTF-8");
    let terminal = File::options().read(true).write(true).custom_flags(O_NOCTTY).open(name);
    (terminal.expect("its other side"), File::from(screen))
}

/// Adds free ports to a configuration without a `listen` section.
pub(crate) fn with_free_ports(config: &str) -> String {
    if config.contains("listen:") {
        return config.to_owned();
    }
    format!("listen: {{http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}}\n{config}")
}

pub(crate) fn collect(stream: impl Read + Send + 'static, output: Arc<Mutex<String>>) {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let mut output = output.lock().expect("no panic");
            output.push_str(line.trim_end_matches('\r'));
            output.push('\n');
        }
    });
}

/// Sends one request on a new connection.
pub(crate) fn request(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Response {
    let mut text = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
    for (name, value) in headers {
        let _ = write!(text, "{name}: {value}\r\n");
    }
    let _ = write!(text, "Content-Length: {}\r\n\r\n", body.len());
    let mut bytes = text.into_bytes();
    bytes.extend_from_slice(body);
    raw(address, &bytes)
}

/// Connects from an address of this host.
pub(crate) fn connect_from(source: &str, address: &str) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let stream = runtime.expect("a runtime").block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::new(source.parse().expect("an address"), 0)).expect("loopback");
        let stream = socket.connect(address.parse().expect("an address")).await;
        stream.expect("the service listens").into_std().expect("a socket")
    });
    stream.set_nonblocking(false).expect("a socket");
    stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    stream
}

/// Sends bytes and reads the response.
pub(crate) fn raw(address: &str, bytes: &[u8]) -> Response {
    let mut stream = TcpStream::connect(address).expect("the service listens");
    stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    // The service may respond and close the connection before it has read everything.
    let _ = stream.write_all(bytes);
    read_response(&mut stream)
}

pub(crate) fn read_response(stream: &mut TcpStream) -> Response {
    let mut all = Vec::new();
    let mut buffer = [0; 8192];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => all.extend_from_slice(&buffer[..length]),
            Err(error) if all.is_empty() => panic!("no response: {error}"),
            Err(_) => break,
        }
    }
    let text = String::from_utf8_lossy(&all).into_owned();
    let (head, body) =
        text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response head in {text:?}"));
    let mut lines = head.lines();
    let status =
        lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).expect("a status");
    let header = |line: &str| {
        line.split_once(": ").map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
    };
    Response { status, headers: lines.filter_map(header).collect(), body: body.to_owned() }
}
