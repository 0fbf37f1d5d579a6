//! HTTP/1.1 upstream that records the received bytes and responds by a closure.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Received request.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    /// Request head including line breaks, up to the empty line.
    pub(crate) head: String,
    /// Body. With `X-Discard` it is only counted, not kept.
    pub(crate) body: Vec<u8>,
    pub(crate) length: u64,
    /// Trailers including the empty line.
    pub(crate) trailers: String,
}

impl Received {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut fields = self.head.lines().filter_map(|line| line.split_once(": "));
        fields.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}

#[derive(Clone)]
pub(crate) struct Upstream {
    pub(crate) address: String,
    received: Arc<Mutex<Vec<Received>>>,
    connections: Arc<AtomicUsize>,
}

pub(crate) const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

impl Upstream {
    /// Sends the same response to every request.
    pub(crate) fn responding_with(response: &'static [u8]) -> Self {
        Self::start(move |_, stream| stream.write_all(response))
    }

    /// Calls `serve` with each request to write the response.
    pub(crate) fn start(
        serve: impl Fn(&Received, &mut TcpStream) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let upstream = Self { address, received: Arc::default(), connections: Arc::default() };
        let (recorder, serve) = (upstream.clone(), Arc::new(serve));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                recorder.connections.fetch_add(1, Ordering::Relaxed);
                let (recorder, serve) = (recorder.clone(), Arc::clone(&serve));
                std::thread::spawn(move || {
                    let mut writer = stream.try_clone().expect("a socket");
                    let mut reader = BufReader::new(stream);
                    while let Some(request) = read_request(&mut reader) {
                        recorder.received.lock().expect("no panic").push(request.clone());
                        if serve(&request, &mut writer).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        upstream
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn received(&self) -> Vec<Received> {
        self.received.lock().expect("no panic").clone()
    }

    /// Returns the number of accepted connections.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

/// Parses strictly: panics on anything unexpected, and the test sees the requests received until
/// then.
fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Received> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let mut request = Received { head, body: Vec::new(), length: 0, trailers: String::new() };
    let is_kept = request.header("x-discard").is_none();
    if let Some(length) = request.header("content-length") {
        let length: u64 = length.parse().expect("a length");
        let mut body = reader.take(length);
        request.length = if is_kept {
            body.read_to_end(&mut request.body).ok()? as u64
        } else {
            std::io::copy(&mut body, &mut std::io::sink()).ok()?
        };
        if request.length < length {
            return None;
        }
    } else if request.header("transfer-encoding").is_some() {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).ok()?;
            let size = usize::from_str_radix(size.trim_end(), 16).ok()?;
            if size == 0 {
                while !request.trailers.ends_with("\r\n\r\n") && request.trailers != "\r\n" {
                    if reader.read_line(&mut request.trailers).ok()? == 0 {
                        return None;
                    }
                }
                break;
            }
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk).ok()?;
            request.length += size as u64;
            if is_kept {
                request.body.extend_from_slice(&chunk[..size]);
            }
        }
    }
    Some(request)
}
