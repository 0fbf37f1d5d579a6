//! Measurement of the costs on a real Redis, under a prefix of its own.

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use futures_util::future::try_join_all;
use tidegate::store::redis::Reply;
use tidegate::{Charge, Limiter, Quota, RedisStore};

use super::Form;
use super::costs::{Cost, Costs, KEY_BYTES, Row};
use crate::doctor::info::Info;

/// Decisions per call of the batched form.
const BATCH: usize = 64;
/// Entries of a log that are measured. A sorted set changes its form above 128.
const ENTRIES: [u64; 5] = [1, 16, 128, 160, 1_024];
/// Window during which the entries stay.
const WINDOW: Duration = Duration::from_secs(600);
/// Keys whose memory is compared with the growth of the whole server.
const KEYSPACE_KEYS: u64 = 4_000;
/// Keys that are deleted at once.
const DELETED_AT_ONCE: usize = 500;
/// Limit that no measurement reaches.
const MEASURED_LIMIT: u64 = 1_000_000;
const POLICY: &str = "plan";

/// Extent of a measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    /// Decisions per measured cost.
    pub(crate) decisions: usize,
}

/// Counters of all primaries.
#[derive(Debug, Clone, Copy, Default)]
struct Usage {
    cpu_micros: f64,
    network_bytes: f64,
    used_memory: f64,
}

/// Measures the costs of these forms. All keys are deleted afterwards, and expire if that fails.
///
/// # Errors
///
/// Redis cannot be reached, or refuses INFO or MEMORY USAGE.
pub(crate) async fn measure(
    store: RedisStore,
    forms: impl Iterator<Item = Form>,
    extent: Extent,
) -> anyhow::Result<Costs> {
    let bench = Bench { limiter: Limiter::new(store), extent };
    let empty_script_micros = bench.empty_script().await?;
    let mut costs = Costs { empty_script_micros, keyspace_bytes: 0.0, rows: Vec::new() };
    let forms: Vec<Form> = forms.collect();
    for (number, form) in forms.iter().enumerate() {
        if std::io::stderr().is_terminal() {
            eprint!("\r\x1b[Kmeasuring {} ({} of {})", form.name(), number + 1, forms.len());
        }
        let is_log = form.quota(1, WINDOW)?.algorithm() == tidegate::Algorithm::SlidingLog;
        let entries = if is_log { &ENTRIES[..] } else { &ENTRIES[..1] };
        for entries in entries {
            let cost = bench.cost(*form, *entries, empty_script_micros).await?;
            costs.rows.push(Row { form: *form, entries: *entries, cost });
        }
    }
    costs.keyspace_bytes = match forms.last() {
        Some(form) => bench.keyspace_bytes(*form).await?,
        None => 0.0,
    };
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
    Ok(costs)
}

struct Bench {
    limiter: Limiter<RedisStore>,
    extent: Extent,
}

impl Bench {
    fn store(&self) -> &RedisStore {
        self.limiter.store()
    }

    fn primaries(&self) -> Vec<String> {
        let nodes = self.store().nodes().into_iter().filter(|node| node.primary);
        nodes.map(|node| node.address).collect()
    }

    /// Returns the CPU time of a call of an empty script.
    async fn empty_script(&self) -> anyhow::Result<f64> {
        let node = self.primaries().into_iter().next().context("no Redis server")?;
        let script = "return 0";
        let hash = match self.store().ask_node(&node, &["SCRIPT", "LOAD", script]).await? {
            Reply::Text(hash) => hash,
            other => bail!("SCRIPT LOAD: {other:?}"),
        };
        let call = ["EVALSHA", hash.as_str(), "0"];
        let before = self.usage().await?;
        for _ in 0..self.extent.decisions {
            let reply = self.store().ask_node(&node, &call).await?;
            ensure!(reply == Reply::Integer(0), "an empty script: {reply:?}");
        }
        let after = self.usage().await?;
        Ok((after.cpu_micros - before.cpu_micros) / as_number(self.extent.decisions))
    }

    /// Measures a form with so many entries per key.
    async fn cost(&self, form: Form, entries: u64, empty: f64) -> anyhow::Result<Cost> {
        // Enough for all entries, those of the measured decisions too.
        let quota = form.quota(MEASURED_LIMIT, WINDOW)?;
        let keys: Vec<String> =
            (0..self.keys(entries)).map(|key| name(form, entries, key)).collect();
        let measured = self.measure_keys(&quota, &keys, entries, empty).await;
        let deleted = self.delete(&quota, &keys).await;
        let cost = measured.with_context(|| form.name())?;
        deleted?;
        Ok(cost)
    }

    /// Returns the number of keys: enough for a fair mean, few enough to fill quickly.
    fn keys(&self, entries: u64) -> u64 {
        let batches = u64::try_from(self.extent.decisions).unwrap_or(u64::MAX) / entries;
        batches.clamp(BATCH as u64, 2_048)
    }

