use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::check::{Probe, Record, Run, Sample, Source};
use crate::fleet::Fleet;
use crate::http::{self, Connection, Response};

/// Time limit for a response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const CANARY_INTERVAL: Duration = Duration::from_millis(10);
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);

/// Requests for one key at a fixed rate, sent to each instance in turn.
#[derive(Debug, Clone)]
pub(crate) struct Stream {
    pub(crate) name: String,
    pub(crate) key: String,
    body: String,
    per_second: u32,
}

impl Stream {
    /// Creates a stream with the name of its policy.
    pub(crate) fn policy(policy: &str, key: &str, per_second: u32) -> Self {
        let body = json!({"policy": policy, "key": key}).to_string();
        Self { name: policy.to_owned(), key: key.to_owned(), body, per_second }
    }

    /// Creates a stream for all policies of a path, with the attribute `header.user` and, if any,
    /// `header.team`.
    pub(crate) fn path(name: &str, user: &str, team: &str, per_second: u32) -> Self {
        let attributes =
            json!({"path": format!("/{name}"), "header.user": user, "header.team": team});
        let body = json!({"attributes": attributes}).to_string();
        Self { name: name.to_owned(), key: user.to_owned(), body, per_second }
    }
}

/// Open-loop load: requests are sent on schedule, regardless of responses.
pub(crate) struct Load {
    runtime: Runtime,
    stop: Arc<AtomicBool>,
    streams: Vec<Stream>,
    records: UnboundedReceiver<Record>,
    canary: UnboundedReceiver<Probe>,
    samples: UnboundedReceiver<Sample>,
}

/// Connection pool for one address.
struct Pool {
    address: String,
    free: Mutex<Vec<Connection>>,
}

impl Load {
    pub(crate) fn start(fleet: &Fleet, streams: Vec<Stream>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime for the client");
        let stop = Arc::new(AtomicBool::new(false));
        let pools: Vec<Arc<Pool>> =
            fleet.instances.iter().map(|service| Pool::new(&service.http)).collect();
        let (record, records) = mpsc::unbounded_channel();
        for (number, stream) in streams.iter().enumerate() {
            let request = http::post("/v1/acquire", &stream.body).into();
            let period = Duration::from_secs(1) / stream.per_second;
            runtime.spawn(drive(
                number,
                request,
                period,
                pools.clone(),
                Arc::clone(&stop),
                record.clone(),
            ));
        }
        let (probe, canary) = mpsc::unbounded_channel();
        runtime.spawn(run_canary(Pool::new(&fleet.canary.http), Arc::clone(&stop), probe));
        let (sample, samples) = mpsc::unbounded_channel();
        for (instance, service) in fleet.instances.iter().enumerate() {
            runtime.spawn(watch(
                instance,
                service.admin.clone(),
                Arc::clone(&stop),
                sample.clone(),
            ));
        }
        Self { runtime, stop, streams, records, canary, samples }
    }

    /// Waits for in-flight requests and returns the record of the run.
    pub(crate) fn finish(mut self) -> Run {
        self.stop.store(true, Ordering::Relaxed);
        // The channels close when the last request has a response or a timeout.
        let records = self.runtime.block_on(all(&mut self.records));
        let canary = self.runtime.block_on(all(&mut self.canary));
        let samples = self.runtime.block_on(all(&mut self.samples));
        self.runtime.shutdown_background();
        Run::new(self.streams, records, canary, samples)
    }
}

async fn all<T>(channel: &mut UnboundedReceiver<T>) -> Vec<T> {
    let mut all = Vec::new();
    let everything = async {
        while let Some(one) = channel.recv().await {
            all.push(one);
        }
    };
    tokio::time::timeout(2 * REQUEST_TIMEOUT, everything).await.expect("every request completes");
    all
}

