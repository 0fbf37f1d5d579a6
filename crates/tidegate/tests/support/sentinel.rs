//! A real primary with replicas, monitored by three sentinels.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::server::{Redis, folder_in_memory, free_port};

pub(crate) const NAME: &str = "the-primary";

pub(crate) struct Sentinels {
    servers: Vec<Redis>,
    sentinels: Vec<Sentinel>,
}

struct Sentinel {
    process: Child,
    port: u16,
    password: Option<&'static str>,
    _folder: tempfile::TempDir,
}

impl Sentinels {
    /// Starts a primary, two replicas and three sentinels.
    pub(crate) fn start() -> Self {
        Self::start_with(&[], "", None)
    }

    /// Starts them with `options` for the servers, and `lines` and a password for the sentinels.
    pub(crate) fn start_with(
        options: &[&str],
        lines: &str,
        password: Option<&'static str>,
    ) -> Self {
        let mut all = vec!["--repl-diskless-sync-delay", "0"];
        all.extend(options);
        let primary = Redis::start_with(&all);
        let port = primary.port().to_string();
        let replica_of = ["--replicaof", "127.0.0.1", &port];
        let replica: Vec<&str> = all.iter().copied().chain(replica_of).collect();
        let servers = vec![primary, Redis::start_with(&replica), Redis::start_with(&replica)];
        let sentinels = (0..3).map(|_| Sentinel::start(&port, lines, password)).collect();
        let all = Self { servers, sentinels };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !all.is_complete() {
            assert!(Instant::now() < deadline, "the sentinels have not found all nodes");
            std::thread::sleep(Duration::from_millis(50));
        }
        all
    }

    fn is_complete(&self) -> bool {
        self.sentinels.iter().all(|sentinel| {
            let info = sentinel.info();
            info.contains("slaves=2,sentinels=3") && info.contains("status=ok")
        })
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.sentinels
            .iter()
            .map(|sentinel| format!("redis://127.0.0.1:{}", sentinel.port))
            .collect()
    }

    pub(crate) fn servers(&self) -> &[Redis] {
        &self.servers
    }

    pub(crate) fn server_mut(&mut self, index: usize) -> &mut Redis {
        &mut self.servers[index]
    }

    /// Returns the index of a server other than the old primary that reports to be a primary.
    pub(crate) fn promoted(&self, old_primary: usize) -> Option<usize> {
        (0..self.servers.len())
            .filter(|index| *index != old_primary)
            .find(|index| self.servers[*index].query::<redis::Value>(&["ROLE"]).is_primary())
    }

    /// Sends a signal to one sentinel.
    pub(crate) fn signal(&self, index: usize, name: &str) {
        let id = self.sentinels[index].process.id().to_string();
        let sent = Command::new("kill").arg(format!("-{name}")).arg(id).status();
        assert!(sent.expect("kill runs").success());
    }
}

trait IsPrimary {
    fn is_primary(&self) -> bool;
}

impl IsPrimary for redis::Value {
    fn is_primary(&self) -> bool {
        let Self::Array(parts) = self else { return false };
        matches!(parts.first(), Some(Self::BulkString(role)) if role == b"master")
    }
}

impl Sentinel {
    fn start(primary_port: &str, lines: &str, password: Option<&'static str>) -> Self {
        let folder = folder_in_memory();
        let port = free_port();
        let file = folder.path().join("sentinel.conf");
        let text = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\n\
             sentinel monitor {NAME} 127.0.0.1 {primary_port} 2\n\
             sentinel down-after-milliseconds {NAME} 700\n\
             sentinel failover-timeout {NAME} 3000\n{lines}\n",
            folder.path().display()
        );
        let require_password =
            password.map_or_else(String::new, |password| format!("requirepass {password}\n"));
        let text = text + &require_password;
        std::fs::write(&file, text).expect("written");
        let process = launch(&file);
        Self { process, port, password, _folder: folder }
    }

    fn info(&self) -> String {
        let password = self.password.map_or_else(String::new, |password| format!(":{password}@"));
        let client = redis::Client::open(format!("redis://{password}127.0.0.1:{}", self.port))
            .expect("a URL");
        let Ok(mut connection) = client.get_connection_with_timeout(Duration::from_secs(1)) else {
            return String::new();
        };
        redis::cmd("INFO").arg("sentinel").query(&mut connection).unwrap_or_default()
    }
}

fn launch(file: &Path) -> Child {
    Command::new("redis-server")
        .arg(file)
        .arg("--sentinel")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server is installed by `make setup`")
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
