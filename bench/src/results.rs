//! What was measured: one file of JSON lines for each suite, which the report reads.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::plan::Plan;
use crate::spread::Spread;

/// One contestant in one case: a value for each round. Values of one round belong together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    pub case: String,
    pub contestant: String,
    pub metric: String,
    pub rounds: Vec<f64>,
}

/// When and how a suite was measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Header {
    pub suite: String,
    pub plan: String,
    /// Seconds since the epoch.
    pub started: u64,
    pub seconds: f64,
    /// How many others wanted a processor when it began.
    pub load: f64,
}

/// A suite's measurements.
#[derive(Debug)]
pub struct Results {
    header: Header,
    begun: Instant,
    rows: Vec<Row>,
}

impl Results {
    #[must_use]
    pub fn new(suite: &str, plan: Plan) -> Self {
        let since_epoch =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let header = Header {
            suite: suite.to_owned(),
            plan: plan.name().to_owned(),
            started: since_epoch.as_secs(),
            seconds: 0.0,
            load: load_average(),
        };
        Self { header, begun: Instant::now(), rows: Vec::new() }
    }

    /// Takes down the value of the next round.
    pub fn add(&mut self, case: &str, contestant: &str, metric: &str, value: f64) {
        let same = |row: &&mut Row| {
            row.case == case && row.contestant == contestant && row.metric == metric
        };
        if let Some(row) = self.rows.iter_mut().find(same) {
            row.rounds.push(value);
            return;
        }
        let (case, contestant, metric) =
            (case.to_owned(), contestant.to_owned(), metric.to_owned());
        self.rows.push(Row { case, contestant, metric, rounds: vec![value] });
    }

    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    #[must_use]
    pub fn rounds(&self, case: &str, contestant: &str, metric: &str) -> Option<&[f64]> {
        let same =
            |row: &&Row| row.case == case && row.contestant == contestant && row.metric == metric;
        self.rows.iter().find(same).map(|row| row.rounds.as_slice())
    }

    #[must_use]
    pub fn spread(&self, case: &str, contestant: &str, metric: &str) -> Option<Spread> {
        self.rounds(case, contestant, metric).and_then(Spread::of)
    }

    /// One contestant's value over another's, round by round.
    #[must_use]
    pub fn ratio(&self, metric: &str, one: (&str, &str), other: (&str, &str)) -> Option<Spread> {
        Spread::of_ratios(
            self.rounds(one.0, one.1, metric)?,
            self.rounds(other.0, other.1, metric)?,
        )
    }

    /// Writes the suite's file, in place of that of its last run.
    pub fn save(mut self) -> Result<()> {
        self.header.seconds = self.begun.elapsed().as_secs_f64();
        let path = folder().join(format!("{}.jsonl", self.header.suite));
        std::fs::create_dir_all(folder())?;
        let mut file = std::fs::File::create(&path).with_context(|| path.display().to_string())?;
        writeln!(file, "{}", serde_json::to_string(&self.header)?)?;
        for row in &self.rows {
            writeln!(file, "{}", serde_json::to_string(row)?)?;
        }
        println!("{}: {:.0} s", self.header.suite, self.header.seconds);
        Ok(())
    }

    /// What the suite's last run has left; `None` if it never ran.
    pub fn load(suite: &str) -> Result<Option<Self>> {
        let path = folder().join(format!("{suite}.jsonl"));
        let Ok(text) = std::fs::read_to_string(&path) else { return Ok(None) };
        let mut lines = text.lines();
        let header = serde_json::from_str(lines.next().unwrap_or_default())
            .with_context(|| path.display().to_string())?;
        let rows = lines.map(serde_json::from_str).collect::<Result<_, _>>()?;
        Ok(Some(Self { header, begun: Instant::now(), rows }))
    }
}

/// Of the last minute.
fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|load| load.parse().ok()).unwrap_or_default()
}

/// The repository.
#[must_use]
pub fn root() -> PathBuf {
    let bench = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    bench.parent().map_or(bench.clone(), std::path::Path::to_path_buf)
}

fn folder() -> PathBuf {
    root().join("bench/target/results")
}
