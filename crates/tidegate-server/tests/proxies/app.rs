use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use crate::support::TEST_TIMEOUT;

const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n";

/// Whether the responses to `/reports` have to wait.
type Gate = Arc<(Mutex<bool>, Condvar)>;

pub(crate) struct App {
    pub(crate) port: u16,
    requests: Arc<Mutex<Vec<String>>>,
    ending: Arc<AtomicBool>,
    gate: Gate,
    accepting: Option<JoinHandle<()>>,
}

impl App {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let (requests, ending) =
            (Arc::<Mutex<Vec<String>>>::default(), Arc::<AtomicBool>::default());
        let gate = Gate::default();
        let (written, ended, waiting) =
            (Arc::clone(&requests), Arc::clone(&ending), Arc::clone(&gate));
        let accepting = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                let (written, waiting) = (Arc::clone(&written), Arc::clone(&waiting));
                std::thread::spawn(move || {
                    // A proxy may open a connection in advance and close it unused.
                    if let Some(request) = read(&stream) {
                        // Recorded before the response, because the test reads it right after that.
                        written.lock().expect("no panic").push(request.clone());
                        let _ = (&stream).write_all(response(&request, &waiting).as_bytes());
                    }
                });
            }
        });
        Self { port, requests, ending, gate, accepting: Some(accepting) }
    }

    /// Sets whether the responses to `/reports` have to wait.
    pub(crate) fn delay_reports(&self, is_delayed: bool) {
        *self.gate.0.lock().expect("no panic") = is_delayed;
        self.gate.1.notify_all();
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

/// Returns the response: that of `/chat/N` says that N tokens were used.
fn response(request: &str, gate: &Gate) -> String {
    let path = request.split(' ').nth(1).unwrap_or_default();
    if path.starts_with("/reports") {
        let is_delayed = gate.0.lock().expect("no panic");
        drop(gate.1.wait_timeout_while(is_delayed, TEST_TIMEOUT, |is_delayed| *is_delayed));
    }
    let used = path.strip_prefix("/chat/").map(|used| format!("X-Tokens-Used: {used}\r\n"));
    format!("{HEAD}{}\r\ndone", used.unwrap_or_default())
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
