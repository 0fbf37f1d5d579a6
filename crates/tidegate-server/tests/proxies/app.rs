use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::support::TEST_TIMEOUT;

const RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\ndone";

pub(crate) struct App {
    pub(crate) port: u16,
    requests: Arc<Mutex<Vec<String>>>,
    ending: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl App {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let (requests, ending) =
            (Arc::<Mutex<Vec<String>>>::default(), Arc::<AtomicBool>::default());
        let (written, ended) = (Arc::clone(&requests), Arc::clone(&ending));
        let accepting = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                let written = Arc::clone(&written);
                std::thread::spawn(move || {
                    // A proxy may open a connection in advance and close it unused.
                    if let Some(request) = read(&stream) {
                        // Recorded before the response, because the test reads it right after that.
                        written.lock().expect("no panic").push(request);
                        let _ = (&stream).write_all(RESPONSE);
                    }
                });
            }
        });
        Self { port, requests, ending, accepting: Some(accepting) }
    }

    /// Returns the requests for this path: heads with lower case names, and bodies.
    pub(crate) fn requests(&self, path: &str) -> Vec<String> {
        let is_there =
            |request: &&String| request.split(' ').nth(1).is_some_and(|uri| uri.starts_with(path));
        self.requests.lock().expect("no panic").iter().filter(is_there).cloned().collect()
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        let _ = self.accepting.take().map(JoinHandle::join);
    }
}

fn read(stream: &TcpStream) -> Option<String> {
    stream.set_read_timeout(Some(TEST_TIMEOUT)).ok()?;
    let mut reader = BufReader::new(stream);
    let mut request = String::new();
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.split_once(": ") {
            Some((name, value)) => {
                let name = name.to_ascii_lowercase();
                if name == "content-length" {
                    length = value.trim().parse().ok()?;
                }
                request.extend([name.as_str(), ": ", value]);
            }
            None => request.push_str(&line),
        }
        if line == "\r\n" {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    request.push_str(&String::from_utf8_lossy(&body));
    Some(request)
}
