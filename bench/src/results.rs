//! Measurements: one file of JSON lines per suite, which the report reads.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::plan::Plan;
use crate::spread::Spread;

/// Values of one candidate in one case, one per round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    pub case: String,
    pub candidate: String,
    pub metric: String,
    pub rounds: Vec<f64>,
}

/// Time and conditions of the measurement of a suite.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Header {
    pub suite: String,
    pub plan: String,
    /// Seconds since the epoch.
    pub started: u64,
    pub seconds: f64,
    /// Load average of the last minute, at the start of the suite.
    pub load: f64,
}

/// Measurements of a suite.
#[derive(Debug)]
pub struct Results {
    header: Header,
    started_at: Instant,
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
        Self { header, started_at: Instant::now(), rows: Vec::new() }
    }

    /// Records the value of the next round.
    pub fn add(&mut self, case: &str, candidate: &str, metric: &str, value: f64) {
        let same =
            |row: &&mut Row| row.case == case && row.candidate == candidate && row.metric == metric;
        if let Some(row) = self.rows.iter_mut().find(same) {
            row.rounds.push(value);
            return;
        }
        let (case, candidate, metric) = (case.to_owned(), candidate.to_owned(), metric.to_owned());
        self.rows.push(Row { case, candidate, metric, rounds: vec![value] });
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
    pub fn rounds(&self, case: &str, candidate: &str, metric: &str) -> Option<&[f64]> {
        let same =
            |row: &&Row| row.case == case && row.candidate == candidate && row.metric == metric;
        self.rows.iter().find(same).map(|row| row.rounds.as_slice())
    }

    #[must_use]
    pub fn spread(&self, case: &str, candidate: &str, metric: &str) -> Option<Spread> {
        self.rounds(case, candidate, metric).and_then(Spread::of)
    }

    /// Returns the ratio of the values of two candidates, round by round.
    #[must_use]
    pub fn ratio(&self, metric: &str, one: (&str, &str), other: (&str, &str)) -> Option<Spread> {
        Spread::of_ratios(
            self.rounds(one.0, one.1, metric)?,
            self.rounds(other.0, other.1, metric)?,
        )
    }

    /// Writes the file of the suite and replaces that of its last run.
    pub fn save(mut self) -> Result<()> {
        self.header.seconds = self.started_at.elapsed().as_secs_f64();
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

    /// Loads the results of the last run of a suite; `None` if it never ran.
    pub fn load(suite: &str) -> Result<Option<Self>> {
        let path = folder().join(format!("{suite}.jsonl"));
        let Ok(text) = std::fs::read_to_string(&path) else { return Ok(None) };
        let mut lines = text.lines();
        let header = serde_json::from_str(lines.next().unwrap_or_default())
            .with_context(|| path.display().to_string())?;
        let rows = lines.map(serde_json::from_str).collect::<Result<_, _>>()?;
        Ok(Some(Self { header, started_at: Instant::now(), rows }))
    }
}

/// Returns the load average of the last minute.
fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|load| load.parse().ok()).unwrap_or_default()
}

/// Returns the root folder of the repository.
#[must_use]
pub fn root() -> PathBuf {
    let bench = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    bench.parent().map_or(bench.clone(), std::path::Path::to_path_buf)
}

fn folder() -> PathBuf {
    root().join("bench/target/results")
}
