use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::strict::{self, Head};

/// Request that reached the upstream.
#[derive(Debug, Clone)]
pub(super) struct Forwarded {
    pub(super) method: String,
    pub(super) target: String,
    fields: Vec<(String, String)>,
}

impl Forwarded {
    /// Returns the values of the fields that an application may read by this name.
    pub(super) fn values(&self, name: &str) -> Vec<&str> {
        let fields = self.fields.iter().filter(|(key, _)| key.replace('_', "-") == name);
        fields.map(|(_, value)| value.as_str()).collect()
    }
}

/// Upstream that records the requests and what is malformed. It answers with the target that it
/// got.
pub(super) struct StrictUpstream {
    address: String,
    record: Arc<Mutex<Record>>,
}

#[derive(Default)]
struct Record {
    forwarded: Vec<Forwarded>,
    violations: Vec<String>,
}

impl StrictUpstream {
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let record = Arc::<Mutex<Record>>::default();
        let upstream = Self { address, record: Arc::clone(&record) };
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let record = Arc::clone(&record);
                std::thread::spawn(move || serve(stream, &record));
            }
        });
        upstream
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the requests so far, and those that were malformed.
    pub(super) fn forwarded(&self) -> (Vec<Forwarded>, Vec<String>) {
        let record = self.record.lock().expect("no panic");
        (record.forwarded.clone(), record.violations.clone())
    }
}

/// Serves a connection. The end of the connection within a request is no violation: the gateway
/// closes it when its client does.
fn serve(mut stream: TcpStream, record: &Mutex<Record>) {
    let mut received = Vec::new();
    while read_until(&mut stream, &mut received, |bytes| strict::head(bytes).is_some()) {
        let (head, rest) = strict::head(&received).expect("complete");
        let checked = head.and_then(|head| check(&head).map(|forwarded| (forwarded, head)));
        let checked = checked.and_then(|(forwarded, head)| {
            strict::framing(&head).map(|framing| (forwarded, framing))
        });
        let (forwarded, framing) = match checked {
            Ok(checked) => checked,
            Err(wrong) => {
                let violation = format!("{wrong}: {}", received.escape_ascii());
                record.lock().expect("no panic").violations.push(violation);
                return;
            }
        };
        received = rest.to_vec();
        let got = format!("{} {}", forwarded.method, forwarded.target);
        record.lock().expect("no panic").forwarded.push(forwarded);
        if !read_until(&mut stream, &mut received, |bytes| {
            strict::body_of(&framing, bytes).is_some()
        }) {
            return;
        }
        let (_, rest) = strict::body_of(&framing, &received).expect("complete");
        received = rest.to_vec();
        let body = if got.starts_with("HEAD ") { "" } else { "ok" };
        let response =
            format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Got: {got}\r\n\r\n{body}");
        // Targets may have bytes beyond ASCII, which `got` has as characters of Latin-1.
        let bytes: Vec<u8> =
            response.chars().map(|character| u8::try_from(character).expect("Latin-1")).collect();
        if stream.write_all(&bytes).is_err() {
            return;
        }
    }
}

/// Reads until the bytes are complete; returns false at the end of the connection.
fn read_until(
    stream: &mut TcpStream,
    bytes: &mut Vec<u8>,
    complete: impl Fn(&[u8]) -> bool,
) -> bool {
    let mut buffer = [0; 4096];
    while !complete(bytes) {
        match stream.read(&mut buffer) {
            Ok(length) if length > 0 => bytes.extend_from_slice(&buffer[..length]),
            _ => return false,
        }
    }
    true
}

/// Checks the request line, and that no field is there that must not be forwarded.
fn check(head: &Head) -> Result<Forwarded, &'static str> {
    let parts: Vec<&str> = head.start.split(' ').collect();
    let [method, target, "HTTP/1.1"] = parts[..] else { return Err("the request line") };
    if method.is_empty() || !method.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("the method");
    }
    let is_path = target.starts_with('/') && !target.contains(['#', '\t']);
    if !is_path && (method, target) != ("OPTIONS", "*") {
        return Err("the target");
    }
    if head.values("host").len() != 1 {
        return Err("the number of hosts");
    }
    let forbidden = ["proxy-connection", "keep-alive", "http2-settings", "x-original-url"];
    if head.fields.iter().any(|(name, _)| name.contains('_') || forbidden.contains(&name.as_str()))
    {
        return Err("a field that must not be forwarded");
    }
    Ok(Forwarded {
        method: method.to_owned(),
        target: target.to_owned(),
        fields: head.fields.clone(),
    })
}
