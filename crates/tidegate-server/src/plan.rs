//! `tidegate plan`: what a number of users and requests costs on Redis.
//!
//! [`costs`] has the price of one decision and of one key; this file multiplies. Each assumption is
//! a field of [`Plan`], so that it is shown beside the result.

use std::time::Duration;

use serde::{Serialize, Serializer};
use tidegate::{Algorithm, Encoding, Quota, QuotaError};

use self::costs::{Cost, Costs};

pub(crate) mod costs;
pub(crate) mod measure;

/// Allocated memory in relation to the memory that Redis counts as used.
const FRAGMENTATION: f64 = 1.25;
/// Fewest primaries of a cluster: fewer cannot agree on a failover.
const MIN_CLUSTER: u64 = 3;

/// What is asked of Redis.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Demand {
    pub(crate) users: u64,
    pub(crate) limit: u64,
    #[serde(skip)]
    pub(crate) window: Duration,
    /// Requests per second at the peak.
    pub(crate) rps: f64,
    /// Share of the users with a count in Redis at the same time.
    pub(crate) active: Option<f64>,
    /// Length of a user's key.
    pub(crate) key_bytes: u64,
}

/// Redis servers to use.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Server {
    pub(crate) memory: u64,
    /// Share of memory and CPU that stays free.
    pub(crate) headroom: f64,
}

/// One algorithm in one encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub(crate) struct Form {
    #[serde(serialize_with = "name_of_algorithm")]
    pub(crate) algorithm: Algorithm,
    /// `None` if the algorithm has only one.
    #[serde(serialize_with = "name_of_encoding", skip_serializing_if = "Option::is_none")]
    pub(crate) encoding: Option<Encoding>,
}

/// Result for all forms.
#[derive(Debug, Serialize)]
pub(crate) struct Plan {
    pub(crate) demand: Demand,
    pub(crate) window_seconds: f64,
    pub(crate) server: Server,
    pub(crate) fragmentation: f64,
    /// CPU time of a call of an empty script, in microseconds; other CPU times are multiples of it.
    pub(crate) empty_script_micros: f64,
    /// Whether the costs were measured on the user's Redis.
    pub(crate) measured: bool,
    pub(crate) forms: Vec<Need>,
    pub(crate) recommendation: String,
}

/// What one form needs.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Need {
    #[serde(flatten)]
    pub(crate) form: Form,
    /// Keys in Redis at the same time.
    pub(crate) keys: u64,
    /// Bytes of a usual key, and of one whose limit is used up.
    pub(crate) bytes_per_key: u64,
    pub(crate) bytes_per_full_key: u64,
    /// Memory of all keys, with fragmentation.
    pub(crate) memory_bytes: u64,
    /// Redis CPU per decision, with one and with 64 decisions per call.
    pub(crate) cpu_micros: f64,
    pub(crate) batched_cpu_micros: f64,
    /// CPU cores of Redis, with one and with 64 decisions per call.
    pub(crate) cores: f64,
    pub(crate) batched_cores: f64,
    /// Bits per second, both directions, with one and with 64 decisions per call.
    pub(crate) network_bits: f64,
    pub(crate) batched_network_bits: f64,
    pub(crate) primaries_by_memory: u64,
    pub(crate) primaries_by_cpu: u64,
    /// Primaries in all, so that one may be lost. Each needs a replica.
    pub(crate) primaries: u64,
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

    /// Returns the name for people, such as `sliding-log packed`.
    pub(crate) fn name(self) -> String {
        match self.encoding {
            Some(encoding) => format!("{} {encoding}", self.algorithm),
            None => self.algorithm.to_string(),
        }
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

    /// Returns how long a key outlives its last request at most, in windows.
    fn lifetime(self) -> f64 {
        match self.algorithm {
            // The units of a window weigh until the end of the next one.
            Algorithm::SlidingCounter => 2.0,
            _ => 1.0,
        }
    }

    fn is_exact(self) -> bool {
        self.algorithm == Algorithm::SlidingLog
    }
}

