//! Generates `docs/benchmarks.md` and its charts from the results of the suites.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use tidegate_bench::results::{Results, root};

use self::chart::Chart;

mod attack;
mod chart;
mod environment;
mod gateway;
mod goals;
mod in_process;
mod latency;
mod naive;
mod network;
mod redis;
mod resp;

/// Results of the last run of each suite; `None` for a suite that never ran.
struct SuiteResults {
    in_process: Option<Results>,
    growth: Option<Results>,
    layer: Option<Results>,
    http: Option<Results>,
    gateway: Option<Results>,
    resp: Option<Results>,
    attack: Option<Results>,
    scripts: Option<Results>,
    redis: Option<Results>,
    fleet: Option<Results>,
    cluster: Option<Results>,
    service: Option<Results>,
    logs: Option<Results>,
}

/// Text of the page, and its charts.
#[derive(Default)]
struct Page {
    text: String,
    charts: Vec<(String, String)>,
}

impl Page {
    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// Writes a paragraph with lines of up to 100 columns.
    fn paragraph(&mut self, text: &str) {
        let mut columns = 0;
        for word in text.split_whitespace() {
            let width = word.chars().count();
            if columns > 0 && columns + 1 + width > MAX_COLUMNS {
                self.text.push('\n');
                columns = 0;
            } else if columns > 0 {
                self.text.push(' ');
                columns += 1;
            }
            self.text.push_str(word);
            columns += width;
        }
        self.text.push_str("\n\n");
    }

    fn heading(&mut self, heading: &str) {
        let _ = writeln!(self.text, "\n## {heading}\n");
    }

    fn table(&mut self, heads: &[&str], rows: &[Vec<String>]) {
        let _ = writeln!(self.text, "\n| {} |", heads.join(" | "));
        let _ = writeln!(self.text, "|{}", " --- |".repeat(heads.len()));
        for row in rows {
            let _ = writeln!(self.text, "| {} |", row.join(" | "));
        }
        self.text.push('\n');
    }

    fn chart(&mut self, name: &str, chart: &Chart) {
        let _ = writeln!(self.text, "\n![{}](benchmarks/{name}.svg)\n", chart.title);
        self.charts.push((format!("{name}.svg"), chart.svg()));
    }
}

pub(crate) fn run() -> Result<()> {
    let suites = SuiteResults {
        in_process: Results::load("in-process")?,
        growth: Results::load("growth")?,
        layer: Results::load("layer")?,
        http: Results::load("http")?,
        gateway: Results::load("gateway")?,
        resp: Results::load("resp")?,
        attack: Results::load("attack")?,
        scripts: Results::load("scripts")?,
        redis: Results::load("redis")?,
        fleet: Results::load("fleet")?,
        cluster: Results::load("cluster")?,
        service: Results::load("service")?,
        logs: Results::load("logs")?,
    };
    let mut page = Page::default();
    page.line("# Benchmarks\n");
    page.paragraph(
        "This page compares Tidegate with similar projects and with the limits of the machine, in \
         one run. Each suite measures in rounds, in which all candidates take turns. A ratio is \
         the median of the ratios of the rounds, with the minimum and the maximum in parentheses. \
         Ratios are similar on other machines; absolute times are not. `make bench` generates this \
         page.",
    );
    page.paragraph(
        "`make bench-http` runs only the suite of the service on memory, `make bench-redis` only \
         those of decisions on Redis. `bench/target/release/tidegate-bench` runs all suites, or \
         those that are named: `in-process`, `http`, `gateway`, `resp`, `attack`, `scripts`, `redis`, \
         `fleet`, `cluster`, `service` and `logs`; `report` writes this page from their last results. With \
         `BENCH=quick` all are shorter.",
    );
    environment::write(&mut page, &suites)?;
    goals::write(&mut page, &suites);
    in_process::write(&mut page, &suites);
    network::write(&mut page, &suites);
    gateway::write(&mut page, &suites);
    resp::write(&mut page, &suites);
    naive::write(&mut page, &suites);
    redis::write(&mut page, &suites);
    latency::write(&mut page, &suites);
    attack::write(&mut page, &suites);
    // `make bench-python` writes the whole section.
    if let Ok(section) = std::fs::read_to_string(root().join("bench/target/results/python.md")) {
        page.heading("Python");
        page.line(section.trim_end());
    }
    page.heading("Notes");
    page.line(
        std::fs::read_to_string(root().join("bench/notes.md"))
            .context("bench/notes.md")?
            .trim_end(),
    );

    let docs = root().join("docs");
    let folder = docs.join("benchmarks");
    std::fs::create_dir_all(&folder)?;
    for (name, svg) in &page.charts {
        std::fs::write(folder.join(name), svg)?;
    }
    let path = docs.join("benchmarks.md");
    // Collapse consecutive empty lines.
    let mut text = page.text;
    while text.contains("\n\n\n") {
        text = text.replace("\n\n\n", "\n\n");
    }
    std::fs::write(&path, text)?;
    println!("{}", path.display());
    Ok(())
}

/// Formats a number as in `12,345,678`.
fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number as in `1`, `10k`, `1M`.
fn abbreviate(number: usize) -> String {
    match number {
        1_000_000.. => format!("{}M", number / 1_000_000),
        1_000.. => format!("{}k", number / 1_000),
        _ => number.to_string(),
    }
}

/// Text for a missing measurement.
const NOT_MEASURED: &str = "–";

/// Maximum length of a line of text.
const MAX_COLUMNS: usize = 100;
