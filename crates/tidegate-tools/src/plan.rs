//! `tidegate plan`: what a number of users and requests costs on Redis.
//!
//! [`costs`] has the costs of one key and of one decision, which [`measure`] measures; this file
//! multiplies them. Each assumption is in [`CapacityPlan`], so that it is shown beside the result.

use std::time::Duration;

use clap::Args;
use serde::{Serialize, Serializer};
use tidegate::{Algorithm, Encoding, Quota, QuotaError};
use tidegate_config::duration;

use self::costs::Costs;
use crate::tool::text::{float, whole};

pub(crate) mod costs;
pub(crate) mod measure;
pub(crate) mod report;
mod units;

/// Memory that the allocator takes, in relation to the memory that Redis uses.
const FRAGMENTATION: f64 = 1.25;
/// Expired keys that Redis has not removed yet, in relation to the others. It was measured with keys
/// that live for ten seconds; those with a shorter life have more, but are few.
const EXPIRED_KEYS: f64 = 0.25;
/// Minimum number of primaries of a cluster: fewer have no majority after a failure.
const MIN_CLUSTER: u64 = 3;
/// Share by which a need may exceed the room of servers, into their headroom: the costs are no more
/// precise.
const TOLERANCE: f64 = 0.1;

/// All algorithms and encodings.
pub(crate) const FORMS: [Form; 7] = [
    Form { algorithm: Algorithm::SlidingLog, encoding: Some(Encoding::SortedSet) },
    Form { algorithm: Algorithm::SlidingLog, encoding: Some(Encoding::Packed) },
    Form { algorithm: Algorithm::SlidingCounter, encoding: Some(Encoding::Hash) },
    Form { algorithm: Algorithm::SlidingCounter, encoding: Some(Encoding::Packed) },
    Form { algorithm: Algorithm::FixedWindow, encoding: None },
    Form { algorithm: Algorithm::TokenBucket, encoding: None },
    Form { algorithm: Algorithm::LeakyBucket, encoding: None },
];

/// Users and requests to plan for.
#[derive(Debug, Clone, Copy, Serialize, Args)]
pub(crate) struct Demand {
    /// Number of users, or of other keys; k, M and B stand for thousands, millions and billions
    #[arg(long, value_name = "N", env = "TIDEGATE_USERS", value_parser = units::count)]
    pub users: u64,

    /// Units per window and user
    #[arg(long, value_name = "N", env = "TIDEGATE_LIMIT", value_parser = units::count)]
    pub limit: u64,

    /// Length of the window, such as 500ms, 60s, 5m, 1h, 30d
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_WINDOW", value_parser = duration::parse)]
    #[serde(rename = "window_ms", serialize_with = "millis")]
    pub window: Duration,

    /// Requests per second of all users together, at the peak
    #[arg(long, value_name = "R", env = "TIDEGATE_RPS", value_parser = units::rate)]
    pub rps: f64,

    /// Share of the users that send requests within one window, such as 5% or 0.05 [default: all,
    /// as far as the requests suffice]
    #[arg(long, value_name = "SHARE", env = "TIDEGATE_ACTIVE", value_parser = units::share)]
    pub active: Option<f64>,
}

/// Calls of the clients to Redis.
#[derive(Debug, Clone, Serialize, Args)]
pub(crate) struct RedisCalls {
    /// Decisions per call to Redis. Instances under load share calls; 1 is the worst case
    #[arg(long, value_name = "N", env = "TIDEGATE_BATCH")]
    #[arg(default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=128))]
    pub batch: u64,

    /// Length of a user's key in bytes
    #[arg(long, value_name = "N", env = "TIDEGATE_KEY_BYTES")]
    #[arg(default_value_t = costs::KEY_BYTES)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub key_bytes: u64,

    /// Name of the policy, which is part of each key in Redis
    #[arg(long, value_name = "NAME", env = "TIDEGATE_POLICY", default_value = costs::POLICY)]
    pub policy: String,

