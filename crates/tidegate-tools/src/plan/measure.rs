//! Measurement of the costs on a real Redis, under a prefix of its own.
//!
//! CPU time is that of the server, from INFO, in relation to an empty script that is called before
//! and after. All calls are sent in pipelines, so that Redis is busy meanwhile: neither the speed
//! of this process nor that of the machine matters much.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use futures_util::future::try_join_all;
use tidegate::store::redis::{Builder, Reply};
use tidegate::{Algorithm, Charge, Encoding, Limiter, Quota, RedisStore, StoreError};

use super::costs::{BATCH, CostRow, Costs, FormCost, KEY_BYTES, POLICY};
use super::{FORMS, Form};
use crate::tool::percentiles::nearest_rank;
use crate::tool::progress::ProgressBar;
use crate::tool::redis_info::Info;
use crate::tool::text::float;

/// Fills of a key that are measured. A sorted set changes its form above 128 members.
const SORTED_SET_FILLS: [Fill; 5] =
    [ONE_REQUEST, Fill::new(16), Fill::new(128), Fill::new(129), Fill::new(512)];
/// A packed log changes its form above 1,019 requests, and changes it back below 508. So the fills
/// next to that keep their distance while CPU is measured.
const PACKED_LOG_FILLS: [Fill; 5] = [
    ONE_REQUEST,
    Fill::new(16),
    Fill { entries: 1000, filled: 1000, live: 800.0 },
    Fill { entries: 1020, filled: 1400, live: 1400.0 },
    Fill::new(2048),
];
const COUNTER_FILLS: [Fill; 2] = [ONE_REQUEST, Fill::new(16)];
/// One request per window: every decision creates its key, even if keys live for two windows.
const ONE_REQUEST: Fill = Fill { entries: 1, filled: 1, live: 0.25 };
/// Window in which no entry expires. Keys that could not be deleted expire then.
const MAX_WINDOW: Duration = Duration::from_secs(300);
const MIN_WINDOW: Duration = Duration::from_millis(1);
/// Minimum number of decisions per window, over all keys.
const MIN_DECISIONS_PER_WINDOW: u64 = 2_048;
/// Series per cost, of which the median counts.
const SERIES: usize = 5;
/// Keys whose MEMORY USAGE is compared with the growth of the whole server: three quarters of a
/// power of two, because Redis's tables have such a size.
const KEYSPACE_KEYS: u64 = 24_576;
const MAX_KEYSPACE_BYTES: f64 = 256.0;
/// Limit that no measurement reaches.
const UNREACHED_LIMIT: u64 = Quota::MAX_SORTED_SET_LIMIT;
/// Connections that call an empty script at once.
const CONNECTIONS: usize = 50;
const IDLE_INTERVAL: Duration = Duration::from_millis(300);

/// Measurement on one Redis.
pub(crate) struct CostMeasurement {
    /// Sends each decision in a call of its own.
    single: Limiter<RedisStore>,
    /// Sends concurrent decisions in one call.
    batched: Limiter<RedisStore>,
    /// Decisions per series.
    samples: usize,
    keys_created: Cell<u64>,
    /// Keys in Redis that are not deleted yet.
    live_keys: RefCell<Vec<String>>,
    progress: RefCell<ProgressBar>,
    /// Rows that are done, and all.
    rows: (Cell<usize>, usize),
}

/// Requests of a key in its window.
#[derive(Debug, Clone, Copy)]
struct Fill {
    /// While memory is measured.
    entries: u64,
    /// Before CPU is measured.
    filled: u64,
    /// While CPU is measured.
    live: f64,
}

impl Fill {
    const fn new(entries: u32) -> Self {
        Self { entries: entries as u64, filled: entries as u64, live: entries as f64 }
    }

    /// Returns the window with which every further decision adds an entry and one expires, as in
    /// production: the time in which the live ones were added.
    fn window(self, elapsed: Duration) -> anyhow::Result<Duration> {
        let window = elapsed.mul_f64(self.live / float(self.filled));
        let window = Duration::from_millis(u64::try_from(window.as_millis())?);
        Ok(window.clamp(MIN_WINDOW, MAX_WINDOW))
    }
}

/// Result of a measurement.
pub(crate) struct Measured {
    pub costs: Costs,
    /// CPU cores that other clients used before the measurement.
    pub background_cores: f64,
}

