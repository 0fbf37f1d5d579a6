//! [`VariantRun`]: the decisions of one configuration on the traffic, and their counts.

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::FutureExt as _;
use tidegate::{
    Action, Attributes, ClientIp, Hold, Limiter, MemoryStore, PolicyDecisions, PolicyLimiter,
    Query, QueryError,
};

use super::clock::VirtualClock;
use super::series::Series;
use super::tally::PolicyTally;
use super::{TrafficRequest, Variant, client_address};

/// Maximum number of different errors that are shown.
const MAX_ERROR_EXAMPLES: usize = 3;

/// One configuration with its own store.
#[derive(Debug)]
pub struct VariantRun {
    pub(super) name: String,
    clock: VirtualClock,
    pub(super) limiter: PolicyLimiter,
    client_ip: ClientIp,
    pub(super) counts: RunCounts,
}

/// Counts of all requests of a run.
#[derive(Debug, Default)]
pub(super) struct RunCounts {
    pub(super) requests: u64,
    pub(super) admitted: u64,
    pub(super) denied: u64,
    /// Admitted requests that a policy in shadow mode would deny.
    pub(super) shadow_denied: u64,
    /// Requests that no policy applies to.
    pub(super) unlimited: u64,
    /// Requests that cannot be decided: services answer them with an error.
    pub(super) errors: u64,
    pub(super) error_examples: Vec<String>,
    /// Denied requests that clients sent again, and those that they gave up.
    pub(super) retries: u64,
    pub(super) abandoned: u64,
    pub(super) series: Option<Series>,
    pub(super) policies: Vec<PolicyTally>,
    by_name: HashMap<String, usize>,
}

/// Decisions of one request.
pub type ReplayResult<'a> = Result<PolicyDecisions<'a>, QueryError>;

impl VariantRun {
    pub(super) fn new(variant: Variant) -> Self {
        let clock = VirtualClock::default();
        // A full store would evict keys by chance; the report has the memory that it needs.
        let store = MemoryStore::builder()
            .clock(clock.clone())
            .max_keys(usize::MAX)
            .max_log_bytes(usize::MAX)
            .build();
        Self {
            name: variant.name,
            clock,
            limiter: PolicyLimiter::new(Limiter::new(store), variant.policies),
            client_ip: variant.client_ip,
            counts: RunCounts::default(),
        }
    }

    /// Decides a request at its time.
    pub(super) fn decide(&mut self, request: &impl TrafficRequest) -> ReplayResult<'_> {
        let now = request.time();
        self.clock.set(now);
        let attributes = RequestAttributes::new(request, &self.client_ip);
        let query = Query::attributes(&attributes).with_cost(request.cost());
        // A memory store never waits.
        let result = self.limiter.acquire(query).now_or_never();
        let result = result.unwrap_or(Err(QueryError::UnknownPeer));
        if self.counts.series.is_none() {
            self.counts.start(now, &self.limiter);
        }
        self.counts.record(now, &result);
        // The time of the response is unknown: it follows its request at once.
        let held = result.as_ref().ok().and_then(PolicyDecisions::hold);
        if let Some(hold) = held.map(|(hold, _)| Hold::clone(hold)) {
            let end = Query::attributes(&attributes).with_hold(hold).with_cost(0);
            let _ = self.limiter.decide(Action::Commit, end).now_or_never();
        }
        if let (Ok(decisions), Some(status)) = (&result, request.status()) {
            let refunds = decisions.refunded_on(status);
            if !refunds.is_empty() {
                let _ = self.limiter.refund(&refunds).now_or_never();
                self.counts.refund(&refunds);
            }
        }
        result
    }
}

impl RunCounts {
    /// Starts the counts over time.
    pub(super) fn start(&mut self, now: u64, limiter: &PolicyLimiter) {
        self.series = Some(Series::new(now));
        for (index, policy) in limiter.policies().iter().enumerate() {
            self.by_name.insert(policy.name().to_owned(), index);
            self.policies.push(PolicyTally::new(policy, now));
        }
    }

    fn record(&mut self, now: u64, result: &ReplayResult<'_>) {
        self.requests += 1;
        let decisions = match result {
            Ok(decisions) => decisions,
            Err(error) => {
                self.errors += 1;
                self.add_example(error);
                return;
            }
        };
        let passes = decisions.is_allowed();
        if let Some(series) = &mut self.series {
            let bin = series.at(now);
            *(if passes { &mut bin.admitted } else { &mut bin.denied }) += 1;
        }
        *(if passes { &mut self.admitted } else { &mut self.denied }) += 1;
        self.unlimited += u64::from(decisions.is_empty());
        let mut shadow_denied = false;
        for (position, entry) in decisions.iter().enumerate() {
            shadow_denied |= passes && entry.is_shadow() && entry.is_denied();
            // If all policies apply, they are in the order of the file.
            let index = match self.policies.get(position) {
                Some(tally) if tally.name == entry.policy() => Some(position),
                _ => self.by_name.get(entry.policy()).copied(),
            };
            if let Some(index) = index {
                self.policies[index].record(now, entry, passes);
            }
        }
        self.shadow_denied += u64::from(shadow_denied);
    }

    /// Takes refunded units out of the exact logs.
    fn refund(&mut self, refunds: &PolicyDecisions<'_>) {
        for entry in refunds.iter().filter(|entry| !entry.is_denied()) {
            if let Some(index) = self.by_name.get(entry.policy()) {
                self.policies[*index].refund(entry);
            }
        }
    }

    #[cold]
    fn add_example(&mut self, error: &QueryError) {
        let text = match error {
            QueryError::UnknownPeer => {
                "a policy needs ip, which the line does not have: name it with \
                                        --field or --log-format"
                    .to_owned()
            }
            other => other.to_string(),
        };
        if self.error_examples.len() < MAX_ERROR_EXAMPLES && !self.error_examples.contains(&text) {
            self.error_examples.push(text);
        }
    }
}

/// Attributes of a request, with its address grouped as the configuration says.
pub struct RequestAttributes<'a, R> {
    request: &'a R,
    client_ip: &'a ClientIp,
    /// Whether `ip` was read, and is unknown.
    lacks_address: AtomicBool,
}

impl<'a, R> RequestAttributes<'a, R> {
    pub fn new(request: &'a R, client_ip: &'a ClientIp) -> Self {
        Self { request, client_ip, lacks_address: AtomicBool::new(false) }
    }
}

impl<R: TrafficRequest> Attributes for RequestAttributes<'_, R> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        if name != "ip" {
            return self.request.get(name);
        }
        let text = self.request.address();
        let direct = text.as_deref().and_then(|text| text.parse::<Ipv4Addr>().ok());
        if direct.is_some_and(|address| !self.client_ip.trusts(address.into())) {
            // An address of IPv4 has only one spelling.
            return text;
        }
        let client = client_address(self.request, self.client_ip);
        self.lacks_address.fetch_or(client.is_none(), Ordering::Relaxed);
        client.map(|client| Cow::Owned(self.client_ip.group(client)))
    }

    fn is_ambiguous(&self, name: &str) -> bool {
        self.request.is_ambiguous(name)
    }

    fn lacks_peer(&self) -> bool {
        self.lacks_address.load(Ordering::Relaxed)
    }
}
