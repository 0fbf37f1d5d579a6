//! The examples of `docs/redis-clients.md` run with the real clients and frameworks.

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::clients::{program, root, tool};
use crate::start;
use crate::support::{TEST_TIMEOUT, free_port, request};

const LIMIT: usize = 3;
const POLICY: &str = "policies: [{name: per-user, limit: 3, window: 1h}]\n";

/// Web application, killed on drop.
struct App(Child);

impl App {
    fn start(mut command: Command, port: u16) -> Self {
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?} ({error}): run `make setup`"));
        let mut app = Self(process);
        let deadline = Instant::now() + 2 * TEST_TIMEOUT;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(app.0.try_wait().expect("our child").is_none(), "{command:?} has exited");
            assert!(Instant::now() < deadline, "{command:?} does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        app
    }
}

impl Drop for App {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends requests to an application whose requests are limited.
fn check(name: &str, mut command: Command, port: u16) {
    let (service, address) = start(POLICY);
    command.env("TIDEGATE_URL", format!("redis://{address}"));
    let _app = App::start(command, port);
    let app = format!("127.0.0.1:{port}");
    let get = |user: &str| request(&app, "GET", "/", &[("X-User-Id", user)], b"");
    for number in 0..LIMIT {
        let response = get("ann");
        assert_eq!((response.status, response.body.contains("hello")), (200, true), "{number}");
    }
    for _ in 0..2 {
        let response = get("ann");
        assert_eq!(response.status, 429, "{name}: {response:?}");
        let wait: u64 = response.header("retry-after").expect("a wait").parse().expect("seconds");
        assert!((3_500..=3_600).contains(&wait), "{name}: {wait}");
    }
    assert_eq!(get("bob").status, 200, "{name}: another user");
    drop(service);
    assert_eq!(get("ann").status, 200, "{name}: it fails open");
}

#[test]
fn flask_example_limits_real_requests() {
    let port = free_port();
    let mut command = Command::new(program("python"));
    let file = root().join("examples/redis/flask_app.py");
    command.args(["-m", "flask", "--app"]).arg(file);
    command.args(["run", "--port", &port.to_string()]);
    check("Flask", command, port);
}

#[test]
fn fastapi_example_limits_real_requests() {
    let port = free_port();
    let mut command = Command::new(program("python"));
    command.args(["-m", "uvicorn", "fastapi_app:app", "--port", &port.to_string(), "--app-dir"]);
    command.arg(root().join("examples/redis"));
    check("FastAPI", command, port);
}

#[test]
fn page_has_the_examples_and_clients_run() {
    let page = std::fs::read_to_string(root().join("docs/redis-clients.md")).expect("the page");
    for (file, program) in [
        ("client.py", Some("python")),
        ("client.mjs", Some("node")),
        ("flask_app.py", None),
        ("fastapi_app.py", None),
        ("Client.java", None),
        ("client.go", None),
    ] {
        let text = std::fs::read_to_string(root().join("examples/redis").join(file));
        let text = text.expect("an example");
        assert!(page.contains(&format!("\n{}\n```", text.trim_end())), "{file} is not on the page");
        let Some(program) = program else { continue };
        let folder = tempfile::tempdir().expect("a folder");
        // Imports of ECMAScript modules are searched beside the file.
        let modules = root().join(".venv/node_modules").canonicalize().expect("run `make setup`");
        std::os::unix::fs::symlink(modules, folder.path().join("node_modules")).expect("a link");
        let copy = folder.path().join(file);
        let (_service, address) = start(POLICY);
        std::fs::write(&copy, text.replace("127.0.0.1:8083", &address)).expect("written");
        for (run, answer) in ["allowed, 2 left", "allowed, 1", "allowed, 0", "denied, retry in 3"]
            .into_iter()
            .enumerate()
        {
            let output = tool(program).arg(&copy).output().expect("it runs");
            let shown = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{file}: {shown}{output:?}");
            assert!(shown.contains(answer), "{file}, run {run}: {shown}");
        }
    }
}
