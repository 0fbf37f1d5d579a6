use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::servers::{Server, TEST_TIMEOUT};

const PING_INTERVAL: Duration = Duration::from_millis(5);

/// Pings servers that are not stopped by the test: a server that stalls, because it waits for CPU
/// time or a disk, makes calls miss their deadline.
pub(crate) struct PingMonitor {
    stop: Arc<AtomicBool>,
    watched: Vec<JoinHandle<Duration>>,
}

impl PingMonitor {
    pub(crate) fn of(servers: &[&Server]) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let watch = |server: &&Server| {
            let stream = TcpStream::connect(server.address()).expect("the server responds");
            stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || longest(stream, &stop))
        };
        Self { watched: servers.iter().map(watch).collect(), stop }
    }

    /// Returns the slowest response of all servers.
    pub(crate) fn finish(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let longest = self
            .watched
            .into_iter()
            .map(|watched| watched.join().expect("the server responds until the end"));
        longest.max().unwrap_or_default()
    }
}

fn longest(mut stream: TcpStream, stop: &AtomicBool) -> Duration {
    let (mut longest, mut response) = (Duration::ZERO, *b"+PONG\r\n");
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        stream
            .write_all(b"PING\r\n")
            .and_then(|()| stream.read_exact(&mut response))
            .expect("the server responds");
        longest = longest.max(sent.elapsed());
        std::thread::sleep(PING_INTERVAL);
    }
    longest
}