impl CostMeasurement {
    /// Connects to Redis, to measure with this many decisions per series.
    ///
    /// # Errors
    ///
    /// Redis cannot be reached.
    pub(crate) async fn connect(
        new_builder: impl Fn() -> Builder,
        samples: usize,
    ) -> Result<Self, StoreError> {
        let rows = FORMS.iter().map(|form| fills_of(*form).len()).sum();
        Ok(Self {
            single: Limiter::new(new_builder().group_commit(false).connect().await?),
            batched: Limiter::new(new_builder().connect().await?),
            samples: samples.next_multiple_of(BATCH),
            keys_created: Cell::new(0),
            live_keys: RefCell::default(),
            progress: RefCell::new(ProgressBar::start()),
            rows: (Cell::new(0), rows),
        })
    }

    /// Measures all costs. [`clean_up`](Self::clean_up) must follow.
    ///
    /// # Errors
    ///
    /// Redis cannot be reached, or refuses INFO, MEMORY USAGE or SCRIPT LOAD.
    pub(crate) async fn run(&self, new_builder: impl Fn() -> Builder) -> anyhow::Result<Measured> {
        let background_cores = self.background_cores().await?;
        let empty = EmptyScript::load(self).await?;
        let (mut rows, mut empty_micros) = (Vec::new(), Vec::new());
        for form in FORMS {
            for fill in fills_of(form) {
                let cost = self.cost(form, *fill, &empty, &mut empty_micros).await;
                let cost = cost.with_context(|| form.algorithm.as_str())?;
                rows.push(CostRow { form, entries: fill.entries, cost });
                self.rows.0.set(self.rows.0.get() + 1);
            }
        }
        let keyspace_bytes = self.keyspace_bytes(FORMS[0]).await?;
        // Other processes can only make them slower.
        let empty_script_micros = percentile(empty_micros, 25);
        ensure!(empty_script_micros > 0.0, "INFO reports no CPU time");
        let connection_cpu = empty.connection_cpu(new_builder).await?;
        let costs = Costs { empty_script_micros, connection_cpu, keyspace_bytes, rows };
        Ok(Measured { costs, background_cores })
    }

    /// Deletes all keys of the measurement.
    pub(crate) async fn clean_up(&self) -> anyhow::Result<()> {
        // A connection answers in order: then no decision of a measurement that was interrupted can
        // create a key any more.
        for limiter in [&self.single, &self.batched] {
            for node in self.primaries() {
                limiter.store().ask_node(&node, &["PING"]).await?;
            }
        }
        let keys = self.live_keys.borrow().clone();
        for names in keys.chunks(BATCH) {
            let commands: Vec<[&str; 2]> = names.iter().map(|name| ["UNLINK", name]).collect();
            let commands: Vec<&[&str]> = commands.iter().map(<[&str; 2]>::as_slice).collect();
            for node in self.primaries() {
                // The nodes of a cluster that do not have the key answer MOVED.
                self.store().ask_node_all(&node, &commands).await?;
            }
        }
        // Not before: this call may be interrupted, too, and is then repeated.
        self.live_keys.borrow_mut().clear();
        Ok(())
    }

    fn store(&self) -> &RedisStore {
        self.batched.store()
    }

    fn primaries(&self) -> Vec<String> {
        let nodes = self.store().nodes().into_iter().filter(|node| node.primary);
        nodes.map(|node| node.address).collect()
    }

    /// Creates the names of new keys.
    fn new_keys(&self, quota: &Quota, count: u64) -> Vec<String> {
        let first = self.keys_created.get();
        self.keys_created.set(first + count);
        let width = usize::try_from(KEY_BYTES).unwrap_or_default();
        let keys: Vec<String> =
            (first..first + count).map(|number| format!("{number:0width$}")).collect();
        self.live_keys.borrow_mut().extend(keys.iter().map(|key| self.redis_key(quota, key)));
        keys
    }

    fn redis_key(&self, quota: &Quota, key: &str) -> String {
        self.store().redis_key(&Charge::new(key, quota).with_policy(POLICY))
    }

