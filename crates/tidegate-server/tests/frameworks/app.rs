use std::fmt::{self, Write as _};
use std::io::{BufRead, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};

use serde_json::Value;

use crate::support::raw;

/// Running application of a framework.
pub(crate) struct App {
    process: Child,
    input: Option<ChildStdin>,
    pub(crate) address: String,
}

impl App {
    pub(crate) fn start(framework: &str) -> Self {
        let (program, file) = match framework {
            "Express 4" | "Express 5" | "Fastify" => (root().join(".venv/bin/node"), "apps.js"),
            "Rack" => (PathBuf::from("ruby"), "app.rb"),
            _ => (root().join(".venv/bin/python"), "apps.py"),
        };
        let mut process = Command::new(&program)
            .arg(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/frameworks").join(file))
            .arg(framework.to_lowercase())
            .env("NODE_PATH", root().join(".venv/node_modules"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| {
                panic!("{} cannot be started ({error}): run `make setup`", program.display())
            });
        let input = process.stdin.take();
        let mut output = BufReader::new(process.stdout.take().expect("piped"));
        let mut port = String::new();
        output.read_line(&mut port).expect("its output");
        assert!(!port.is_empty(), "{framework} does not start: run `make setup`");
        std::thread::spawn(move || output.read_to_end(&mut Vec::new()));
        Self { process, input, address: format!("127.0.0.1:{}", port.trim()) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for App {
    /// Closes its standard input, with which it exits, and its workers too.
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.process.wait();
    }
}

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Behaviour of a framework by `docs/spellings.md`.
pub(crate) struct Documented {
    /// Paths, and whether the route of `/limited/x` answers them.
    pub(crate) routes: Vec<(String, bool)>,
    /// Settings of `paths`.
    pub(crate) settings: String,
}

/// Reads the column of a framework in the table of `docs/spellings.md`.
pub(crate) fn documented(framework: &str) -> Documented {
    let text = std::fs::read_to_string(root().join("docs/spellings.md")).expect("the page");
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let mut rows =
        text.lines().map(cells).skip_while(|row| row.get(1).is_none_or(|name| name != "request"));
    let names = rows.next().expect("the table");
    let column = names.iter().position(|name| name.starts_with(framework)).expect("its column");
    let mut documented = Documented { routes: Vec::new(), settings: String::new() };
    for row in rows.skip(1).take_while(|row| row.len() == names.len()) {
        if row[1] == "set" {
            documented.settings = row[column].replace('`', "");
        } else {
            for path in row[1].split(", ") {
                documented.routes.push((path.replace('`', ""), row[column] == "same"));
            }
        }
    }
    assert!(!documented.settings.is_empty() && documented.routes.len() > 5, "{text}");
    documented
}

/// Request with headers as bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) target: String,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) http2: bool,
}

impl Request {
    pub(crate) fn get(target: &str) -> Self {
        Self { target: target.to_owned(), headers: Vec::new(), http2: false }
    }

    pub(crate) fn header(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub(crate) fn over_http2(mut self) -> Self {
        self.http2 = true;
        self
    }

    /// Sends the request and returns what the application read, if the request reached it.
    pub(crate) fn send(&self, address: &str) -> Option<Value> {
        let (status, body) =
            if self.http2 { self.send_http2(address) } else { self.send_http1(address) };
        if status != 200 {
            return None;
        }
        // The body may be in chunks.
        let json = &body[body.find('{')?..=body.rfind('}')?];
        serde_json::from_str(json).ok().filter(|seen: &Value| seen["route"].is_string())
    }

    fn send_http1(&self, address: &str) -> (u16, String) {
        let mut bytes = format!("GET {} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n", self.target)
            .into_bytes();
        for (name, value) in &self.headers {
            bytes.extend_from_slice(format!("{name}: ").as_bytes());
            bytes.extend_from_slice(value);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"\r\n");
        let response = raw(address, &bytes);
        (response.status, response.body)
    }

    /// Sends the request by a client that does not trim header values.
    fn send_http2(&self, address: &str) -> (u16, String) {
        use http_body_util::BodyExt as _;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let stream = tokio::net::TcpStream::connect(address).await.expect("connected");
            let io = hyper_util::rt::TokioIo::new(stream);
            let executor = hyper_util::rt::TokioExecutor::new();
            let (mut client, connection) =
                hyper::client::conn::http2::handshake(executor, io).await.expect("HTTP/2");
            let connection = tokio::spawn(connection);
            let mut request = http::Request::get(format!("http://{address}{}", self.target));
            for (name, value) in &self.headers {
                request = request.header(name, value.as_slice());
            }
            let request = request.body(String::new()).expect("a request");
            let response = client.send_request(request).await.expect("a response");
            let status = response.status().as_u16();
            let body = response.into_body().collect().await.expect("a body").to_bytes();
            connection.abort();
            (status, String::from_utf8_lossy(&body).into_owned())
        })
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.target)?;
        for (name, value) in &self.headers {
            write!(f, ", {name}: {}", value.escape_ascii())?;
        }
        if self.http2 { write!(f, " (HTTP/2)") } else { Ok(()) }
    }
}

/// Encodes a byte as a percent code.
pub(crate) fn percent(text: &mut String, byte: u8, lower: bool) {
    let _ = if lower { write!(text, "%{byte:02x}") } else { write!(text, "%{byte:02X}") };
}
