use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::servers::{PATIENCE, Server};

const EVERY: Duration = Duration::from_millis(5);

/// Asks servers that nobody stops whether they are there, all the time: one that stands still by
/// itself, because it waits for a processor or a disk, makes calls miss their deadline.
pub(crate) struct Pulse {
    stop: Arc<AtomicBool>,
    watched: Vec<JoinHandle<Duration>>,
}

impl Pulse {
    pub(crate) fn of(servers: &[&Server]) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let watch = |server: &&Server| {
            let stream = TcpStream::connect(server.address()).expect("our own server answers");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || longest(stream, &stop))
        };
        Self { watched: servers.iter().map(watch).collect(), stop }
    }

    /// The longest that one of them took for an answer.
    pub(crate) fn finish(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let longest =
            self.watched.into_iter().map(|watched| watched.join().expect("it answers to the end"));
        longest.max().unwrap_or_default()
    }
}

fn longest(mut stream: TcpStream, stop: &AtomicBool) -> Duration {
    let (mut longest, mut answer) = (Duration::ZERO, *b"+PONG\r\n");
    while !stop.load(Ordering::Relaxed) {
        let asked = Instant::now();
        stream
            .write_all(b"PING\r\n")
            .and_then(|()| stream.read_exact(&mut answer))
            .expect("it is there");
        longest = longest.max(asked.elapsed());
        std::thread::sleep(EVERY);
    }
    longest
}
