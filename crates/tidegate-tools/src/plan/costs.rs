//! Costs of one key and of one decision on Redis, for each algorithm and encoding.
//!
//! `costs.txt` is a table that `make plan-costs` measures and a test compares with a real server.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tidegate::{Algorithm, Encoding};

use super::Form;
use crate::tool::text::float;

/// Length of a user's key in the table.
pub(crate) const KEY_BYTES: u64 = 16;
/// Policy and prefix of the keys in Redis of the table.
pub(crate) const POLICY: &str = "per-user";
pub(crate) const PREFIX: &str = "rate_limit";
/// Decisions per call of the batched costs.
pub(super) const BATCH: usize = 64;
const TABLE: &str = include_str!("costs.txt");

/// Costs of all forms.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Costs {
    /// CPU time of one call of an empty script in a pipeline.
    pub empty_script_micros: f64,
    /// CPU time for reading a call from its connection and writing the reply, in calls of an empty
    /// script. A pipeline saves it. It is measured with many connections that call at once.
    pub connection_cpu: f64,
    /// Memory per key that MEMORY USAGE leaves out: its expiry, and its share of the tables of
    /// keys.
    pub keyspace_bytes: f64,
    /// Rows by form, in rising order of their entries.
    pub rows: Vec<CostRow>,
}

/// Costs of a form with this many requests of a key in its window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CostRow {
    pub form: Form,
    pub entries: u64,
    pub cost: FormCost,
}

/// Cost of a key and of a decision.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub(crate) struct FormCost {
    /// MEMORY USAGE of the key.
    pub bytes: f64,
    /// CPU time of a call with one decision in a pipeline, in calls of an empty script.
    pub single_cpu: f64,
    /// The same for a decision in a call with 64.
    pub batched_cpu: f64,
    /// Bytes on the network in both directions for a call with one decision.
    pub single_network: f64,
    /// The same for a decision in a call with 64.
    pub batched_network: f64,
}

impl Costs {
    /// Returns the table of this repository.
    pub(crate) fn checked_in() -> anyhow::Result<Self> {
        Self::parse(TABLE).context("costs.txt")
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut costs = Self::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default();
            let words: Vec<&str> = line.split_whitespace().collect();
            costs.parse_line(&words).with_context(|| format!("line {}", number + 1))?;
        }
        Ok(costs)
    }

    fn parse_line(&mut self, words: &[&str]) -> anyhow::Result<()> {
        match *words {
            [] => {}
            ["empty-script-micros", number] => self.empty_script_micros = number.parse()?,
            ["connection-cpu", number] => self.connection_cpu = number.parse()?,
            ["keyspace-bytes", number] => self.keyspace_bytes = number.parse()?,
            [algorithm, encoding, entries, bytes, cpu, batched_cpu, network, batched_network] => {
                let encoding = (encoding != "-").then(|| encoding.parse()).transpose()?;
                let form = Form { algorithm: algorithm.parse()?, encoding };
                let entries = entries.parse()?;
                let rises = |row: &CostRow| row.form != form || row.entries < entries;
                ensure!(self.rows.last().is_none_or(rises), "entries must rise");
                let cost = FormCost {
                    bytes: bytes.parse()?,
                    single_cpu: cpu.parse()?,
                    batched_cpu: batched_cpu.parse()?,
                    single_network: network.parse()?,
                    batched_network: batched_network.parse()?,
                };
                self.rows.push(CostRow { form, entries, cost });
            }
            _ => bail!("expected a form, the entries and five numbers"),
        }
        Ok(())
    }

    /// Returns the CPU time of Redis per decision in microseconds, with this many per call.
    pub(super) fn cpu_micros(&self, cost: &FormCost, batch: f64) -> f64 {
        let cpu = shared(cost.single_cpu, cost.batched_cpu, batch) + self.connection_cpu / batch;
        cpu * self.empty_script_micros
    }

    /// Returns the cost of a key with this many requests in its window, by linear interpolation
    /// between two rows. Beyond the last row, only memory grows.
    pub(crate) fn at(&self, form: Form, entries: f64, window: Duration) -> FormCost {
        let longer = longer_times(form, window);
        let cost = self.interpolated(form, entries * (1.0 + longer / 4.0));
        FormCost { bytes: self.interpolated(form, entries).bytes + entries * longer, ..cost }
    }

    fn interpolated(&self, form: Form, entries: f64) -> FormCost {
        let rows: Vec<&CostRow> = self.rows.iter().filter(|row| row.form == form).collect();
        let after = rows.iter().position(|row| float(row.entries) >= entries);
        let (low, high) = match (after, rows.as_slice()) {
            (_, []) => return FormCost::default(),
            (_, [only]) => return only.cost,
            (Some(0), [first, ..]) => return first.cost,
            (Some(after), rows) => (rows[after - 1], rows[after]),
            (None, [.., low, high]) => (*low, *high),
        };
        let span = float(high.entries - low.entries);
        low.cost.towards(&high.cost, (entries - float(low.entries)) / span)
    }
}