    async fn measure_keys(
        &self,
        quota: &Quota,
        keys: &[String],
        entries: u64,
        empty: f64,
    ) -> anyhow::Result<Cost> {
        for _ in 0..entries {
            self.decide_in_batches(quota, keys).await?;
        }
        let bytes = self.memory_usage(quota, &keys[..BATCH]).await?;

        let before = self.usage().await?;
        let mut singles = 0;
        for key in keys.iter().cycle().take(self.extent.decisions) {
            let charge = Charge::new(key, quota).with_policy(POLICY);
            let _ = self.limiter.acquire(&charge).await?;
            singles += 1;
        }
        let between = self.usage().await?;
        let mut batched = 0;
        while batched < self.extent.decisions {
            self.decide_in_batches(quota, keys).await?;
            batched += keys.len();
        }
        let after = self.usage().await?;
        let per = |from: f64, to: f64, count: usize| (to - from) / as_number(count);
        Ok(Cost {
            bytes,
            cpu: per(before.cpu_micros, between.cpu_micros, singles) / empty,
            batched_cpu: per(between.cpu_micros, after.cpu_micros, batched) / empty,
            network: per(before.network_bytes, between.network_bytes, singles),
            batched_network: per(between.network_bytes, after.network_bytes, batched),
        })
    }

    /// Decides once for each key, with [`BATCH`] concurrent decisions.
    async fn decide_in_batches(&self, quota: &Quota, keys: &[String]) -> anyhow::Result<()> {
        for keys in keys.chunks(BATCH) {
            try_join_all(keys.iter().map(async |key| {
                let charge = Charge::new(key, quota).with_policy(POLICY);
                self.limiter.acquire(&charge).await
            }))
            .await?;
        }
        Ok(())
    }

    /// Returns the mean MEMORY USAGE of these keys.
    async fn memory_usage(&self, quota: &Quota, keys: &[String]) -> anyhow::Result<f64> {
        let (mut bytes, mut found) = (0.0, 0_u32);
        for node in self.primaries() {
            let names: Vec<String> = keys.iter().map(|key| self.redis_key(quota, key)).collect();
            let commands: Vec<[&str; 5]> =
                names.iter().map(|name| ["MEMORY", "USAGE", name, "SAMPLES", "0"]).collect();
            let commands: Vec<&[&str]> = commands.iter().map(<[&str; 5]>::as_slice).collect();
            for reply in self.store().ask_node_all(&node, &commands).await? {
                match reply {
                    Reply::Integer(usage) => {
                        bytes += f64::from(u32::try_from(usage).unwrap_or(u32::MAX));
                        found += 1;
                    }
                    // The keys of other nodes.
                    Reply::Error(error) if error.starts_with("MOVED") => {}
                    Reply::Nil => {}
                    other => bail!("MEMORY USAGE: {other:?}"),
                }
            }
        }
        ensure!(found > 0, "MEMORY USAGE: no key was found");
        Ok(bytes / f64::from(found))
    }

    /// Returns the memory per key that MEMORY USAGE does not count.
    async fn keyspace_bytes(&self, form: Form) -> anyhow::Result<f64> {
        let quota = form.quota(MEASURED_LIMIT, WINDOW)?;
        let keys: Vec<String> = (0..KEYSPACE_KEYS).map(|key| name(form, 0, key)).collect();
        let before = self.usage().await?;
        let measured = async {
            self.decide_in_batches(&quota, &keys).await?;
            let after = self.usage().await?;
            let all = (after.used_memory - before.used_memory) / as_number(keys.len());
            Ok::<_, anyhow::Error>(all - self.memory_usage(&quota, &keys[..BATCH]).await?)
        }
        .await;
        self.delete(&quota, &keys).await?;
        // Another client may have deleted keys meanwhile.
        Ok(measured?.clamp(0.0, 256.0))
    }

    async fn delete(&self, quota: &Quota, keys: &[String]) -> anyhow::Result<()> {
        for keys in keys.chunks(DELETED_AT_ONCE) {
            let names: Vec<String> = keys.iter().map(|key| self.redis_key(quota, key)).collect();
            let commands: Vec<[&str; 2]> = names.iter().map(|name| ["UNLINK", name]).collect();
            let commands: Vec<&[&str]> = commands.iter().map(<[&str; 2]>::as_slice).collect();
            for node in self.primaries() {
                self.store().ask_node_all(&node, &commands).await?;
            }
        }
        Ok(())
    }

    fn redis_key(&self, quota: &Quota, key: &str) -> String {
        self.store().redis_key(&Charge::new(key, quota).with_policy(POLICY))
    }

    async fn usage(&self) -> anyhow::Result<Usage> {
        let mut usage = Usage::default();
        for node in self.primaries() {
            let text = match self.store().ask_node(&node, &["INFO"]).await? {
                Reply::Text(text) => text,
                other => bail!("INFO: {other:?}"),
            };
            let info = Info::parse(&text);
            let number = |name: &str| {
                let number = info.text(name).and_then(|text| text.parse::<f64>().ok());
                number.with_context(|| format!("INFO has no {name}"))
            };
            usage.cpu_micros += (number("used_cpu_user")? + number("used_cpu_sys")?) * 1e6;
            usage.network_bytes +=
                number("total_net_input_bytes")? + number("total_net_output_bytes")?;
            usage.used_memory += number("used_memory")?;
        }
        Ok(usage)
    }
}

/// Returns the name of a key, with the length that the table is for.
fn name(form: Form, entries: u64, key: u64) -> String {
    let letter = form.name().len() % 10;
    let width = usize::try_from(KEY_BYTES).unwrap_or(16) - 7;
    format!("{letter}{entries:06}{key:0width$}")
}

#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn as_number(count: usize) -> f64 {
    count as f64
}
