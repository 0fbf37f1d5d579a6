//! Simulation: traffic in virtual time, decided by the code that decides in production.
//!
//! Requests come from a generated load or from access logs, in the order of their times. Each
//! variant of the configuration has its own [`PolicyLimiter`](tidegate::PolicyLimiter) on a memory
//! store whose clock is set to the time of the request.

use std::borrow::Cow;
use std::net::IpAddr;

use tidegate::{Attributes, ClientIp, Policies};

use self::retry::{RetryKind, RetryQueue};
use self::what_if::Comparison;

mod clock;
pub mod decisions;
pub mod expect;
pub mod load;
pub mod log;
pub mod output;
mod report;
pub mod retry;
mod run;
mod series;
mod svg;
mod tally;
pub mod variants;
mod what_if;

pub(crate) use clock::VirtualClock;
pub(crate) use report::{MAX_KEY_CHARACTERS, lines_json, percent, shown, utc, write_lines};
pub use report::{SimulationReport, TrafficSummary};
pub use run::{ReplayResult, RequestAttributes, VariantRun};
pub use svg::draw;
pub(crate) use svg::{paint, short, start_picture, text};

/// Request of the traffic. Its attributes are those of the gateway, except for `ip`.
pub trait TrafficRequest: Attributes + Send + Sync {
    /// Returns the time in microseconds since the Unix epoch.
    fn time(&self) -> u64;

    /// Returns the address of the client, as it is written.
    fn address(&self) -> Option<Cow<'_, str>>;

    /// Returns the headers `X-Forwarded-For` and `Forwarded`, which name the client behind proxies.
    fn forwarded(&self) -> [Option<Cow<'_, str>>; 2] {
        [None, None]
    }

    /// Returns the cost, if the request names one.
    fn cost(&self) -> Option<u64>;

    /// Returns the status of the response, if it is known.
    fn status(&self) -> Option<u16> {
        None
    }

    /// Returns the index of its file among the access logs, and the number of its line.
    fn line(&self) -> Option<(usize, u64)> {
        None
    }
}

/// Called with each request that the first configuration decides, and the outcome.
pub type OnOutcome<'a> = dyn FnMut(&dyn TrafficRequest, &ReplayResult<'_>) + 'a;

/// Clients of a simulation, which may send denied requests again: with several variants, each has
/// its own denials.
pub struct Clients<R>(Vec<RetryQueue<R>>);

/// Parses an address as logs have it: also with a port, brackets or a zone.
pub fn address(text: &str) -> Option<IpAddr> {
    let plain = |text: &str| text.split('%').next()?.parse().ok();
    let without_port = || match text.strip_prefix('[') {
        Some(bracketed) => plain(bracketed.split_once(']')?.0),
        None => plain(text.rsplit_once(':')?.0).filter(IpAddr::is_ipv4),
    };
    plain(text).or_else(without_port)
}

/// Returns the client of a request behind trusted proxies, by the rules of the gateway. The peer of
/// a log without addresses is the last one that a proxy added to `X-Forwarded-For`.
pub fn client_address(request: &impl TrafficRequest, client_ip: &ClientIp) -> Option<IpAddr> {
    let peer = request.address().and_then(|text| address(&text));
    if let Some(peer) = peer.filter(|peer| !client_ip.trusts(*peer)) {
        return Some(peer);
    }
    let [hops, forwarded] = request.forwarded();
    let last_hop = || address(hops.as_deref()?.rsplit(',').next()?.trim());
    let [hops, forwarded] =
        [&hops, &forwarded].map(|list| list.as_deref().map(str::as_bytes).into_iter());
    Some(client_ip.resolve(peer.or_else(last_hop)?, hops, forwarded).address)
}

/// Configuration to simulate, with its name in the output.
#[derive(Debug)]
pub struct Variant {
    pub name: String,
    pub policies: Policies,
    pub client_ip: ClientIp,
}

/// Variants of a configuration that decide the same traffic.
pub struct Simulation {
    runs: Vec<VariantRun>,
    comparison: Option<Comparison>,
}

impl Simulation {
    pub fn new(variants: Vec<Variant>) -> Self {
        Self { runs: variants.into_iter().map(VariantRun::new).collect(), comparison: None }
    }

    /// Creates a simulation that compares two configurations request by request.
    pub fn what_if(current: Variant, other: Variant) -> Self {
        let comparison = Some(Comparison::default());
        Self { comparison, ..Self::new(vec![current, other]) }
    }

    /// Sets the time at which counts over time start; that of the first request by default.
    pub fn start_at(&mut self, time: u64) {
        for run in &mut self.runs {
            run.counts.start(time, &run.limiter);
        }
    }

    /// Returns the clients, which do not react to denials without a kind.
    pub fn clients<R: TrafficRequest + Clone>(&self, kind: Option<RetryKind>) -> Clients<R> {
        let queue = |_: &VariantRun| kind.map(RetryQueue::new);
        Clients(self.runs.iter().filter_map(queue).collect())
    }

    /// Decides a request by each variant, after those that are sent again before its time.
    pub fn decide<R: TrafficRequest + Clone>(
        &mut self,
        request: &R,
        clients: &mut Clients<R>,
        on_outcome: &mut OnOutcome<'_>,
    ) {
        self.retry_before(request.time(), clients, on_outcome);
        let mut queues = clients.0.iter_mut();
        let mut react = |outcome: &ReplayResult<'_>| {
            if let Some(queue) = queues.next() {
                queue.on_request(request, outcome);
            }
        };
        let [first, others @ ..] = &mut self.runs[..] else { return };
        let outcome = first.decide(request);
        on_outcome(request, &outcome);
        react(&outcome);
        match (&mut self.comparison, others) {
            (Some(comparison), [other, ..]) => {
                comparison.record(request.time(), &outcome, &other.decide(request));
            }
            (_, others) => {
                drop(outcome);
                for run in others {
                    react(&run.decide(request));
                }
            }
        }
    }

    /// Decides the requests that are sent again before `time`.
    pub fn retry_before<R: TrafficRequest + Clone>(
        &mut self,
        time: u64,
        clients: &mut Clients<R>,
        on_outcome: &mut OnOutcome<'_>,
    ) {
        for (number, (run, queue)) in self.runs.iter_mut().zip(&mut clients.0).enumerate() {
            while let Some(retry) = queue.pop_before(time) {
                let outcome = run.decide(&retry);
                if number == 0 {
                    on_outcome(&retry, &outcome);
                }
                queue.on_retry(&retry, &outcome);
            }
            run.counts.retries = queue.retries;
            run.counts.abandoned = queue.abandoned;
        }
    }

    pub fn into_report(self, traffic: TrafficSummary) -> SimulationReport {
        let Self { runs, comparison } = self;
        SimulationReport { runs, comparison, traffic, expectations: Vec::new() }
    }
}
