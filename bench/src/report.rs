//! `docs/benchmarks.md` and its charts, of what the suites have left.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use tidegate_bench::results::{Results, root};

use self::chart::Chart;

mod chart;
mod facts;
mod goals;
mod in_process;
mod on_redis;
mod over_the_wire;

/// What each suite's last run has found; a suite that never ran is left out.
struct Found {
    in_process: Option<Results>,
    growth: Option<Results>,
    http: Option<Results>,
    redis: Option<Results>,
    service: Option<Results>,
    logs: Option<Results>,
}

/// The page as it is written, and the charts beside it.
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
    let found = Found {
        in_process: Results::load("in-process")?,
        growth: Results::load("growth")?,
        http: Results::load("http")?,
        redis: Results::load("redis")?,
        service: Results::load("service")?,
        logs: Results::load("logs")?,
    };
    let mut page = Page::default();
    page.line("# Benchmarks\n");
    page.line(
        "Tidegate beside its peers, and beside what the machine can do, in one run: the contestants take turns, in rounds. A ratio is \
         the median of the ratios of the rounds, with the least and the greatest behind it; ratios carry over to other \
         machines, times do not. This page is written by `make bench`.",
    );
    facts::write(&mut page, &found)?;
    goals::write(&mut page, &found);
    in_process::write(&mut page, &found);
    over_the_wire::write(&mut page, &found);
    on_redis::write(&mut page, &found);
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
    // No two empty lines in a row.
    let mut text = page.text;
    while text.contains("\n\n\n") {
        text = text.replace("\n\n\n", "\n\n");
    }
    std::fs::write(&path, text)?;
    println!("{}", path.display());
    Ok(())
}

/// `12,345,678`
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

/// `1`, `10k`, `1M`
fn short(number: usize) -> String {
    match number {
        1_000_000.. => format!("{}M", number / 1_000_000),
        1_000.. => format!("{}k", number / 1_000),
        _ => number.to_string(),
    }
}

/// What stands where nothing was measured.
const NONE: &str = "–";