impl Demand {
    /// Returns the keys in Redis at the same time. Without a given share it is the most that can
    /// be: each request comes from another user, and a key lives for its lifetime only.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn keys(&self, form: Form) -> f64 {
        let users = self.users as f64;
        let most = (self.rps * self.window.as_secs_f64() * form.lifetime()).min(users);
        self.active.map_or(most, |share| users * share).max(1.0)
    }

    /// Returns the entries of a usual key of a log.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn entries(&self, form: Form) -> f64 {
        let requests = self.rps * self.window.as_secs_f64();
        (requests / self.keys(form)).clamp(1.0, (self.limit as f64).max(1.0))
    }
}

impl Plan {
    /// Computes the plan by these costs.
    pub(crate) fn new(demand: Demand, server: Server, costs: &Costs, measured: bool) -> Self {
        let forms: Vec<Need> =
            costs.forms().map(|form| Need::new(form, &demand, &server, costs)).collect();
        Self {
            demand,
            window_seconds: demand.window.as_secs_f64(),
            server,
            fragmentation: FRAGMENTATION,
            empty_script_micros: costs.empty_script_micros,
            measured,
            recommendation: recommendation(&forms),
            forms,
        }
    }
}

impl Need {
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn new(form: Form, demand: &Demand, server: &Server, costs: &Costs) -> Self {
        let keys = demand.keys(form);
        let usual = costs.at(form, demand.entries(form));
        let full = costs.at(form, demand.limit as f64);
        let bytes = |cost: &Cost| {
            let name = demand.key_bytes as f64 - costs::KEY_BYTES as f64;
            (cost.bytes + costs.keyspace_bytes + name).max(0.0)
        };
        let micros = |ratio: f64| ratio * costs.empty_script_micros;
        let memory = keys * bytes(&usual) * FRAGMENTATION;
        let cores = |ratio: f64| demand.rps * micros(ratio) / 1e6;
        let used = 1.0 - server.headroom;
        let by_memory = memory / server.memory as f64;
        let by_cpu = cores(usual.cpu);
        let primaries = |need: f64| {
            let with_headroom = whole(need / used).max(1);
            // One more, unless the others can do without their headroom.
            let with_loss = if with_headroom > 1 { whole(need) + 1 } else { 1 };
            let count = with_headroom.max(with_loss);
            if count > 1 { count.max(MIN_CLUSTER) } else { 1 }
        };
        let (by_memory, by_cpu) = (primaries(by_memory), primaries(by_cpu));
        Self {
            form,
            keys: whole(keys),
            bytes_per_key: whole(bytes(&usual)),
            bytes_per_full_key: whole(bytes(&full)),
            memory_bytes: whole(memory),
            cpu_micros: micros(usual.cpu),
            batched_cpu_micros: micros(usual.batched_cpu),
            cores: cores(usual.cpu),
            batched_cores: cores(usual.batched_cpu),
            network_bits: demand.rps * usual.network * 8.0,
            batched_network_bits: demand.rps * usual.batched_network * 8.0,
            primaries_by_memory: by_memory,
            primaries_by_cpu: by_cpu,
            primaries: by_memory.max(by_cpu),
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde wants")]
fn name_of_algorithm<S: Serializer>(algorithm: &Algorithm, to: S) -> Result<S::Ok, S::Error> {
    algorithm.as_str().serialize(to)
}

#[expect(
    clippy::ref_option,
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde wants"
)]
fn name_of_encoding<S: Serializer>(encoding: &Option<Encoding>, to: S) -> Result<S::Ok, S::Error> {
    encoding.map(Encoding::as_str).serialize(to)
}

/// Returns the next whole number.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "saturates; the number is not negative"
)]
fn whole(number: f64) -> u64 {
    number.ceil() as u64
}

