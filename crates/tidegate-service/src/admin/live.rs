//! `GET /v1/live`: a stream of server-sent events, for dashboards.
//!
//! Each event is serialized once for all streams, which share its bytes. A stream whose client
//! reads slowly loses samples; the others do not wait for it.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, header};
use serde::Serialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, watch};
use tokio::time::timeout;

use super::history::SampleHistory;
use super::hot_keys::{DEFAULT_LIMIT, HotKeysBody};
use super::sampler::{Percentiles, Sampler};
use super::status::{Status, StatusParts};
use super::{AccessProblems, Admin};
use crate::metrics;
use crate::state::ServerState;

/// Number of newer streams with which a stream ends, whether they are still open or not. A client
/// that still reads connects again, so streams without a reader do not keep others out.
const MAX_STREAMS: u64 = 256;
/// Number of samples that a slow reader may be behind before it loses the oldest ones.
const MAX_BEHIND: usize = 16;
/// Hot keys are sent with every sample of this multiple.
const HOT_KEYS_INTERVAL: u64 = 2;
/// Time without events after which a comment shows that the connection is alive.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Header by which nginx passes events on at once.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Source of the events of all streams.
pub(crate) struct Live {
    history: Mutex<SampleHistory>,
    events: broadcast::Sender<Events>,
    opening: Mutex<Option<Opening>>,
    last_sent: Mutex<LastSent>,
    node_latency: Mutex<HashMap<String, Percentiles>>,
    /// Number of open streams.
    streams: AtomicU64,
    /// Number of streams that were ever opened.
    opened: watch::Sender<u64>,
    stopped: watch::Receiver<bool>,
}

/// Events of one second.
#[derive(Clone)]
struct Events {
    /// Number of the sample.
    sample: u64,
    bytes: Bytes,
}

/// First events of a stream, which all streams that start within a second share.
#[derive(Clone)]
struct Opening {
    /// Number of the newest sample.
    sample: u64,
    history: Bytes,
    /// Status and hot keys.
    state: Bytes,
}

/// State that was last sent, to send only changes.
#[derive(Default)]
struct LastSent {
    status: Option<StatusParts>,
    hot_keys: Option<HotKeysBody>,
}

impl Live {
    /// Starts to take samples. Streams end when `stopped` turns true.
    pub(crate) fn start(state: &Arc<ServerState>, stopped: watch::Receiver<bool>) -> Arc<Self> {
        let live = Arc::new(Self::new(stopped));
        tokio::spawn(Sampler::new(Arc::clone(state), Arc::clone(&live)).run());
        live
    }

    fn new(stopped: watch::Receiver<bool>) -> Self {
        Self {
            history: Mutex::default(),
            events: broadcast::Sender::new(MAX_BEHIND),
            opening: Mutex::default(),
            last_sent: Mutex::default(),
            node_latency: Mutex::default(),
            streams: AtomicU64::new(0),
            opened: watch::Sender::new(0),
            stopped,
        }
    }

