use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Proxy between a client and a server that delays responses or silently drops all data.
pub(crate) struct Proxy {
    _runtime: Runtime,
    pub(crate) address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Microseconds.
    latency: AtomicU64,
    /// Data on connections with a smaller number is dropped in both directions.
    swallow_below: AtomicUsize,
    connections: AtomicUsize,
    bytes: AtomicU64,
    /// Maximum delay of a write after its scheduled time, in microseconds.
    late: AtomicU64,
}

impl Proxy {
    pub(crate) fn to(port: u16) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime for the proxy");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a free port");
        let (address, state) = (listener.local_addr().expect("bound"), Arc::<State>::default());
        runtime.spawn(accept(listener, port, Arc::clone(&state)));
        Self { _runtime: runtime, address, state }
    }

    /// Returns the store section of a configuration.
    pub(crate) fn store(&self) -> String {
        format!("redis: 'redis://{}'", self.address)
    }

    /// Sets the latency of data from the server.
    pub(crate) fn set_latency(&self, latency: Duration) {
        self.state
            .latency
            .store(u64::try_from(latency.as_micros()).expect("not that long"), Ordering::SeqCst);
    }

    /// Returns the maximum delay of the proxy itself, which waits for CPU time as well. The value
    /// is meaningless after the latency was lowered, because later data waits for earlier data.
    pub(crate) fn max_delay(&self) -> Duration {
        Duration::from_micros(self.state.late.load(Ordering::SeqCst))
    }

    /// Measures a round trip through the proxy on a new connection.
    pub(crate) fn round_trip(&self) -> Duration {
        let mut stream = std::net::TcpStream::connect(self.address).expect("our own proxy listens");
        let (start, mut response) = (Instant::now(), *b"+PONG\r\n");
        stream
            .write_all(b"PING\r\n")
            .and_then(|()| stream.read_exact(&mut response))
            .expect("a response");
        start.elapsed()
    }

    /// Drops all data of existing connections, which stay open. New ones work.
    pub(crate) fn drop_existing_connections_silently(&self) {
        self.state.swallow_below.store(self.connections(), Ordering::SeqCst);
    }

    /// Returns the number of connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// Returns the number of bytes in both directions.
    pub(crate) fn bytes(&self) -> u64 {
        self.state.bytes.load(Ordering::SeqCst)
    }
}

async fn accept(listener: TcpListener, port: u16, state: Arc<State>) {
    while let Ok((client, _)) = listener.accept().await {
        let number = state.connections.fetch_add(1, Ordering::SeqCst);
        let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { continue };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        let ((from_client, to_client), (from_server, to_server)) =
            (client.into_split(), server.into_split());
        tokio::spawn(copy_delayed(from_client, to_server, number, Arc::clone(&state), false));
        tokio::spawn(copy_delayed(from_server, to_client, number, Arc::clone(&state), true));
    }
}

/// Copies one direction. Reads continue while earlier bytes are delayed, so that latency does not
/// reduce throughput.
async fn copy_delayed(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    number: usize,
    state: Arc<State>,
    delayed: bool,
) {
    let (sender, mut receiver) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let shared = Arc::clone(&state);
    let write = async move {
        while let Some((due, bytes)) = receiver.recv().await {
            tokio::time::sleep_until(due.into()).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
            shared.late.fetch_max(
                u64::try_from(due.elapsed().as_micros()).unwrap_or(u64::MAX),
                Ordering::SeqCst,
            );
        }
    };
    let read = async move {
        let mut buffer = vec![0; 16 * 1024];
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            if number < state.swallow_below.load(Ordering::SeqCst) {
                continue;
            }
            state.bytes.fetch_add(length as u64, Ordering::Relaxed);
            let latency = if delayed { state.latency.load(Ordering::SeqCst) } else { 0 };
            if sender
                .send((Instant::now() + Duration::from_micros(latency), buffer[..length].to_vec()))
                .is_err()
            {
                return;
            }
        }
    };
    tokio::join!(read, write);
}
