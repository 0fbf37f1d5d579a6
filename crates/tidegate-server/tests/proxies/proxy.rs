use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::support::TEST_TIMEOUT;

/// Files and command line of a proxy of `deploy/`.
pub(crate) struct Recipe<'a> {
    pub(crate) program: &'static str,
    pub(crate) arguments: &'static [&'static str],
    pub(crate) files: &'static [&'static str],
    /// Replacements in the files for the test, besides ports.
    pub(crate) changes: &'a [(&'a str, &'a str)],
    pub(crate) environment: &'a [(&'a str, &'a str)],
}

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    process: Child,
    folder: tempfile::TempDir,
}

/// Reads a file of `deploy/`.
pub(crate) fn deployed(file: &str) -> String {
    let path = root().join("deploy").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Applies replacements, each of which must match.
pub(crate) fn changed(text: &str, changes: &[(&str, &str)]) -> String {
    changes.iter().fold(text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from:?} is not in\n{text}");
        text.replace(from, to)
    })
}

impl Proxy {
    /// Starts the proxy in front of the application. The port of Tidegate in the files (8080, or
    /// 8081 for gRPC) is replaced.
    pub(crate) fn start(recipe: &Recipe<'_>, app: u16, tidegate: (u16, &str)) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let tidegate_port: u16 =
            tidegate.1.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
        let ports = [(8000, address.port()), (3000, app), (tidegate.0, tidegate_port)];
        let mut all =
            recipe.files.iter().map(|file| deployed(file)).collect::<Vec<_>>().join("\u{0}");
        // In two steps, because a new port may start with the digits of one that is still to be
        // replaced.
        let placeholder = |number: usize| format!("\u{1}{number}\u{1}");
        for (number, (from, _)) in ports.iter().enumerate() {
            let as_envoy =
                (format!("port_value: {from}"), format!("port_value: {}", placeholder(number)));
            let usual = (format!(":{from}"), format!(":{}", placeholder(number)));
            let (from, to) = if all.contains(&as_envoy.0) { as_envoy } else { usual };
            all = changed(&all, &[(&from, &to)]);
        }
        for (number, (_, to)) in ports.iter().enumerate() {
            all = all.replace(&placeholder(number), &to.to_string());
        }
        let all = changed(&all, recipe.changes);
        for (file, text) in recipe.files.iter().zip(all.split('\u{0}')) {
            let name = Path::new(file).file_name().expect("a name");
            fs::write(folder.path().join(name), text).expect("written");
        }
        let mut proxy = Self::launch(recipe, folder, address);
        let has_decided = |proxy: &Self| {
            let response = Client(99).send(proxy.address, "GET", "/ready", &[], "");
            response.is_ok_and(|response| [200, 429].contains(&response.status))
        };
        proxy.wait_until("the proxy uses Tidegate", has_decided);
        proxy
    }

    /// Starts the program in a folder with its files.
    pub(crate) fn launch(
        recipe: &Recipe<'_>,
        folder: tempfile::TempDir,
        address: SocketAddr,
    ) -> Self {
        let log = File::create(folder.path().join("log")).expect("a log");
        let process = Command::new(program(recipe.program))
            .args(recipe.arguments)
            .current_dir(folder.path())
            .env_clear()
            .env("HOME", folder.path())
            .envs(recipe.environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| {
                panic!("{} cannot be started ({error}): run `make setup`", recipe.program)
            });
        Self { address, process, folder }
    }

    pub(crate) fn wait_until(&mut self, what: &str, happened: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !happened(self) {
            let ended = self.process.try_wait().expect("our own child");
            let log = || fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            assert!(ended.is_none(), "the proxy exited ({ended:?}); output:\n{}", log());
            assert!(
                Instant::now() < deadline,
                "timeout while waiting until {what}; output:\n{}",
                log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Proxy {
    /// Sends SIGTERM first, so that nginx stops its workers.
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.process.id().to_string()).status();
        let deadline = Instant::now() + Duration::from_secs(3);
        while Instant::now() < deadline && matches!(self.process.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Returns the path where `make setup` installs a program.
fn program(name: &str) -> PathBuf {
    let directories =
        [root().join(".venv/bin"), "/usr/sbin".into(), "/usr/bin".into(), "/usr/local/sbin".into()];
    let found = directories.iter().map(|directory| directory.join(name)).find(|file| file.exists());
    found.unwrap_or_else(|| panic!("{name} is not installed: run `make setup`"))
}

/// Returns a different port each time, outside the system's ephemeral range.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = u16::try_from(std::process::id() % 90).expect("small") * 100;
    for _ in 0..1_000 {
        let port = 22_000 + (start + NEXT.fetch_add(1, Ordering::Relaxed)) % 9_000;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port");
}