    /// Prefix of the keys in Redis
    #[arg(long, value_name = "PREFIX", env = "TIDEGATE_PREFIX", default_value = costs::PREFIX)]
    pub prefix: String,
}

/// Servers of Redis.
#[derive(Debug, Clone, Copy, Serialize, Args)]
pub(crate) struct RedisServers {
    /// Memory of one Redis server
    #[arg(
        long = "node-memory", value_name = "SIZE", env = "TIDEGATE_NODE_MEMORY",
        default_value = "16GiB", value_parser = units::bytes
    )]
    pub node_memory_bytes: u64,

    /// Share of the memory and of the CPU that stays free
    #[arg(long, value_name = "SHARE", env = "TIDEGATE_HEADROOM")]
    #[arg(default_value = "30%", value_parser = units::share)]
    pub headroom: f64,
}

/// One algorithm in one encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub(crate) struct Form {
    #[serde(serialize_with = "algorithm_name")]
    pub algorithm: Algorithm,
    /// Encoding, if the algorithm has several.
    #[serde(serialize_with = "encoding_name")]
    pub encoding: Option<Encoding>,
}

/// Result for all forms, with its assumptions.
#[derive(Debug, Serialize)]
pub(crate) struct CapacityPlan {
    #[serde(flatten)]
    pub demand: Demand,
    #[serde(flatten)]
    pub servers: RedisServers,
    #[serde(flatten)]
    pub calls: RedisCalls,
    pub fragmentation: f64,
    pub expired_keys: f64,
    /// Share by which a need may exceed the room of its primaries.
    pub tolerance: f64,
    /// CPU time of a call of an empty script, with that for its connection.
    pub empty_script_micros: f64,
    /// Whether the costs were measured on the user's Redis.
    pub measured: bool,
    pub forms: Vec<Need>,
    /// Forms that do not support the limit.
    pub unavailable: Vec<Unavailable>,
    pub recommended: Option<Form>,
    pub recommendation: String,
}

/// Needs of one form.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Need {
    #[serde(flatten)]
    pub form: Form,
    /// Maximum time for which a key outlives a single request.
    pub key_lifetime_ms: u64,
    /// Maximum number of keys at the same time.
    pub keys: u64,
    /// Requests of a key per window.
    pub requests_per_key: f64,
    pub bytes_per_key: u64,
    /// Bytes of a key whose limit is used up.
    pub bytes_per_full_key: u64,
    /// Memory of all keys with fragmentation.
    pub memory_bytes: u64,
    /// The same if all keys are full.
    pub full_memory_bytes: u64,
    /// CPU time of Redis per decision.
    pub cpu_micros: f64,
    /// CPU cores of Redis.
    pub cores: f64,
    /// Traffic of Redis with its clients, in both directions.
    pub network_bits_per_second: f64,
    pub primaries_by_memory: u64,
    pub primaries_by_cpu: u64,
    pub primaries: u64,
    /// Part of the room of these primaries that is used: of their memory or of their CPU, without
    /// the headroom.
    pub room_used: f64,
}

/// Form that does not support the limit.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Unavailable {
    #[serde(flatten)]
    pub form: Form,
    pub reason: String,
}

impl RedisCalls {
    /// Returns the bytes of a key in Redis beyond those of the table of costs.
    fn extra_key_bytes(&self) -> f64 {
        let measured = float(costs::KEY_BYTES) + text_bytes(costs::POLICY, costs::PREFIX);
        float(self.key_bytes) + text_bytes(&self.policy, &self.prefix) - measured
    }
}

fn text_bytes(policy: &str, prefix: &str) -> f64 {
    float((policy.len() + prefix.len()) as u64)
}

impl Form {
    /// Returns the quota of this form.
    pub(crate) fn quota(self, limit: u64, window: Duration) -> Result<Quota, QuotaError> {
        let quota = Quota::new(self.algorithm, limit, window)?;
        match self.encoding {
            Some(encoding) => quota.with_encoding(encoding),
            None => Ok(quota),
        }
    }

