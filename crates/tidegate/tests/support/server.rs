//! A real Redis for tests: started on a free port of the loopback, stopped by its process id.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) struct Redis {
    process: Child,
    port: u16,
    folder: tempfile::TempDir,
}

impl Redis {
    /// A server of its own for one test.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(options: &[&str]) -> Self {
        // The port may be taken between our look and the server's start: then try another.
        for _ in 0..5 {
            if let Some(redis) = Self::try_start(options) {
                return redis;
            }
        }
        panic!("redis-server did not start in five tries");
    }

    fn try_start(options: &[&str]) -> Option<Self> {
        let port =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port").local_addr().expect("bound").port();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let process = launch(port, folder.path(), options)?;
        Some(Self { process, port, folder })
    }

    /// Ends the server and starts it again with what it had saved.
    pub(crate) fn restart(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.process = launch(self.port, self.folder.path(), &[]).expect("the port is free again");
    }

    /// Sends the server's process a signal by name.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.process.id().to_string()).status();
        assert!(sent.expect("kill runs").success());
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// For plain commands.
    pub(crate) fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url()).and_then(|client| client.get_connection()).expect("our own server answers")
    }

    pub(crate) fn query<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query(&mut self.connection()).expect("a plain command")
    }

    /// No key may be left without an expiry.
    pub(crate) fn assert_every_key_expires(&self) {
        let mut connection = self.connection();
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).expect("KEYS");
        for key in keys {
            let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).expect("PTTL");
            assert_ne!(ttl, -1, "{key} has no expiry");
        }
    }
}

/// The running server, once it answers; `None` if it ended.
fn launch(port: u16, folder: &Path, options: &[&str]) -> Option<Child> {
    let mut process = Command::new("redis-server")
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(["--port", &port.to_string()])
        .arg("--dir")
        .arg(folder)
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("redis-server cannot be started ({error}): install it with `make setup`"));
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        if process.try_wait().expect("our own child").is_some() {
            return None;
        }
        if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
            // Another program may have got the port: then ours has ended, or soon will.
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
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