/// Runs one stream: requests are sent on schedule, not after the previous response.
async fn drive(
    stream: usize,
    request: Arc<[u8]>,
    period: Duration,
    pools: Vec<Arc<Pool>>,
    stop: Arc<AtomicBool>,
    sink: UnboundedSender<Record>,
) {
    // Streams of the same rate are staggered.
    let start = Instant::now() + period * u32::try_from(stream % 16).expect("small") / 16;
    for (number, instance) in (0..).zip((0..pools.len()).cycle().skip(stream)) {
        let scheduled = start + period * number;
        tokio::time::sleep_until(scheduled.into()).await;
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let (pool, request, sink) =
            (Arc::clone(&pools[instance]), Arc::clone(&request), sink.clone());
        tokio::spawn(async move {
            let sent = Instant::now();
            let result = pool.send(&request).await;
            let responded = Instant::now();
            let record = match result.and_then(|response| parse_response(&response)) {
                Ok((status, allowed, source)) => Record {
                    stream,
                    instance,
                    sent,
                    responded,
                    status,
                    allowed,
                    source,
                    failure: None,
                },
                Err(failure) => Record {
                    stream,
                    instance,
                    sent,
                    responded,
                    status: 0,
                    allowed: false,
                    source: Source::None,
                    failure: Some(failure),
                },
            };
            let _ = sink.send(record);
        });
    }
}

fn parse_response(response: &Response) -> Result<(u16, bool, Source), String> {
    #[derive(Deserialize)]
    struct Body {
        allowed: bool,
        source: Option<Source>,
    }
    match serde_json::from_slice::<Body>(&response.body) {
        Ok(body) => Ok((response.status, body.allowed, body.source.unwrap_or(Source::None))),
        Err(_) => Err(format!("{} {}", response.status, String::from_utf8_lossy(&response.body))),
    }
}

/// Measures the delay of this machine: from the scheduled time of a request to the response of a
/// service without Redis.
async fn run_canary(pool: Arc<Pool>, stop: Arc<AtomicBool>, sink: UnboundedSender<Probe>) {
    let request: Arc<[u8]> =
        http::post("/v1/acquire", r#"{"policy": "canary", "key": "canary"}"#).into();
    let start = Instant::now();
    for number in 0.. {
        let scheduled = start + CANARY_INTERVAL * number;
        tokio::time::sleep_until(scheduled.into()).await;
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let (pool, request, sink) = (Arc::clone(&pool), Arc::clone(&request), sink.clone());
        tokio::spawn(async move {
            if pool.send(&request).await.is_ok_and(|response| response.status == 200) {
                let _ = sink.send(Probe { scheduled, responded: Instant::now() });
            }
        });
    }
}

/// Samples the metrics of an instance.
async fn watch(
    instance: usize,
    admin: String,
    stop: Arc<AtomicBool>,
    sink: UnboundedSender<Sample>,
) {
    let pool = Pool::new(&admin);
    let request = http::get("/metrics");
    while !stop.load(Ordering::Relaxed) {
        if let Ok(response) = pool.send(&request).await {
            let sums = sums(&String::from_utf8_lossy(&response.body));
            let _ = sink.send(Sample { at: Instant::now(), instance, sums });
        }
        tokio::time::sleep(SAMPLE_INTERVAL).await;
    }
}

/// Parses metrics, summed over their labels.
pub(crate) fn sums(text: &str) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.contains("_bucket{")) {
        let Some((metric, value)) = line.rsplit_once(' ') else { continue };
        let name = metric.split('{').next().unwrap_or(metric);
        *sums.entry(name.to_owned()).or_default() += value.parse::<f64>().unwrap_or(0.0);
    }
    sums
}

impl Pool {
    fn new(address: &str) -> Arc<Self> {
        Arc::new(Self { address: address.to_owned(), free: Mutex::default() })
    }

    async fn send(&self, request: &[u8]) -> Result<Response, String> {
        let response = tokio::time::timeout(REQUEST_TIMEOUT, async {
            let free = {
                let mut free = self.free.lock().expect("no panic");
                free.retain(Connection::is_fresh);
                free.pop()
            };
            let mut connection = match free {
                Some(connection) => connection,
                None => Connection::open(&self.address).await?,
            };
            let response = connection.request(request).await?;
            self.free.lock().expect("no panic").push(connection);
            Ok::<_, std::io::Error>(response)
        });
        match response.await {
            Ok(response) => response.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no response within {REQUEST_TIMEOUT:?}")),
        }
    }
}