    pub(crate) fn encoding_str(self) -> &'static str {
        self.encoding.map_or("", Encoding::as_str)
    }

    /// Returns the fields of a policy.
    fn fields(self) -> String {
        match self.encoding {
            Some(encoding) => {
                format!("`algorithm: {}` with `encoding: {encoding}`", self.algorithm)
            }
            None => format!("`algorithm: {}`", self.algorithm),
        }
    }

    /// Returns the maximum time for which a key outlives a single request, in windows.
    fn lifetime(self, limit: u64) -> f64 {
        match self.algorithm {
            // A log and a bucket live up to an eighth longer, so that not every request has to set
            // the expiry.
            Algorithm::SlidingLog => 1.125,
            Algorithm::SlidingCounter => 2.0,
            Algorithm::FixedWindow | Algorithm::Concurrency => 1.0,
            Algorithm::TokenBucket | Algorithm::LeakyBucket => 0.125 + 1.0 / float(limit),
        }
    }
}

impl Demand {
    fn requests_per_window(&self) -> f64 {
        self.rps * self.window.as_secs_f64()
    }

    /// Returns the number of users that may have a count at the same time.
    pub(crate) fn active_users(&self) -> f64 {
        (float(self.users) * self.active.unwrap_or(1.0)).max(1.0)
    }

    /// Returns the requests per second that the limit admits at most.
    pub(crate) fn limit_of_all_users(&self) -> f64 {
        self.active_users() * float(self.limit) / self.window.as_secs_f64()
    }

    /// Returns the maximum number of keys at the same time: each needs a request within its
    /// lifetime.
    fn keys(&self, form: Form) -> f64 {
        let requests = self.requests_per_window() * form.lifetime(self.limit);
        (requests * (1.0 + EXPIRED_KEYS)).min(self.active_users()).max(1.0)
    }

    /// Returns the requests of a key per window, which the limit bounds.
    fn requests_per_key(&self) -> f64 {
        (self.requests_per_window() / self.active_users()).clamp(1.0, float(self.limit).max(1.0))
    }
}

impl CapacityPlan {
    /// Computes the plan by these costs.
    ///
    /// # Errors
    ///
    /// No form supports the limit and the window.
    pub(crate) fn new(
        demand: Demand,
        servers: RedisServers,
        calls: &RedisCalls,
        costs: &Costs,
        measured: bool,
    ) -> Result<Self, QuotaError> {
        let (mut forms, mut unavailable) = (Vec::new(), Vec::new());
        let mut first_error = None;
        for form in FORMS {
            match form.quota(demand.limit, demand.window) {
                Ok(_) => forms.push(Need::new(form, &demand, servers, calls, costs)),
                Err(error) => {
                    unavailable.push(Unavailable { form, reason: error.to_string() });
                    first_error.get_or_insert(error);
                }
            }
        }
        let (recommended, recommendation) = match (recommend(&forms), first_error) {
            (Some((form, sentence)), _) => (Some(form), sentence),
            (None, Some(error)) => return Err(error),
            (None, None) => (None, String::new()),
        };
        Ok(Self {
            demand,
            servers,
            calls: calls.clone(),
            fragmentation: FRAGMENTATION,
            expired_keys: EXPIRED_KEYS,
            tolerance: TOLERANCE,
            empty_script_micros: costs.empty_script_micros * (1.0 + costs.connection_cpu),
            measured,
            forms,
            unavailable,
            recommended,
            recommendation,
        })
    }
}

