//! [`Traffic`]: the requests of a log by key, by group of paths, and by the kind of client.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use tidegate::{Attributes, ClientIp, MissingKey, Policies, Policy, Quota, normalize_path};

use super::paths::{self, PathTemplates};
use super::trace::{Trace, TraceEntry, TraceReader};
use crate::simulate::variants::LOG_ATTRIBUTES;
use crate::simulate::{RequestAttributes, TrafficRequest};

/// Maximum number of keys. Requests of further ones are counted together, and only by number.
const MAX_KEYS: usize = 1_000_000;
/// Maximum number of groups of paths.
pub(crate) const MAX_GROUPS: usize = 8;
/// Part of a label that marks the path of a health check.
const HEALTH: u32 = 1 << 31;

/// Paths of health checks, which a policy should not count.
const HEALTH_PATHS: [&str; 14] = [
    "/health",
    "/healthz",
    "/health/live",
    "/health/ready",
    "/health_check",
    "/healthcheck",
    "/live",
    "/livez",
    "/ping",
    "/ready",
    "/readyz",
    "/status/health",
    "/-/healthy",
    "/-/ready",
];
/// Parts of the user agents of monitors and of crawlers, in lower case.
const MONITORS: [&str; 12] = [
    "kube-probe",
    "elb-healthchecker",
    "googlehc",
    "health check",
    "healthcheck",
    "uptime",
    "pingdom",
    "statuscake",
    "site24x7",
    "prometheus",
    "blackbox",
    "check_http",
];
const CRAWLERS: [&str; 8] = [
    "bot",
    "crawl",
    "spider",
    "slurp",
    "archiver",
    "feedfetcher",
    "mediapartners",
    "facebookexternalhit",
];

/// Kind of the client that most requests of a key come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ClientKind {
    Client,
    Crawler,
    HealthCheck,
}

impl ClientKind {
    pub(crate) const ALL: [Self; 3] = [Self::Client, Self::Crawler, Self::HealthCheck];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Crawler => "crawler",
            Self::HealthCheck => "health check",
        }
    }

    fn of_request(path: &str, user_agent: Option<&str>) -> Self {
        let agent = user_agent.unwrap_or_default().to_ascii_lowercase();
        let has = |parts: &[&str]| parts.iter().any(|part| agent.contains(part));
        match () {
            () if HEALTH_PATHS.contains(&path) || has(&MONITORS) => Self::HealthCheck,
            // A brand of phones.
            () if has(&CRAWLERS) && !agent.contains("cubot") => Self::Crawler,
            () => Self::Client,
        }
    }
}

/// Key with its number of requests by kind.
struct KeyFacts {
    name: Arc<str>,
    requests: [u64; 3],
}

/// Requests that are read.
pub(crate) struct Recorder {
    key: Policy,
    given: Option<Policies>,
    client_ip: ClientIp,
    templates: PathTemplates,
    trace: Trace,
    numbers: HashMap<Arc<str>, u32>,
    keys: Vec<KeyFacts>,
    health_paths: BTreeSet<&'static str>,
    counts: TrafficCounts,
}

/// Counts of the requests.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct TrafficCounts {
    pub(crate) requests: u64,
    /// Requests without the key, or with one that is not valid.
    pub(crate) without_key: u64,
    /// Requests of keys beyond the first million.
    pub(crate) beyond_max_keys: u64,
    #[serde(skip)]
    pub(crate) times: Option<(u64, u64)>,
}

/// Requests of a log.
pub(super) struct Traffic {
    trace: Trace,
    keys: Vec<KeyFacts>,
    pub(super) key: Policy,
    /// Patterns of the groups of paths.
    pub(super) groups: Vec<String>,
    /// Bits of the groups, by label.
    masks: Vec<u32>,
    /// Paths of health checks that were seen.
    pub(super) health_paths: Vec<&'static str>,
    pub(super) counts: TrafficCounts,
}

/// Returns policies that only match: one for each pattern, in their order.
fn matching(patterns: &[String]) -> anyhow::Result<Policies> {
    let policy = |pattern: &String| {
        let policy = Policy::builder(pattern, Quota::sliding_log(1, Duration::from_secs(1))?);
        Ok(policy.matches("path", [pattern.as_str()]).build()?)
    };
    Ok(Policies::new(patterns.iter().map(policy).collect::<anyhow::Result<_>>()?)?)
}

/// Returns the bits of the policies that match.
fn mask(policies: &Policies, attributes: &dyn Attributes) -> u32 {
    let Ok(selection) = policies.select(attributes, None) else { return 0 };
    let matched = |name: &str| selection.charges.iter().any(|charge| charge.policy() == name);
    let bits = policies.iter().enumerate();
    bits.filter(|(_, policy)| matched(policy.name())).fold(0, |mask, (bit, _)| mask | 1 << bit)
}