/// Recommends the exact log if it needs no more servers than the cheapest form, which people
/// should not have to weigh themselves.
fn recommendation(forms: &[Need]) -> String {
    let cost = |need: &&Need| (need.primaries, need.memory_bytes);
    let Some(cheapest) = forms.iter().min_by_key(cost) else {
        return String::from("there are no costs to compare");
    };
    let exact = forms.iter().filter(|need| need.form.is_exact()).min_by_key(cost);
    let counter = forms
        .iter()
        .filter(|need| need.form.algorithm == Algorithm::SlidingCounter)
        .min_by_key(cost)
        .unwrap_or(cheapest);
    match exact {
        Some(exact) if exact.primaries <= counter.primaries.min(cheapest.primaries) => {
            format!(
                "Use {}: it is exact, and needs {}, no more than any other.",
                exact.form.fields(),
                servers(exact.primaries)
            )
        }
        exact => {
            let log = exact.map_or_else(String::new, |exact| {
                format!(" The exact log would need {}.", servers(exact.primaries))
            });
            format!(
                "Use {}: it is close to exact, and needs {}.{log}",
                counter.form.fields(),
                servers(counter.primaries)
            )
        }
    }
}

fn servers(primaries: u64) -> String {
    match primaries {
        1 => String::from("1 primary with a replica"),
        count => format!("{count} primaries with a replica each"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn demand(users: u64, rps: f64) -> Demand {
        let window = Duration::from_secs(10);
        Demand { users, limit: 100, window, rps, active: None, key_bytes: costs::KEY_BYTES }
    }

    fn plan(demand: Demand, memory: u64) -> Plan {
        let costs = Costs::checked_in().expect("valid");
        Plan::new(demand, Server { memory, headroom: 0.3 }, &costs, false)
    }

    #[test]
    fn keys_are_bounded_by_users_and_by_requests_within_their_lifetime() {
        let few_users = plan(demand(1_000, 1e6), GIB);
        assert!(few_users.forms.iter().all(|need| need.keys == 1_000));
        let few_requests = plan(demand(1_000_000_000, 5e3), GIB);
        for need in &few_requests.forms {
            let counter = need.form.algorithm == Algorithm::SlidingCounter;
            assert_eq!(need.keys, if counter { 100_000 } else { 50_000 }, "{need:?}");
        }
        let given = Demand { active: Some(0.5), ..demand(1_000_000, 5e3) };
        assert!(plan(given, GIB).forms.iter().all(|need| need.keys == 500_000));
    }

    #[test]
    fn primaries_grow_with_memory_and_cpu_and_one_may_be_lost() {
        let small = plan(demand(1_000, 100.0), GIB);
        assert!(small.forms.iter().all(|need| need.primaries == 1));
        let all = Demand { active: Some(1.0), ..demand(1_000_000_000, 1e3) };
        let much_memory = plan(all, 16 * GIB);
        for need in &much_memory.forms {
            assert_eq!(need.primaries_by_cpu, 1);
            let gibibytes = need.memory_bytes / GIB;
            assert!(need.primaries * 16 * 7 / 10 >= gibibytes, "{need:?}");
            assert!((need.primaries - 1) * 16 >= gibibytes, "{need:?}");
        }
        let busy = plan(demand(1_000, 2e6), 16 * GIB);
        assert!(busy.forms.iter().all(|need| need.primaries_by_memory == 1));
        assert!(busy.forms.iter().all(|need| need.primaries_by_cpu >= MIN_CLUSTER));
    }

    #[test]
    fn exact_log_is_recommended_if_it_needs_no_more_servers() {
        let small = plan(demand(1_000, 100.0), GIB);
        assert!(small.recommendation.contains("sliding-log"), "{}", small.recommendation);
        let long = Demand {
            limit: 100_000,
            window: Duration::from_secs(86_400),
            active: Some(1.0),
            ..demand(10_000_000, 1e6)
        };
        let long = plan(long, 16 * GIB);
        assert!(long.recommendation.contains("sliding-counter"), "{}", long.recommendation);
    }
}