    pub(super) fn history(&self) -> MutexGuard<'_, SampleHistory> {
        lock(&self.history)
    }

    /// Returns the latency of each node of Redis in the last seconds.
    pub(super) fn node_latency(&self) -> HashMap<String, Percentiles> {
        lock(&self.node_latency).clone()
    }

    pub(super) fn set_node_latency(&self, latency: HashMap<String, Percentiles>) {
        *lock(&self.node_latency) = latency;
    }

    /// Adds a sample to the history, and sends it with what else has changed.
    pub(super) fn publish(&self, sample: &Arc<str>, state: &ServerState) {
        let number = self.history().push(Arc::clone(sample));
        if self.streams.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut text = String::with_capacity(sample.len() + 64);
        push_event(&mut text, "sample", sample);
        let mut last = lock(&self.last_sent);
        let status = Status::new(state, &self.node_latency());
        if !last.status.as_ref().is_some_and(|parts| status.has_parts(parts)) {
            push_json(&mut text, "status", &status);
            last.status = Some(status.into_parts());
        }
        if number.is_multiple_of(HOT_KEYS_INTERVAL) {
            let hot_keys = HotKeysBody::new(state, DEFAULT_LIMIT);
            if last.hot_keys.as_ref() != Some(&hot_keys) {
                push_json(&mut text, "hot-keys", &hot_keys);
                last.hot_keys = Some(hot_keys);
            }
        }
        drop(last);
        // Fails without a stream.
        let _ = self.events.send(Events { sample: number, bytes: text.into() });
    }

    /// Returns the first events of a stream.
    fn opening(&self, state: &ServerState) -> Opening {
        let mut opening = lock(&self.opening);
        let newest = self.history().newest();
        if let Some(opening) = opening.as_ref().filter(|opening| opening.sample == newest) {
            return opening.clone();
        }
        let (sample, body) = {
            let history = self.history();
            (history.newest(), history.body())
        };
        let mut events = String::with_capacity(body.len() + 64);
        push_event(&mut events, "history", &body);
        let mut other = String::new();
        push_json(&mut other, "status", &Status::new(state, &self.node_latency()));
        push_json(&mut other, "hot-keys", &HotKeysBody::new(state, DEFAULT_LIMIT));
        let new = Opening { sample, history: events.into(), state: other.into() };
        opening.insert(new).clone()
    }

    /// Counts a new stream.
    fn place(self: &Arc<Self>) -> StreamPlace {
        self.streams.fetch_add(1, Ordering::Relaxed);
        let mut end = MAX_STREAMS;
        self.opened.send_modify(|opened| {
            *opened += 1;
            end += *opened;
        });
        StreamPlace { live: Arc::clone(self), end }
    }

    pub(super) fn write_metrics(&self, text: &mut String) {
        let streams = self.streams.load(Ordering::Relaxed);
        let help = "Open streams of live events, such as those of dashboards.";
        metrics::write_numbers(text, &[("tidegate_live_streams", "gauge", help, streams)]);
    }
}

/// Place of one stream.
struct StreamPlace {
    live: Arc<Live>,
    /// Number of opened streams with which this one ends.
    end: u64,
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        self.live.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Samples, status and hot keys as server-sent events
#[utoipa::path(
    get, path = "/v1/live", operation_id = "live",
    responses(
        (
            status = 200, description = "Events", body = String,
            content_type = "text/event-stream"
        ),
        AccessProblems,
    )
)]
pub(super) async fn handle(State(admin): State<Admin>) -> Response {
    let stream = LiveStream::new(admin.live.place(), admin.state);
    let body = futures_util::stream::unfold(stream, |mut stream| async {
        let bytes = stream.next().await?;
        Some((Ok::<_, Infallible>(bytes), stream))
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (ACCEL_BUFFERING, "no")];
    (headers, Body::from_stream(body)).into_response()
}

/// Events of one client.
struct LiveStream {
    place: StreamPlace,
    state: Arc<ServerState>,
    events: broadcast::Receiver<Events>,
    opened: watch::Receiver<u64>,
    stopped: watch::Receiver<bool>,
    /// Events that are sent before any others.
    pending: VecDeque<Bytes>,
    /// Number of the newest sample in them.
    newest: u64,
}

impl LiveStream {
    fn new(place: StreamPlace, state: Arc<ServerState>) -> Self {
        let live = &place.live;
        // Before the history is read, so that no sample is missed.
        let events = live.events.subscribe();
        let (opened, stopped) = (live.opened.subscribe(), live.stopped.clone());
        let Opening { sample, history, state: other } = live.opening(&state);
        let pending = VecDeque::from([history, other]);
        Self { place, state, events, opened, stopped, pending, newest: sample }
    }

    /// Waits for the next events. Returns `None` during shutdown, and after many newer streams.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.pending.pop_front() {
                return Some(bytes);
            }
            let received = tokio::select! {
                biased;
                _ = self.stopped.wait_for(|stopped| *stopped) => return None,
                _ = self.opened.wait_for(|opened| *opened >= self.place.end) => return None,
                received = timeout(KEEP_ALIVE_INTERVAL, self.events.recv()) => received,
            };
            match received {
                Err(_) => return Some(Bytes::from_static(b":\n\n")),
                // In the history already.
                Ok(Ok(events)) if events.sample <= self.newest => {}
                Ok(Ok(events)) => return Some(events.bytes),
                // The samples that were lost may have had other events.
                Ok(Err(RecvError::Lagged(_))) => {
                    let Opening { state, .. } = self.place.live.opening(&self.state);
                    return Some(state);
                }
                Ok(Err(RecvError::Closed)) => return None,
            }
        }
    }
}

