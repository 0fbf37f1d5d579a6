//! Costs of one decision and of one key on Redis, for each algorithm and encoding.
//!
//! `costs.txt` was measured by `tidegate plan --measure URL --print-costs`; a test compares it with
//! a real server.

use std::fmt;

use anyhow::{Context as _, bail};

use super::Form;

/// Length of the key in the table, apart from the rest of its name in Redis.
pub(crate) const KEY_BYTES: u64 = 16;
const TABLE: &str = include_str!("costs.txt");

/// Costs of all forms.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Costs {
    /// CPU time of a call of an empty script.
    pub(crate) empty_script_micros: f64,
    /// Memory per key outside of the key: its place in the tables of keys and of expiry times.
    pub(crate) keyspace_bytes: f64,
    /// By form and number of entries, in rising order.
    pub(crate) rows: Vec<Row>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Row {
    pub(crate) form: Form,
    /// Entries of a log; other forms have one row.
    pub(crate) entries: u64,
    pub(crate) cost: Cost,
}

/// Cost of a decision, and of its key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cost {
    /// `MEMORY USAGE` of the key.
    pub(crate) bytes: f64,
    /// CPU of Redis per decision in calls of an empty script, with one decision per call.
    pub(crate) cpu: f64,
    /// The same with 64 decisions per call.
    pub(crate) batched_cpu: f64,
    /// Bytes on the network, both directions.
    pub(crate) network: f64,
    pub(crate) batched_network: f64,
}

impl Costs {
    /// Returns the table of this repository.
    pub(crate) fn checked_in() -> anyhow::Result<Self> {
        Self::parse(TABLE)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut costs = Self { empty_script_micros: 0.0, keyspace_bytes: 0.0, rows: Vec::new() };
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
            ["keyspace-bytes", number] => self.keyspace_bytes = number.parse()?,
            [algorithm, encoding, entries, bytes, cpu, batched_cpu, network, batched_network] => {
                let encoding = (encoding != "-").then(|| encoding.parse()).transpose()?;
                let form = Form { algorithm: algorithm.parse()?, encoding };
                let cost = Cost {
                    bytes: bytes.parse()?,
                    cpu: cpu.parse()?,
                    batched_cpu: batched_cpu.parse()?,
                    network: network.parse()?,
                    batched_network: batched_network.parse()?,
                };
                self.rows.push(Row { form, entries: entries.parse()?, cost });
            }
            _ => bail!("expected a form, the entries and five numbers"),
        }
        Ok(())
    }

    /// Iterates over the forms, each once.
    pub(crate) fn forms(&self) -> impl Iterator<Item = Form> {
        let is_first = |position: usize, row: &Row| {
            !self.rows[..position].iter().any(|earlier| earlier.form == row.form)
        };
        let rows = self.rows.iter().enumerate();
        rows.filter(move |(position, row)| is_first(*position, row)).map(|(_, row)| row.form)
    }

    /// Returns the cost of a key with so many entries: between two rows it grows evenly, and after
    /// the last as between the last two.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub(crate) fn at(&self, form: Form, entries: f64) -> Cost {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| row.form == form).collect();
        let after = rows.iter().position(|row| row.entries as f64 >= entries);
        let (low, high) = match (after, rows.as_slice()) {
            (_, []) => return Cost::ZERO,
            (_, [only]) => return only.cost,
            (Some(0), [first, ..]) => return first.cost,
            (Some(after), rows) => (rows[after - 1], rows[after]),
            (None, [.., low, high]) => (*low, *high),
        };
        let span = (high.entries - low.entries) as f64;
        low.cost.towards(&high.cost, (entries - low.entries as f64) / span)
    }
}

impl Cost {
    const ZERO: Self =
        Self { bytes: 0.0, cpu: 0.0, batched_cpu: 0.0, network: 0.0, batched_network: 0.0 };

    fn towards(&self, other: &Self, share: f64) -> Self {
        let between = |from: f64, to: f64| from + (to - from) * share;
        // Only memory grows without end: CPU and network follow the number of digits and levels.
        let share = share.min(1.0);
        let bounded = |from: f64, to: f64| from + (to - from) * share;
        Self {
            bytes: between(self.bytes, other.bytes),
            cpu: bounded(self.cpu, other.cpu),
            batched_cpu: bounded(self.batched_cpu, other.batched_cpu),
            network: bounded(self.network, other.network),
            batched_network: bounded(self.batched_network, other.batched_network),
        }
    }
}

impl fmt::Display for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "empty-script-micros {:.2}", self.empty_script_micros)?;
        writeln!(f, "keyspace-bytes {:.0}", self.keyspace_bytes)?;
        writeln!(
            f,
            "# algorithm     encoding   entries     bytes    cpu  cpu/64  network  network/64"
        )?;
        for Row { form, entries, cost } in &self.rows {
            let encoding = form.encoding.map_or("-", |encoding| encoding.as_str());
            writeln!(
                f,
                "{:<15} {encoding:<10} {entries:>7} {:>9.0} {:>6.2} {:>7.3} {:>8.0} {:>11.0}",
                form.algorithm.as_str(),
                cost.bytes,
                cost.cpu,
                cost.batched_cpu,
                cost.network,
                cost.batched_network
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
empty-script-micros 8
keyspace-bytes 50      # a comment
token-bucket - 1 100 1.5 0.25 300 60
sliding-log packed 1 100 1 0.5 200 100
sliding-log packed 11 200 2 1 200 100
";

    #[test]
    fn table_is_read_and_written() {
        let costs = Costs::parse(TEXT).expect("valid");
        assert_eq!(Costs::parse(&costs.to_string()).expect("valid"), costs);
        let names: Vec<String> = costs.forms().map(Form::name).collect();
        assert_eq!(names, ["token-bucket", "sliding-log packed"]);
        let error = Costs::parse("\ntoken-bucket - 1").expect_err("too short").to_string();
        assert_eq!(error, "line 2");
    }

    #[test]
    fn costs_between_the_rows_grow_evenly() {
        let costs = Costs::parse(TEXT).expect("valid");
        let [bucket, log] = [0, 1].map(|index| costs.rows[index].form);
        assert_eq!(costs.at(bucket, 500.0).bytes, 100.0);
        for (entries, bytes, cpu) in [
            (0.5, 100.0, 1.0),
            (1.0, 100.0, 1.0),
            (6.0, 150.0, 1.5),
            (11.0, 200.0, 2.0),
            (21.0, 300.0, 2.0),
        ] {
            let cost = costs.at(log, entries);
            assert_eq!((cost.bytes, cost.cpu), (bytes, cpu), "{entries}");
        }
    }

    #[test]
    fn checked_in_table_has_all_algorithms() {
        let costs = Costs::checked_in().expect("valid");
        for algorithm in tidegate::Algorithm::ALL {
            assert!(costs.forms().any(|form| form.algorithm == algorithm), "{algorithm}");
        }
        assert!(costs.empty_script_micros > 0.0 && costs.keyspace_bytes > 0.0);
    }
}
