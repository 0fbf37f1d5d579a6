use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use crate::namespace::NetworkNamespace;
use crate::support::folder_in_memory;

/// Time after which a test is considered hanging. A Sentinel that stalled for two seconds pauses
/// for half a minute (TILT), which may happen on a busy machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(90);

/// Redis process, killed on drop.
pub(crate) struct Server {
    process: Child,
    pub(crate) port: u16,
    launch: Launch,
    folder: tempfile::TempDir,
}

/// Options of a server.
#[derive(Clone)]
pub(crate) struct Launch {
    host: String,
    options: Vec<String>,
    /// Clock offset in seconds, with a sign.
    clock: Option<&'static str>,
    namespace: Option<String>,
    /// Lines of a Sentinel's configuration file.
    sentinel: Option<String>,
}

impl Launch {
    pub(crate) fn new() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            options: Vec::new(),
            clock: None,
            namespace: None,
            sentinel: None,
        }
    }

    pub(crate) fn with(mut self, option: &str, value: &str) -> Self {
        self.options.extend([format!("--{option}"), value.to_owned()]);
        self
    }

    pub(crate) fn replica_of(self, primary: &Server) -> Self {
        self.with("replicaof", &format!("127.0.0.1 {}", primary.port))
    }

    /// Sets the clock offset in seconds.
    pub(crate) fn clock(mut self, seconds: &'static str) -> Self {
        self.clock = Some(seconds);
        self
    }

    pub(crate) fn inside(mut self, namespace: &NetworkNamespace) -> Self {
        self.namespace = Some(namespace.namespace.clone());
        self.host.clone_from(&namespace.inside);
        self.with("protected-mode", "no")
    }

    pub(crate) fn sentinel(mut self, lines: &str) -> Self {
        self.sentinel = Some(lines.to_owned());
        self
    }

    pub(crate) fn start(self) -> Server {
        // Another program may take the port before the server starts.
        for _ in 0..5 {
            let (port, folder) = (free_port(), folder_in_memory());
            if let Some(process) = self.run(port, folder.path()) {
                return Server { process, port, launch: self, folder };
            }
        }
        panic!("redis-server did not start in five attempts");
    }

    /// Waits until the server responds; `None` if it exited.
    fn run(&self, port: u16, folder: &Path) -> Option<Child> {
        let mut process = self.command(port, folder).spawn().unwrap_or_else(|error| {
            panic!("redis-server cannot be started ({error}): install it with `make setup`");
        });
        let deadline = Instant::now() + TEST_TIMEOUT;
        while Instant::now() < deadline {
            if process.try_wait().expect("our own child").is_some() {
                return None;
            }
            if self.responds(port) {
                return process.try_wait().expect("our own child").is_none().then_some(process);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = process.kill();
        let _ = process.wait();
        None
    }

    fn command(&self, port: u16, folder: &Path) -> Command {
        let mut command = match &self.namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace, "redis-server"]);
                command
            }
            None => Command::new("redis-server"),
        };
        if let Some(lines) = &self.sentinel {
            let file = folder.join("sentinel.conf");
            std::fs::write(&file, lines).expect("written");
            command.arg(file).arg("--sentinel");
        } else {
            command.args(["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]);
        }
        command
            .args(["--bind", &self.host, "--port", &port.to_string(), "--dir"])
            .arg(folder)
            .args(&self.options);
        if let Some(seconds) = self.clock {
            // The `faketime` tool hangs with Debian's Redis: its library allocates memory while
            // jemalloc, which Redis uses, asks it for the time. Preloading the C library's malloc
            // avoids that.
            let library = faketime();
            let c = library
                .parent()
                .and_then(Path::parent)
                .expect("/usr/lib/…/faketime")
                .join("libc.so.6");
            command.env("LD_PRELOAD", format!("{} {}", library.display(), c.display()));
            command.env("FAKETIME", seconds).env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn responds(&self, port: u16) -> bool {
        let send = || {
            let mut stream = TcpStream::connect((self.host.as_str(), port))?;
            stream.set_read_timeout(Some(Duration::from_secs(1)))?;
            stream.write_all(b"PING\r\n")?;
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line)
        };
        send().is_ok_and(|read| read > 0)
    }
}

impl Server {
    pub(crate) fn start() -> Self {
        Launch::new().start()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}:{}", self.launch.host, self.port)
    }

    pub(crate) fn address(&self) -> (&str, u16) {
        (&self.launch.host, self.port)
    }

    /// Returns the store section of a configuration.
    pub(crate) fn store(&self) -> String {
        format!("redis: '{}'", self.url())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent =
            Command::new("kill").arg(format!("-{name}")).arg(self.pid().to_string()).status();
        assert!(sent.expect("kill runs").success());
    }

    /// Kills the server without a shutdown.
    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("our own child");
        self.process.wait().expect("our own child");
    }

    /// Restarts the server empty, on the same port.
    pub(crate) fn restart(&mut self) {
        self.process =
            self.launch.run(self.port, self.folder.path()).expect("the port is free again");
    }

    pub(crate) fn connection(&self) -> redis::Connection {
        let client = redis::Client::open(self.url()).expect("a URL");
        let connection =
            client.get_connection_with_timeout(TEST_TIMEOUT).expect("the server responds");
        connection.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        connection
    }

    pub(crate) fn query<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        command(&mut self.connection(), words)
    }

    /// Returns a value of INFO; empty while the server does not respond. (Sentinels close the
    /// connections of a promoted replica.)
    pub(crate) fn info(&self, name: &str) -> String {
        let send = |client: redis::Client| {
            let mut connection = client.get_connection_with_timeout(TEST_TIMEOUT)?;
            connection.set_read_timeout(Some(TEST_TIMEOUT))?;
            redis::cmd("INFO").arg("everything").query::<String>(&mut connection)
        };
        let text = redis::Client::open(self.url()).and_then(send).unwrap_or_default();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::to_owned));
        line.unwrap_or_default()
    }

    pub(crate) fn is_primary(&self) -> bool {
        self.info("role") == "master"
    }

    pub(crate) fn keys_without_expiry(&self, pattern: &str) -> Vec<String> {
        let mut connection = self.connection();
        let keys: Vec<String> = command(&mut connection, &["KEYS", pattern]);
        keys.into_iter()
            .filter(|key| command::<i64>(&mut connection, &["PTTL", key]) == -1)
            .collect()
    }

    /// Waits until a condition holds and returns that time.
    pub(crate) fn wait_until(&self, what: &str, happened: impl Fn(&Self) -> bool) -> Instant {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            if happened(self) {
                return Instant::now();
            }
            assert!(Instant::now() < deadline, "timeout while waiting until {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn command<T: redis::FromRedisValue>(
    connection: &mut redis::Connection,
    words: &[&str],
) -> T {
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]);
    command.query(connection).unwrap_or_else(|error| panic!("{words:?}: {error}"))
}

/// Returns a port that is free together with the one 10,000 above it, the cluster bus. Both are
/// below the system's ephemeral range.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    let start = u16::try_from(std::process::id() % 100).expect("small") * 100;
    for _ in 0..10_000 {
        let port = 11_000 + (start + NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000;
        if free(port) && free(port + 10_000) {
            return port;
        }
    }
    panic!("no free port");
}

fn faketime() -> PathBuf {
    let folders = std::fs::read_dir("/usr/lib").expect("a directory").flatten();
    let library = folders
        .map(|folder| folder.path().join("faketime/libfaketime.so.1"))
        .find(|file| file.exists());
    library.expect("libfaketime: install it with `make setup`")
}
