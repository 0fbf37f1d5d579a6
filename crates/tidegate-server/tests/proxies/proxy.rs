use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::support::PATIENCE;

/// How a proxy of `deploy/` is started, in a folder with its files.
pub(crate) struct Recipe<'a> {
    pub(crate) program: &'static str,
    pub(crate) arguments: &'static [&'static str],
    pub(crate) files: &'static [&'static str],
    /// What has to be different in a test, besides ports: text of the files, and what to write
    /// instead.
    pub(crate) changes: &'a [(&'a str, &'a str)],
    pub(crate) environment: &'a [(&'a str, &'a str)],
}

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    process: Child,
    folder: tempfile::TempDir,
}

/// A file of `deploy/`.
pub(crate) fn deployed(file: &str) -> String {
    let path = root().join("deploy").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The text with each of these changes, which must be one.
pub(crate) fn changed(text: &str, changes: &[(&str, &str)]) -> String {
    changes.iter().fold(text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from:?} is not in\n{text}");
        text.replace(from, to)
    })
}

impl Proxy {
    /// In front of the application, with Tidegate at another port than the files say (8080, or 8081
    /// for gRPC).
    pub(crate) fn start(recipe: &Recipe<'_>, app: u16, tidegate: (u16, &str)) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let asked: u16 =
            tidegate.1.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
        let ports = [(8000, address.port()), (3000, app), (tidegate.0, asked)];
        let mut all =
            recipe.files.iter().map(|file| deployed(file)).collect::<Vec<_>>().join("\u{0}");
        // In two steps: a port that is written in may begin with one that is still to be changed.
        let place = |number: usize| format!("\u{1}{number}\u{1}");
        for (number, (from, _)) in ports.iter().enumerate() {
            let as_envoy =
                (format!("port_value: {from}"), format!("port_value: {}", place(number)));
            let usual = (format!(":{from}"), format!(":{}", place(number)));
            let (from, to) = if all.contains(&as_envoy.0) { as_envoy } else { usual };
            all = changed(&all, &[(&from, &to)]);
        }
        for (number, (_, to)) in ports.iter().enumerate() {
            all = all.replace(&place(number), &to.to_string());
        }
        let all = changed(&all, recipe.changes);
        for (file, text) in recipe.files.iter().zip(all.split('\u{0}')) {
            let name = Path::new(file).file_name().expect("a name");
            fs::write(folder.path().join(name), text).expect("written");
        }
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
        let mut proxy = Self { address, process, folder };
        let has_decided = |proxy: &Self| {
            let answer = Client(99).send(proxy.address, "GET", "/ready", &[], "");
            answer.is_ok_and(|answer| [200, 429].contains(&answer.status))
        };
        proxy.until("it asks Tidegate", has_decided);
        proxy
    }

    pub(crate) fn until(&mut self, what: &str, happened: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !happened(self) {
            let ended = self.process.try_wait().expect("our own child");
            let log = || fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            assert!(ended.is_none(), "it ended ({ended:?}) and wrote:\n{}", log());
            assert!(Instant::now() < deadline, "waited in vain until {what}; it wrote:\n{}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Proxy {
    /// Asked first: nginx ends its workers then.
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

/// Where `make setup` puts it.
fn program(name: &str) -> PathBuf {
    let places =
        [root().join(".venv/bin"), "/usr/sbin".into(), "/usr/bin".into(), "/usr/local/sbin".into()];
    let found = places.iter().map(|place| place.join(name)).find(|file| file.exists());
    found.unwrap_or_else(|| panic!("{name} is not there: `make setup` installs it"))
}

/// Out of the range from which the system takes ports for connections, and each given once.
fn free_port() -> u16 {
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
