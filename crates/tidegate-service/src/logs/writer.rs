//! Writer of log lines: a thread of its own, so that a slow disk or a full pipe never delays a
//! request.
//!
//! Lines wait in a buffer of limited size, and those that do not fit are dropped and counted. Each
//! write takes all lines that wait, and waits a moment for more. A file that was moved or removed,
//! as logrotate does, is opened again before the next write.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tidegate_config::LogDestination;
use tidegate_net::LogThrottle;

/// Maximum number of bytes that wait to be written: some seconds of requests at full load.
const MAX_BUFFERED_BYTES: usize = 4 * 1024 * 1024;
/// Number of bytes that are written without waiting for more.
const BATCH_BYTES: usize = 256 * 1024;
/// Mode of a new file: lines contain the addresses of clients.
const FILE_MODE: u32 = 0o640;

/// Sending side of the writer.
#[derive(Debug)]
pub struct LogWriter(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<LineQueue>,
    /// Notified of new lines and requests for the writer.
    wake: Condvar,
    /// Notified when the writer has stopped.
    stopped: Condvar,
    written: AtomicU64,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct LineQueue {
    bytes: Vec<u8>,
    lines: u64,
    reopen: bool,
    stop: bool,
    is_stopped: bool,
}

impl LogWriter {
    /// Opens the destination and starts the writer, whose thread has this name. It waits for more
    /// lines for the time of `linger` before each write.
    pub fn start(thread: &str, destination: &LogDestination, linger: Duration) -> io::Result<Self> {
        let output = Output::open(destination)?;
        let shared = Arc::<Shared>::default();
        let writer = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(thread.to_owned())
            .spawn(move || writer.run(output, linger))?;
        Ok(Self(shared))
    }

    /// Queues a line, which ends with a line break, or drops it if the buffer is full.
    pub fn send(&self, line: &[u8]) {
        let mut queue = self.0.lock();
        if queue.stop || queue.bytes.len() + line.len() > MAX_BUFFERED_BYTES {
            drop(queue);
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let was_full = queue.bytes.len() >= BATCH_BYTES;
        queue.bytes.extend_from_slice(line);
        queue.lines += 1;
        let is_due = queue.lines == 1 || (queue.bytes.len() >= BATCH_BYTES && !was_full);
        drop(queue);
        if is_due {
            self.0.wake.notify_one();
        }
    }

    /// Opens the file again.
    pub fn reopen(&self) {
        self.0.lock().reopen = true;
        self.0.wake.notify_one();
    }

    /// Writes the lines that wait and stops the writer; waits for it at most for `timeout`.
    pub fn stop(&self, timeout: Duration) {
        let mut queue = self.0.lock();
        queue.stop = true;
        self.0.wake.notify_one();
        let wait = self.0.stopped.wait_timeout_while(queue, timeout, |queue| !queue.is_stopped);
        drop(wait);
    }

    /// Returns the numbers of lines, by outcome.
    pub fn counts(&self) -> [(&'static str, u64); 2] {
        let Shared { written, dropped, .. } = &*self.0;
        [("written", written.load(Ordering::Relaxed)), ("dropped", dropped.load(Ordering::Relaxed))]
    }
}

/// Each write is a line.
impl Write for &LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.send(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, LineQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, mut output: Output, linger: Duration) {
        let mut bytes = Vec::new();
        loop {
            let is_idle = |queue: &mut LineQueue| queue.lines == 0 && !queue.reopen && !queue.stop;
            let queue =
                self.wake.wait_while(self.lock(), is_idle).unwrap_or_else(PoisonError::into_inner);
            let is_filling = |queue: &mut LineQueue| {
                queue.bytes.len() < BATCH_BYTES && !queue.reopen && !queue.stop
            };
            let lingered = self.wake.wait_timeout_while(queue, linger, is_filling);
            let (mut queue, _) = lingered.unwrap_or_else(PoisonError::into_inner);
            bytes.clear();
            std::mem::swap(&mut queue.bytes, &mut bytes);
            let lines = std::mem::take(&mut queue.lines);
            let reopen = std::mem::take(&mut queue.reopen);
            let stop = queue.stop;
            drop(queue);
            output.follow_rotation(reopen);
            if lines > 0 {
                let counter = match output.write(&bytes) {
                    Ok(()) => &self.written,
                    Err(error) => {
                        static THROTTLE: LogThrottle = LogThrottle::new();
                        warn(&THROTTLE, &error, "writing log lines failed");
                        &self.dropped
                    }
                };
                counter.fetch_add(lines, Ordering::Relaxed);
            } else if stop {
                break;
            }
        }
        self.lock().is_stopped = true;
        self.stopped.notify_all();
    }
}

fn warn(throttle: &LogThrottle, error: &io::Error, message: &str) {
    if let Some(suppressed) = throttle.should_log(Instant::now()) {
        tracing::warn!(%error, suppressed, "{message} (logged once per minute)");
    }
}

/// Open destination of the lines.
struct Output {
    target: OutputTarget,
    /// Whether a failed write has left an incomplete line.
    is_within_line: bool,
}

enum OutputTarget {
    Stdout,
    Stderr,
    File { path: PathBuf, file: File },
}

impl Output {
    fn open(destination: &LogDestination) -> io::Result<Self> {
        let target = match destination {
            LogDestination::Stdout => OutputTarget::Stdout,
            LogDestination::Stderr => OutputTarget::Stderr,
            LogDestination::File(path) => {
                OutputTarget::File { file: open(path)?, path: path.clone() }
            }
        };
        Ok(Self { target, is_within_line: false })
    }

    /// Opens the file again if it is no longer the one at its path, or on request. Keeps the open
    /// file if that fails.
    fn follow_rotation(&mut self, reopen: bool) {
        let OutputTarget::File { path, file } = &mut self.target else { return };
        let is_same = |at_path: std::fs::Metadata| {
            file.metadata()
                .is_ok_and(|open| (open.dev(), open.ino()) == (at_path.dev(), at_path.ino()))
        };
        if !reopen && std::fs::metadata(&*path).is_ok_and(is_same) {
            return;
        }
        match open(path) {
            Ok(opened) => {
                *file = opened;
                self.is_within_line = false;
            }
            Err(error) => {
                static THROTTLE: LogThrottle = LogThrottle::new();
                warn(&THROTTLE, &error, "opening the log file again failed");
            }
        }
    }

    fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        let output: &mut dyn Write = match &mut self.target {
            OutputTarget::Stdout => &mut io::stdout().lock(),
            OutputTarget::Stderr => &mut io::stderr().lock(),
            OutputTarget::File { file, .. } => file,
        };
        write_lines(output, lines, &mut self.is_within_line)
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(FILE_MODE).open(path)
}

/// Writes whole lines. After a write that failed midway, the next one starts on a new line.
fn write_lines(
    output: &mut dyn Write,
    mut lines: &[u8],
    is_within_line: &mut bool,
) -> io::Result<()> {
    if *is_within_line {
        output.write_all(b"\n")?;
        *is_within_line = false;
    }
    while !lines.is_empty() {
        match output.write(lines) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => {
                *is_within_line = lines[length - 1] != b'\n';
                lines = &lines[length..];
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    output.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn start(path: &Path) -> LogWriter {
        LogWriter::start("log", &LogDestination::File(path.to_owned()), Duration::ZERO)
            .expect("opened")
    }

    #[test]
    fn stop_writes_all_lines_in_order() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let path = folder.path().join("access.log");
        std::fs::write(&path, "before\n").expect("written");
        let writer = start(&path);
        for number in 0..1_000 {
            writer.send(format!("{number}\n").as_bytes());
        }
        writer.stop(TIMEOUT);
        let text = std::fs::read_to_string(&path).expect("a file");
        let expected: String = std::iter::once("before\n".to_owned())
            .chain((0..1_000).map(|n| format!("{n}\n")))
            .collect();
        assert!(text == expected);
        assert_eq!(writer.counts(), [("written", 1_000), ("dropped", 0)]);
        writer.send(b"too late\n");
        assert_eq!(writer.counts()[1], ("dropped", 1));
    }

    #[test]
    fn full_buffer_drops_lines_and_never_blocks() {
        let writer = LogWriter(Arc::default());
        let line = vec![b'x'; 1024 * 1024];
        for _ in 0..6 {
            writer.send(&line);
        }
        assert_eq!((writer.0.lock().lines, writer.counts()[1]), (4, ("dropped", 2)));
    }

    #[test]
    fn line_after_a_failed_write_starts_on_a_new_line() {
        /// Takes some bytes, then fails until it is repaired.
        struct Full {
            space: usize,
            content: Vec<u8>,
        }
        impl Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                if self.space == 0 {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                let length = bytes.len().min(self.space);
                self.content.extend_from_slice(&bytes[..length]);
                self.space -= length;
                Ok(length)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (mut disk, mut is_within_line) = (Full { space: 9, content: Vec::new() }, false);
        assert!(write_lines(&mut disk, b"first\nsecond\n", &mut is_within_line).is_err());
        disk.space = 100;
        write_lines(&mut disk, b"third\n", &mut is_within_line).expect("written");
        assert_eq!(disk.content, b"first\nsec\nthird\n");
    }

    #[test]
    fn unwritable_file_is_an_error_at_the_start() {
        let missing = Path::new("/nonexistent/access.log").to_owned();
        assert!(LogWriter::start("log", &LogDestination::File(missing), Duration::ZERO).is_err());
    }
}
