//! Simulation: traffic in virtual time, decided by the code that decides in production.
//!
//! Requests come from a generated load or from access logs, in the order of their times. Each
//! variant of the configuration has its own [`PolicyLimiter`](tidegate::PolicyLimiter) on a memory
//! store whose clock is set to the time of the request.

use std::borrow::Cow;
use std::net::IpAddr;

use tidegate::{Attributes, ClientIp, Policies};

use self::what_if::Comparison;

mod clock;
pub mod decisions;
pub mod load;
pub mod log;
pub mod output;
mod report;
mod run;
mod series;
mod svg;
mod tally;
pub mod variants;
mod what_if;

pub use report::{SimulationReport, TrafficSummary};
pub use run::{ReplayResult, RequestAttributes, VariantRun};
pub use svg::draw;

/// Request of the traffic. Its attributes are those of the gateway, except for `ip`.
pub trait TrafficRequest: Attributes + Sync {
    /// Returns the time in microseconds since the Unix epoch.
    fn time(&self) -> u64;

    /// Returns the address of the client, as it is written.
    fn address(&self) -> Option<Cow<'_, str>>;

    /// Returns the headers `X-Forwarded-For` and `Forwarded`, which tell the client behind proxies.
    fn forwarded(&self) -> [Option<Cow<'_, str>>; 2] {
        [None, None]
    }

    /// Returns the cost, if the request names one.
    fn cost(&self) -> Option<u64>;

    /// Returns the status of the response, if it is known.
    fn status(&self) -> Option<u16> {
        None
    }
}

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

    /// Decides a request by each variant. `on_outcome` gets the outcome of the first.
    pub fn decide(
        &mut self,
        request: &impl TrafficRequest,
        on_outcome: impl FnOnce(&ReplayResult<'_>),
    ) {
        let [first, others @ ..] = &mut self.runs[..] else { return };
        let outcome = first.decide(request);
        on_outcome(&outcome);
        match (&mut self.comparison, others) {
            (Some(comparison), [other, ..]) => {
                comparison.record(request.time(), &outcome, &other.decide(request));
            }
            (_, others) => {
                drop(outcome);
                for run in others {
                    let _ = run.decide(request);
                }
            }
        }
    }

    pub fn into_report(self, traffic: TrafficSummary) -> SimulationReport {
        SimulationReport { runs: self.runs, comparison: self.comparison, traffic }
    }
}