    /// Measures a form with this many requests of a key per window.
    async fn cost(
        &self,
        form: Form,
        fill: Fill,
        empty: &EmptyScript<'_>,
        empty_micros: &mut Vec<f64>,
    ) -> anyhow::Result<FormCost> {
        let long = form.quota(UNREACHED_LIMIT, MAX_WINDOW)?;
        let mut bytes = 0.0;
        let mut costs = [(0.0, 0.0); 2];
        for (limiter, cost) in [&self.single, &self.batched].into_iter().zip(&mut costs) {
            let keys = (MIN_DECISIONS_PER_WINDOW / fill.entries).max(BATCH as u64);
            let keys = self.new_keys(&long, keys);
            let start = Instant::now();
            for number in 1..=fill.filled {
                self.decide(limiter, &long, &keys, keys.len()).await?;
                if number == fill.entries {
                    bytes = self.memory_usage(&long, &keys).await?;
                }
            }
            let sliding = form.quota(UNREACHED_LIMIT, fill.window(start.elapsed())?)?;
            let (mut ratios, mut networks) = (Vec::new(), Vec::new());
            let mut before = empty.micros().await?;
            for _ in 0..SERIES {
                self.decide(limiter, &sliding, &keys, keys.len()).await?;
                let (micros, network) = self.series(limiter, &sliding, &keys).await?;
                let after = empty.micros().await?;
                ratios.push(micros / f64::midpoint(before, after));
                networks.push(network);
                empty_micros.push(after);
                before = after;
            }
            *cost = (percentile(ratios, 50), percentile(networks, 50));
            self.clean_up().await?;
        }
        let [(single_cpu, single_network), (batched_cpu, batched_network)] = costs;
        Ok(FormCost { bytes, single_cpu, batched_cpu, single_network, batched_network })
    }

    /// Returns CPU time and network bytes per decision.
    async fn series(
        &self,
        limiter: &Limiter<RedisStore>,
        quota: &Quota,
        keys: &[String],
    ) -> anyhow::Result<(f64, f64)> {
        let decisions = float(self.samples as u64);
        let network = self.network_bytes().await?;
        let cpu = self.cpu_micros().await?;
        self.decide(limiter, quota, keys, self.samples).await?;
        let micros = self.cpu_micros().await? - cpu;
        let bytes = self.network_bytes().await? - network;
        Ok((micros / decisions, bytes / decisions))
    }

    /// Makes this many decisions for these keys in turn, of which [`BATCH`] are concurrent.
    async fn decide(
        &self,
        limiter: &Limiter<RedisStore>,
        quota: &Quota,
        keys: &[String],
        decisions: usize,
    ) -> anyhow::Result<()> {
        let mut next = keys.iter().cycle().take(decisions).peekable();
        while next.peek().is_some() {
            let calls = next.by_ref().take(BATCH).map(async |key| {
                let charge = Charge::new(key, quota).with_policy(POLICY);
                limiter.acquire(&charge).await
            });
            let decided = try_join_all(calls).await?;
            ensure!(decided.iter().all(|decision| decision.allowed), "a decision was denied");
            let part = float(self.rows.0.get() as u64) / float(self.rows.1.max(1) as u64);
            for _ in decided {
                self.progress.borrow_mut().count(1, || Some(part));
            }
        }
        Ok(())
    }

    /// Returns the mean MEMORY USAGE of some of these keys.
    async fn memory_usage(&self, quota: &Quota, keys: &[String]) -> anyhow::Result<f64> {
        let names: Vec<String> =
            keys.iter().take(BATCH).map(|key| self.redis_key(quota, key)).collect();
        let commands: Vec<[&str; 5]> =
            names.iter().map(|name| ["MEMORY", "USAGE", name, "SAMPLES", "0"]).collect();
        let commands: Vec<&[&str]> = commands.iter().map(<[&str; 5]>::as_slice).collect();
        let mut usages = Vec::new();
        for node in self.primaries() {
            for reply in self.store().ask_node_all(&node, &commands).await? {
                match reply {
                    Reply::Integer(usage) => usages.push(u64::try_from(usage)?),
                    Reply::Error(error) if error.starts_with("MOVED") => {}
                    Reply::Nil => {}
                    Reply::Error(error) => bail!("MEMORY USAGE: {error}"),
                    other => bail!("MEMORY USAGE answered {other:?}"),
                }
            }
        }
        ensure!(!usages.is_empty(), "MEMORY USAGE found no key");
        Ok(float(usages.iter().sum()) / float(usages.len() as u64))
    }

    /// Returns the memory per key that MEMORY USAGE leaves out.
    async fn keyspace_bytes(&self, form: Form) -> anyhow::Result<f64> {
        let quota = form.quota(UNREACHED_LIMIT, MAX_WINDOW)?;
        let keys = self.new_keys(&quota, KEYSPACE_KEYS);
        let before = self.info("memory", &["used_memory"]).await?;
        self.decide(&self.batched, &quota, &keys, keys.len()).await?;
        let growth = self.info("memory", &["used_memory"]).await? - before;
        let usage = self.memory_usage(&quota, &keys).await?;
        self.clean_up().await?;
        // Other clients may have created or deleted keys meanwhile.
        Ok((growth / float(keys.len() as u64) - usage).clamp(0.0, MAX_KEYSPACE_BYTES))
    }