impl Recorder {
    /// Starts with the attributes of the key, and with patterns of paths, or none to find them.
    pub(crate) fn new(
        key: &[String],
        patterns: &[String],
        client_ip: ClientIp,
    ) -> anyhow::Result<Self> {
        let quota = Quota::sliding_log(1, Duration::from_secs(1))?;
        let key = Policy::builder("key", quota)
            .attributes(LOG_ATTRIBUTES)
            .key(key)
            .missing_key(MissingKey::Skip);
        let given = (!patterns.is_empty()).then(|| matching(patterns)).transpose();
        Ok(Self {
            key: key.build().context("--key")?,
            given: given.context("--path")?,
            client_ip,
            templates: PathTemplates::default(),
            trace: Trace::new().context("the temporary file")?,
            numbers: HashMap::new(),
            keys: Vec::new(),
            health_paths: BTreeSet::new(),
            counts: TrafficCounts::default(),
        })
    }

    pub(crate) fn record(&mut self, request: &impl TrafficRequest) -> anyhow::Result<()> {
        let time = request.time();
        self.counts.requests += 1;
        self.counts.times = Some((self.counts.times.map_or(time, |(first, _)| first), time));
        let attributes = RequestAttributes::new(request, &self.client_ip);
        let selection = self.key.select(&attributes, None).ok();
        let charge = selection.as_ref().and_then(|selection| selection.charges.first());
        let Some(name) = charge.and_then(|charge| charge.key()) else {
            self.counts.without_key += 1;
            return Ok(());
        };
        let key = match self.numbers.get(name) {
            Some(number) => *number,
            None if self.keys.len() >= MAX_KEYS => {
                self.counts.beyond_max_keys += 1;
                return Ok(());
            }
            None => {
                let (name, number) = (Arc::<str>::from(name), u32::try_from(self.keys.len())?);
                self.numbers.insert(Arc::clone(&name), number);
                self.keys.push(KeyFacts { name, requests: [0; 3] });
                number
            }
        };
        let path = request.get("path").unwrap_or(Cow::Borrowed("/"));
        let path = normalize_path(&path);
        let path = path.trim_end_matches('/');
        let kind = ClientKind::of_request(path, request.get("header.user-agent").as_deref());
        self.keys[key as usize].requests[kind as usize] += 1;
        let health = HEALTH_PATHS.iter().find(|it| **it == path);
        self.health_paths.extend(health);
        let label = match &self.given {
            Some(given) => mask(given, request),
            None => self.templates.number(path),
        };
        let label = if health.is_some() { label | HEALTH } else { label };
        self.trace.push(TraceEntry { time, key, label }).context("the temporary file")
    }

    pub(super) fn finish(mut self) -> anyhow::Result<Traffic> {
        self.trace.flush().context("the temporary file")?;
        let (groups, masks) = match &self.given {
            Some(given) => {
                let names = given.iter().map(|policy| policy.name().to_owned());
                (names.collect::<Vec<_>>(), (0..1 << MAX_GROUPS).collect())
            }
            None => {
                let groups = paths::groups(&self.templates, MAX_GROUPS);
                let policies = matching(&groups)?;
                let mask = |path: &str| {
                    mask(&policies, &BTreeMap::from([("path".to_owned(), path.to_owned())]))
                };
                (groups, self.templates.names().map(mask).collect())
            }
        };
        Ok(Traffic {
            trace: self.trace,
            keys: self.keys,
            key: self.key,
            groups,
            masks,
            health_paths: self.health_paths.into_iter().collect(),
            counts: self.counts,
        })
    }
}

impl Traffic {
    /// Returns the requests that a policy for a group counts, or one for all paths: health checks
    /// by their path are exempt.
    pub(super) fn requests(
        &self,
        group: Option<usize>,
    ) -> std::io::Result<TraceReader<impl Fn(u32) -> bool>> {
        let bits = group.map(|group| 1 << group);
        self.trace.entries(move |label| {
            let mask = |bits: u32| self.masks.get(label as usize).is_some_and(|it| it & bits > 0);
            label & HEALTH == 0 && bits.is_none_or(mask)
        })
    }

    pub(super) fn key_count(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn key_name(&self, key: usize) -> &str {
        &self.keys[key].name
    }

    /// Returns the kind that most requests of a key are of.
    pub(super) fn kind(&self, key: usize) -> ClientKind {
        let requests = self.keys[key].requests;
        let is_most = |kind: &ClientKind| requests[*kind as usize] * 2 > requests.iter().sum();
        ClientKind::ALL.into_iter().find(is_most).unwrap_or(ClientKind::Client)
    }
}