/// Returns the bytes that an entry needs beyond those of the measured window. A packed log has times
/// of 4 bytes, but of 5 from 2^32 microseconds on and of 6 from 2^40.
fn longer_times(form: Form, window: Duration) -> f64 {
    let is_packed_log =
        form.algorithm == Algorithm::SlidingLog && form.encoding == Some(Encoding::Packed);
    match window.as_micros() {
        micros if is_packed_log && micros >= 1 << 40 => 2.0,
        micros if is_packed_log && micros >= 1 << 32 => 1.0,
        _ => 0.0,
    }
}

impl FormCost {
    /// Returns the bytes on the network per decision.
    pub(super) fn network(&self, batch: f64) -> f64 {
        shared(self.single_network, self.batched_network, batch)
    }

    fn towards(&self, other: &Self, part: f64) -> Self {
        let between = |from: f64, to: f64, part: f64| from + (to - from) * part;
        let bounded = |from: f64, to: f64| between(from, to, part.min(1.0));
        Self {
            bytes: between(self.bytes, other.bytes, part),
            single_cpu: bounded(self.single_cpu, other.single_cpu),
            batched_cpu: bounded(self.batched_cpu, other.batched_cpu),
            single_network: bounded(self.single_network, other.single_network),
            batched_network: bounded(self.batched_network, other.batched_network),
        }
    }
}

/// Returns the cost per decision: its own, and its share of the cost of a call.
fn shared(single: f64, batched: f64, batch: f64) -> f64 {
    let call = (single - batched) / (1.0 - 1.0 / float(BATCH as u64));
    single - call + call / batch
}

impl fmt::Display for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "empty-script-micros {:.2}", self.empty_script_micros)?;
        writeln!(f, "connection-cpu {:.2}", self.connection_cpu)?;
        writeln!(f, "keyspace-bytes {:.0}", self.keyspace_bytes)?;
        writeln!(
            f,
            "# algorithm     encoding   entries     bytes    cpu  cpu/64  network  network/64"
        )?;
        for CostRow { form, entries, cost } in &self.rows {
            let encoding = form.encoding.map_or("-", Encoding::as_str);
            writeln!(
                f,
                "{:<15} {encoding:<10} {entries:>7} {:>9.0} {:>6.2} {:>7.3} {:>8.0} {:>11.0}",
                form.algorithm.as_str(),
                cost.bytes,
                cost.single_cpu,
                cost.batched_cpu,
                cost.single_network,
                cost.batched_network
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::FORMS;

    const SECOND: Duration = Duration::from_secs(1);
    const DAY: Duration = Duration::from_secs(86_400);
    const TEXT: &str = "
empty-script-micros 2
connection-cpu 32
keyspace-bytes 50      # a comment
token-bucket - 1 100 1.5 0.25 300 60
sliding-log packed 1 100 1 0.5 200 100
sliding-log packed 11 200 2 1 200 100
";

    #[test]
    fn table_is_read_and_written() {
        let costs = Costs::parse(TEXT).expect("valid");
        assert_eq!(Costs::parse(&costs.to_string()).expect("valid"), costs);
        assert_eq!(costs.rows[0].form.encoding, None);
        assert_eq!(costs.rows[2].form.encoding, Some(Encoding::Packed));
        let error = |text: &str| format!("{:#}", Costs::parse(text).expect_err("invalid"));
        assert!(error("\ntoken-bucket - 1").starts_with("line 2: expected a form"));
        assert!(error("token-bucket hash x 1 1 1 1 1").starts_with("line 1: invalid digit"));
        let falls = "token-bucket - 2 1 1 1 1 1\ntoken-bucket - 1 1 1 1 1 1";
        assert_eq!(error(falls), "line 2: entries must rise");
    }

    #[test]
    fn costs_between_two_rows_are_interpolated() {
        let costs = Costs::parse(TEXT).expect("valid");
        let [bucket, log] = [0, 1].map(|index| costs.rows[index].form);
        assert_eq!(costs.at(bucket, 500.0, DAY), costs.rows[0].cost);
        for (entries, window, bytes, cpu) in [
            (0.5, SECOND, 100.0, 1.0),
            (1.0, SECOND, 100.0, 1.0),
            (6.0, SECOND, 150.0, 1.5),
            (11.0, SECOND, 200.0, 2.0),
            (21.0, SECOND, 300.0, 2.0),
            // Times of five bytes.
            (6.0, DAY, 156.0, 1.65),
        ] {
            let cost = costs.at(log, entries, window);
            assert_eq!((cost.bytes, cost.single_cpu), (bytes, cpu), "{entries}");
        }
    }

    #[test]
    fn decisions_share_the_cost_of_a_call() {
        let costs = Costs::parse(TEXT).expect("valid");
        let cost = FormCost { single_cpu: 64.0, batched_cpu: 1.0, ..FormCost::default() };
        for (batch, expected) in [(1.0, 192.0), (2.0, 96.0), (64.0, 3.0), (128.0, 1.5)] {
            let micros = costs.cpu_micros(&cost, batch);
            assert!((micros - expected).abs() < 1e-9, "{batch}: {micros}");
        }
    }

    #[test]
    fn checked_in_table_has_all_forms() {
        let costs = Costs::checked_in().expect("valid");
        for form in FORMS {
            assert!(costs.rows.iter().filter(|row| row.form == form).count() >= 2, "{form:?}");
        }
        assert!(costs.empty_script_micros > 0.0 && costs.connection_cpu > 0.0);
        assert!(costs.keyspace_bytes > 0.0);
    }
}