/// Appends an event. Its data has no line break, because it is JSON without spaces.
fn push_event(text: &mut String, name: &str, data: &str) {
    let _ = write!(text, "event: {name}\ndata: {data}\n\n");
}

fn push_json(text: &mut String, name: &str, data: &impl Serialize) {
    if let Ok(data) = serde_json::to_string(data) {
        push_event(text, name, &data);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_config::{Config, SAMPLE};

    async fn live() -> (Arc<Live>, Arc<ServerState>, watch::Sender<bool>) {
        let config = Config::parse("sample", SAMPLE).expect("valid");
        let state = ServerState::start(config).await.expect("memory");
        let (stop, stopped) = watch::channel(false);
        (Arc::new(Live::new(stopped)), Arc::new(state), stop)
    }

    /// Opens a stream, and reads its first events.
    async fn open(live: &Arc<Live>, state: &Arc<ServerState>) -> (LiveStream, Vec<Bytes>) {
        let mut stream = LiveStream::new(live.place(), Arc::clone(state));
        let mut opening = Vec::new();
        while !stream.pending.is_empty() {
            opening.extend(stream.next().await);
        }
        (stream, opening)
    }

    #[tokio::test]
    async fn all_streams_share_the_bytes_of_one_serialization() {
        let (live, state, _stop) = live().await;
        let mut streams = Vec::new();
        for _ in 0..100 {
            streams.push(open(&live, &state).await);
        }
        let address = |bytes: &Bytes| bytes.as_ptr();
        let first: Vec<_> = streams[0].1.iter().map(address).collect();
        for (_, opening) in &streams {
            assert_eq!(opening.iter().map(address).collect::<Vec<_>>(), first);
        }
        for sample in ["1", "2", "3"] {
            live.publish(&sample.into(), &state);
            let mut sent = Vec::new();
            for (stream, _) in &mut streams {
                sent.push(stream.next().await.expect("events"));
            }
            assert!(sent[0].starts_with(format!("event: sample\ndata: {sample}\n\n").as_bytes()));
            assert!(sent.iter().all(|bytes| address(bytes) == address(&sent[0])));
        }
    }

    #[tokio::test]
    async fn slow_reader_loses_old_samples_and_gets_the_current_state() {
        let (live, state, _stop) = live().await;
        let (mut slow, _) = open(&live, &state).await;
        let (mut fast, _) = open(&live, &state).await;
        for number in 0..100 {
            live.publish(&number.to_string().into(), &state);
            assert!(fast.next().await.is_some());
        }
        let resumed = slow.next().await.expect("the state");
        assert!(resumed.starts_with(b"event: status\n"), "{resumed:?}");
        let oldest = slow.next().await.expect("a sample");
        let expected = format!("event: sample\ndata: {}\n", 100 - MAX_BEHIND);
        assert!(oldest.starts_with(expected.as_bytes()), "{oldest:?}");
    }

    #[tokio::test]
    async fn streams_end_after_many_newer_ones_and_with_the_process() {
        let (live, state, stop) = live().await;
        let (mut first, _) = open(&live, &state).await;
        let (mut second, _) = open(&live, &state).await;
        let newer: Vec<_> = (2..MAX_STREAMS).map(|_| live.place()).collect();
        live.publish(&"1".into(), &state);
        assert!(first.next().await.is_some());
        let newest = live.place();
        assert!(first.next().await.is_none() && second.next().await.is_some());
        stop.send_replace(true);
        assert!(second.next().await.is_none());
        drop((first, second, newer, newest));
        assert_eq!(live.streams.load(Ordering::Relaxed), 0);
    }
}