impl Need {
    fn new(
        form: Form,
        demand: &Demand,
        servers: RedisServers,
        calls: &RedisCalls,
        costs: &Costs,
    ) -> Self {
        let keys = demand.keys(form);
        let requests = demand.requests_per_key();
        let cost = |requests: f64| costs.at(form, requests, demand.window);
        let longer_key = calls.extra_key_bytes();
        let bytes = |requests: f64| cost(requests).bytes + costs.keyspace_bytes + longer_key;
        let memory = |requests: f64| keys * bytes(requests) * FRAGMENTATION;
        let full = float(demand.limit);
        let batch = float(calls.batch);
        let cpu_micros = costs.cpu_micros(&cost(requests), batch);
        let cores = demand.rps * cpu_micros / 1e6;
        let nodes = memory(requests) / float(servers.node_memory_bytes);
        // A key is on one server.
        let [by_memory, by_cpu] =
            [nodes, cores].map(|need| primaries(need, servers.headroom).min(rounded_up(keys)));
        let primaries = by_memory.max(by_cpu);
        let lifetime = demand.window.as_secs_f64() * form.lifetime(demand.limit);
        Self {
            form,
            key_lifetime_ms: rounded_up(lifetime * 1e3),
            keys: rounded_up(keys),
            requests_per_key: requests,
            bytes_per_key: rounded_up(bytes(requests)),
            bytes_per_full_key: rounded_up(bytes(full)),
            memory_bytes: rounded_up(memory(requests)),
            full_memory_bytes: rounded_up(memory(full)),
            cpu_micros,
            cores,
            network_bits_per_second: demand.rps
                * (cost(requests).network(batch) + longer_key)
                * 8.0,
            primaries_by_memory: by_memory,
            primaries_by_cpu: by_cpu,
            primaries,
            room_used: nodes.max(cores) / (float(primaries) * (1.0 - servers.headroom)),
        }
    }
}

/// Returns the number of primaries for the work of `need` servers: with headroom, and such that the
/// others can do it without headroom if one fails.
fn primaries(need: f64, headroom: f64) -> u64 {
    let room = ((1.0 - headroom) * (1.0 + TOLERANCE)).min(1.0);
    match rounded_up(need / room) {
        0 | 1 => 1,
        several => several.max(rounded_up(need).saturating_add(1)).max(MIN_CLUSTER),
    }
}

/// Returns the next whole number.
fn rounded_up(number: f64) -> u64 {
    whole(number.ceil())
}

/// Recommends the exact log unless other forms need clearly fewer primaries, else the counter.
fn recommend(forms: &[Need]) -> Option<(Form, String)> {
    let size = |need: &&Need| (need.primaries, need.memory_bytes);
    let cheapest_of =
        |algorithm| forms.iter().filter(|need| need.form.algorithm == algorithm).min_by_key(size);
    let fewest = forms.iter().map(|need| need.primaries).min()?;
    let counter = cheapest_of(Algorithm::SlidingCounter)?;
    let log = cheapest_of(Algorithm::SlidingLog);
    if let Some(log) = log.filter(|log| log.primaries <= fewest + fewest / 10) {
        let servers = servers(log.primaries);
        let others = match fewest {
            fewest if fewest == log.primaries => {
                format!("no other algorithm needs fewer than its {servers}")
            }
            fewest => format!("its {servers} are within the error of the {fewest} of others"),
        };
        let sentence = format!("Use {}: it is exact, and {others}.", log.form.fields());
        return Some((log.form, sentence));
    }
    let other = match log {
        Some(log) => format!("where the exact sliding-log needs {}", log.primaries),
        None => "and the exact sliding-log does not support this limit".to_owned(),
    };
    let sentence = format!(
        "Use {}: it is nearly exact, and needs {}, {other}.",
        counter.form.fields(),
        servers(counter.primaries)
    );
    Some((counter.form, sentence))
}

fn servers(primaries: u64) -> String {
    match primaries {
        1 => "1 primary with a replica".to_owned(),
        count => format!("{count} primaries with a replica each"),
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde expects")]
fn algorithm_name<S: Serializer>(algorithm: &Algorithm, to: S) -> Result<S::Ok, S::Error> {
    algorithm.as_str().serialize(to)
}

#[expect(
    clippy::ref_option,
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde expects"
)]
fn encoding_name<S: Serializer>(encoding: &Option<Encoding>, to: S) -> Result<S::Ok, S::Error> {
    encoding.map(Encoding::as_str).serialize(to)
}