    /// Returns the CPU cores that Redis uses without the measurement.
    async fn background_cores(&self) -> anyhow::Result<f64> {
        let (start, before) = (Instant::now(), self.cpu_micros().await?);
        tokio::time::sleep(IDLE_INTERVAL).await;
        Ok((self.cpu_micros().await? - before) / start.elapsed().as_secs_f64() / 1e6)
    }

    async fn cpu_micros(&self) -> anyhow::Result<f64> {
        Ok(self.info("cpu", &["used_cpu_user", "used_cpu_sys"]).await? * 1e6)
    }

    async fn network_bytes(&self) -> anyhow::Result<f64> {
        self.info("stats", &["total_net_input_bytes", "total_net_output_bytes"]).await
    }

    /// Returns the sum of these fields of INFO over all primaries.
    async fn info(&self, section: &str, fields: &[&str]) -> anyhow::Result<f64> {
        let mut sum = 0.0;
        for node in self.primaries() {
            let reply = self.store().ask_node(&node, &["INFO", section]).await?;
            let info = Info::parse(&text_of("INFO", reply)?);
            for field in fields {
                let number = info.text(field).and_then(|text| text.parse::<f64>().ok());
                sum += number.with_context(|| format!("INFO has no {field}"))?;
            }
        }
        Ok(sum)
    }
}

/// Script that does nothing, on the first primary.
struct EmptyScript<'m> {
    measurement: &'m CostMeasurement,
    node: String,
    hash: String,
}

impl<'m> EmptyScript<'m> {
    async fn load(measurement: &'m CostMeasurement) -> anyhow::Result<Self> {
        let node = measurement.primaries().into_iter().next().context("Redis has no primary")?;
        let load = ["SCRIPT", "LOAD", "return 0"];
        let hash = text_of("SCRIPT LOAD", measurement.store().ask_node(&node, &load).await?)?;
        Ok(Self { measurement, node, hash })
    }

    /// Returns the CPU time per call in a pipeline.
    async fn micros(&self) -> anyhow::Result<f64> {
        let call = ["EVALSHA", self.hash.as_str(), "0"];
        let pipeline = [&call[..]; BATCH];
        let before = self.measurement.cpu_micros().await?;
        for _ in 0..self.measurement.samples / BATCH {
            for reply in self.measurement.store().ask_node_all(&self.node, &pipeline).await? {
                ensure!(reply == Reply::Integer(0), "an empty script answered {reply:?}");
            }
        }
        let micros = self.measurement.cpu_micros().await? - before;
        Ok(micros / float(self.measurement.samples as u64))
    }

    /// Returns the CPU time of a call for its connection, in calls in a pipeline: that of calls on
    /// many connections at once, of which each is read and answered for itself.
    async fn connection_cpu(&self, new_builder: impl Fn() -> Builder) -> anyhow::Result<f64> {
        let call = ["EVALSHA", self.hash.as_str(), "0"];
        let connections = (0..CONNECTIONS).map(|_| new_builder().connect());
        let connections = try_join_all(connections).await?;
        let rounds = self.measurement.samples.div_ceil(connections.len());
        let mut costs = Vec::new();
        for _ in 0..SERIES {
            let in_pipeline = self.micros().await?;
            let before = self.measurement.cpu_micros().await?;
            for _ in 0..rounds {
                let calls = connections.iter().map(|store| store.ask_node(&self.node, &call));
                try_join_all(calls).await?;
            }
            let calls = float((rounds * connections.len()) as u64);
            let micros = (self.measurement.cpu_micros().await? - before) / calls;
            costs.push((micros / in_pipeline - 1.0).max(0.0));
        }
        Ok(percentile(costs, 50))
    }
}

/// Returns the text that a command answered.
fn text_of(command: &str, reply: Reply) -> anyhow::Result<String> {
    match reply {
        Reply::Text(text) => Ok(text),
        Reply::Error(error) => bail!("{command}: {error}"),
        other => bail!("{command} answered {other:?}"),
    }
}

/// Returns the fills that are measured.
fn fills_of(form: Form) -> &'static [Fill] {
    match (form.algorithm, form.encoding) {
        (Algorithm::SlidingLog, Some(Encoding::Packed)) => &PACKED_LOG_FILLS,
        (Algorithm::SlidingLog, _) => &SORTED_SET_FILLS,
        _ => &COUNTER_FILLS,
    }
}

fn percentile(mut numbers: Vec<f64>, percent: usize) -> f64 {
    numbers.sort_by(f64::total_cmp);
    nearest_rank(&numbers, percent).unwrap_or_default()
}