fn millis<S: Serializer>(window: &Duration, to: S) -> Result<S::Ok, S::Error> {
    (window.as_secs_f64() * 1e3).serialize(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn demand(users: u64, rps: f64) -> Demand {
        Demand { users, limit: 100, window: Duration::from_secs(10), rps, active: None }
    }

    fn plan(demand: Demand, node_memory_bytes: u64) -> CapacityPlan {
        let costs = Costs::checked_in().expect("valid");
        let servers = RedisServers { node_memory_bytes, headroom: 0.3 };
        let calls = RedisCalls {
            batch: 1,
            key_bytes: costs::KEY_BYTES,
            policy: costs::POLICY.to_owned(),
            prefix: costs::PREFIX.to_owned(),
        };
        CapacityPlan::new(demand, servers, &calls, &costs, false).expect("a valid limit")
    }

    #[test]
    fn keys_are_bounded_by_active_users_and_by_requests() {
        let few_users = plan(demand(1_000, 1e6), GIB);
        assert!(few_users.forms.iter().all(|need| need.keys == 1_000));
        let few_requests = plan(demand(1_000_000_000, 5e3), GIB);
        for need in &few_requests.forms {
            // The requests of a window, times the lifetime in windows, and expired ones.
            let lifetime = match need.form.algorithm {
                Algorithm::SlidingLog => 1.125,
                Algorithm::SlidingCounter => 2.0,
                Algorithm::FixedWindow | Algorithm::Concurrency => 1.0,
                Algorithm::TokenBucket | Algorithm::LeakyBucket => 0.135,
            };
            let expected = rounded_up(50_000.0 * lifetime * 1.25);
            assert!(need.keys.abs_diff(expected) <= 1, "{need:?}");
            assert!((need.requests_per_key - 1.0).abs() < 1e-9, "{need:?}");
        }
        let some = Demand { active: Some(0.001), ..demand(1_000_000, 5e3) };
        for need in &plan(some, GIB).forms {
            assert_eq!((need.keys, need.requests_per_key), (1_000, 50.0), "{need:?}");
        }
        let all = Demand { active: Some(1.0), ..demand(1_000_000_000, 5e3) };
        assert_eq!(plan(all, GIB).forms[0].keys, few_requests.forms[0].keys);
    }

    #[test]
    fn largest_numbers_have_a_plan() {
        let largest = Demand {
            limit: Quota::MAX_LIMIT,
            window: Duration::from_secs(366 * 86_400),
            ..demand(1_000_000_000_000_000_000, 1e15)
        };
        let plan = plan(largest, 1 << 20);
        assert!(plan.unavailable.iter().all(|form| form.reason.contains("too large")), "{plan:?}");
        assert_eq!((plan.forms.len(), plan.unavailable.len()), (5, 2));
        for need in &plan.forms {
            assert!(need.primaries > 1_000_000 && need.cores.is_finite(), "{need:?}");
        }
        assert!(plan.recommendation.contains("does not support this limit"), "{plan:?}");
    }

    #[test]
    fn primaries_have_headroom_and_survive_a_failure() {
        for (need, expected) in [
            (0.0, 1),
            // The costs are no more precise than the tolerance.
            (0.76, 1),
            // A cluster has at least three.
            (0.78, 3),
            (2.0, 3),
            (2.1, 4),
            (7.1, 10),
            (7.8, 11),
            (f64::MAX, u64::MAX),
        ] {
            assert_eq!(primaries(need, 0.3), expected, "{need}");
        }
        // Without headroom, one more.
        assert_eq!([1.0, 1.05, 3.0, 7.5].map(|need| primaries(need, 0.0)), [1, 3, 4, 9]);
    }

    #[test]
    fn exact_log_is_recommended_unless_it_needs_more_primaries() {
        let small = plan(demand(1_000, 100.0), GIB);
        assert!(small.forms.iter().all(|need| need.primaries == 1));
        assert!(small.recommendation.contains("sliding-log` with `encoding: packed"), "{small:?}");
        let long = Demand {
            limit: 10_000,
            window: Duration::from_secs(86_400),
            ..demand(10_000_000, 1e4)
        };
        let long = plan(long, GIB);
        let expected = "sliding-counter` with `encoding: packed";
        assert!(long.recommendation.contains(expected), "{long:?}");
    }
}
