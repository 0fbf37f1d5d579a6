//! `tidegate plan`: memory, CPU and servers of Redis for a number of users and requests.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use clap::builder::FalseyValueParser;
use tidegate::internals::duration;

use super::redis::RedisFlags;
use super::style;
use crate::config::StoreConfig;
use crate::plan::costs::{Costs, KEY_BYTES};
use crate::plan::measure::{self, Extent};
use crate::plan::{Demand, Need, Plan, Server};

/// Compute what a number of users and requests costs on Redis.
///
/// Prints, for each algorithm and encoding, the memory, CPU, network and number of Redis primaries,
/// and a recommendation. The costs of one decision are those of Redis 7.0 on the machine of the
/// benchmarks; --measure measures them on your own Redis.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  A billion users, 100 requests per 10 seconds each, 150,000 requests per second at the peak:
    tidegate plan --users 1B --limit 100 --window 10s --rps 150k

  A limit per day, where 5 % of the users have sent a request today:
    tidegate plan --users 20M --limit 1000 --window 1d --rps 5k --active 5%

  With the costs of your own Redis (own prefix, cleaned up afterwards):
    tidegate plan --users 20M --limit 100 --window 1m --rps 50k --measure redis://127.0.0.1:6379")]
pub(super) struct PlanCommand {
    /// Number of users, or of other keys; k, M and B stand for thousands, millions and billions
    #[arg(long, value_name = "N", env = "TIDEGATE_USERS", value_parser = count)]
    users: u64,

    /// Units per window
    #[arg(long, value_name = "N", env = "TIDEGATE_LIMIT", value_parser = count)]
    limit: u64,

    /// Length of the window, such as 500ms, 60s, 5m, 1h, 30d
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_WINDOW", value_parser = duration::parse)]
    window: Duration,

    /// Requests per second of all users together, at the peak
    #[arg(long, value_name = "R", env = "TIDEGATE_RPS", value_parser = count)]
    rps: u64,

    /// Share of the users with a count in Redis at the same time, such as 5% or 0.05 [default: as
    /// many as the requests within the life of a key allow]
    #[arg(long, value_name = "SHARE", env = "TIDEGATE_ACTIVE", value_parser = share)]
    active: Option<f64>,

    /// Length of a user's key in bytes
    #[arg(
        long, value_name = "N", env = "TIDEGATE_KEY_BYTES", default_value_t = KEY_BYTES,
        value_parser = clap::value_parser!(u64).range(1..=512)
    )]
    key_bytes: u64,

    /// Memory of one Redis server
    #[arg(
        long, value_name = "SIZE", env = "TIDEGATE_NODE_MEMORY", default_value = "16GiB",
        value_parser = bytes
    )]
    node_memory: u64,

    /// Share of memory and CPU that stays free
    #[arg(
        long, value_name = "SHARE", env = "TIDEGATE_HEADROOM", default_value = "30%",
        value_parser = share
    )]
    headroom: f64,

    /// Redis on which the costs are measured, which takes about half a minute and writes to a
    /// prefix of its own
    #[arg(long, value_name = "URL", env = "TIDEGATE_MEASURE", hide_env_values = true)]
    measure: Option<String>,

    /// File with the password of that Redis
    #[arg(long, value_name = "FILE", env = "TIDEGATE_REDIS_PASSWORD_FILE", requires = "measure")]
    redis_password_file: Option<PathBuf>,

    /// Decisions per measured cost
    #[arg(
        long, value_name = "N", env = "TIDEGATE_DECISIONS", default_value_t = 5_000,
        value_parser = clap::value_parser!(u32).range(256..=1_000_000), requires = "measure"
    )]
    decisions: u32,

    /// Print the costs as a table for the repository
    #[arg(long, hide = true, requires = "measure")]
    print_costs: bool,

    /// Print one JSON object
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

impl PlanCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        ensure!(self.users > 0, "--users must be at least 1");
        ensure!(self.rps > 0, "--rps must be at least 1");
        ensure!(self.headroom < 1.0, "--headroom must be less than 100%");
        ensure!(
            self.active != Some(0.0),
            "--active must be more than 0: leave it out if you do not know"
        );
        let checked_in = Costs::checked_in().context("costs.txt")?;
        // Checks the limit and the window as a policy would.
        for form in checked_in.forms() {
            form.quota(self.limit, self.window)?;
        }
        let costs = match &self.measure {
            Some(url) => self.measured(url, &checked_in)?,
            None => checked_in,
        };
        let mut output = anstream::stdout().lock();
        if self.print_costs {
            write!(output, "{costs}")?;
            return Ok(ExitCode::SUCCESS);
        }
        let demand = Demand {
            users: self.users,
            limit: self.limit,
            window: self.window,
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            rps: self.rps as f64,
            active: self.active,
            key_bytes: self.key_bytes,
        };
        let server = Server { memory: self.node_memory, headroom: self.headroom };
        let plan = Plan::new(demand, server, &costs, self.measure.is_some());
        if self.json {
            writeln!(output, "{}", serde_json::to_string(&plan)?)?;
        } else {
            write!(output, "{}", text(&plan))?;
        }
        output.flush()?;
        Ok(ExitCode::SUCCESS)
    }

    fn measured(&self, url: &str, checked_in: &Costs) -> anyhow::Result<Costs> {
        let flags = RedisFlags::new(url.to_owned(), self.redis_password_file.clone());
        let StoreConfig::Redis(redis) = flags.apply(StoreConfig::Memory(Box::default()))? else {
            anyhow::bail!("--measure needs the URL of a Redis");
        };
        flags.print_warning();
        let prefix = format!("tidegate-plan-{}", std::process::id());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let timeout = Duration::from_secs(10);
            let builder = redis.with_timeout(timeout).builder().prefix(&prefix);
            let store = builder.connect().await.context("--measure")?;
            let extent = Extent { decisions: usize::try_from(self.decisions)? };
            measure::measure(store, checked_in.forms(), extent).await.context("--measure")
        })
    }
}

/// Formats a plan as a table, with its assumptions below.
fn text(plan: &Plan) -> String {
    let mut text = String::new();
    let (bold, reset) = (style::HEADING, style::RESET);
    let _ = writeln!(
        text,
        "{bold}{:<24} {:>9} {:>7} {:>8} {:>9} {:>8} {:>8} {:>9} {:>10}{reset}",
        "algorithm",
        "keys",
        "B/key",
        "at limit",
        "memory",
        "CPU µs",
        "cores",
        "network",
        "primaries"
    );
    for need in &plan.forms {
        let _ = writeln!(text, "{}", row(need));
    }
    let demand = &plan.demand;
    let keys = match demand.active {
        Some(share) => format!("{} of the users have a count at the same time", percent(share)),
        None => String::from("each request comes from another user, the most keys there can be"),
    };
    let source = if plan.measured { "measured on your Redis" } else { "of the benchmark machine" };
    let _ = write!(
        text,
        "\nAssumed: {keys}; servers of {} and\n\
         one core, of which {} stay free; {:.0} % for fragmentation; keys of {} bytes; one decision\n\
         per call (calls with 64 decisions need {}). CPU times {source}:\n\
         an empty script takes {:.1} µs. One primary may be lost; replicas are not counted.\n\n",
        size(plan.server.memory),
        percent(plan.server.headroom),
        (plan.fragmentation - 1.0) * 100.0,
        demand.key_bytes,
        batched(plan),
        plan.empty_script_micros
    );
    let _ = writeln!(text, "{bold}{}{reset}", plan.recommendation);
    text
}

/// Formats how much less CPU batches need.
fn batched(plan: &Plan) -> String {
    let shares = plan.forms.iter().map(|need| need.batched_cores / need.cores);
    let (low, high) =
        shares.fold((f64::MAX, 0.0_f64), |(low, high), share| (low.min(share), high.max(share)));
    format!("{} to {} of the CPU", percent(low), percent(high))
}

fn row(need: &Need) -> String {
    format!(
        "{:<24} {:>9} {:>7} {:>8} {:>9} {:>8.1} {:>8} {:>9} {:>10}",
        need.form.name(),
        amount(need.keys),
        need.bytes_per_key,
        amount(need.bytes_per_full_key),
        size(need.memory_bytes),
        need.cpu_micros,
        format!("{:.2}", need.cores),
        rate(need.network_bits),
        need.primaries
    )
}

fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent >= 10.0 || percent.fract() == 0.0 {
        format!("{percent:.0} %")
    } else {
        format!("{percent:.2} %")
    }
}

/// Formats a number with three digits and a unit, by steps of `step`.
#[expect(clippy::cast_precision_loss, reason = "for people")]
fn scaled(number: u64, step: f64, units: &[&str]) -> String {
    let mut number = number as f64;
    let mut unit = 0;
    while number >= step && unit + 1 < units.len() {
        number /= step;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && number < 100.0);
    format!("{number:.digits$}{}", units[unit])
}

fn amount(number: u64) -> String {
    scaled(number, 1_000.0, &["", "k", "M", "B", "T"])
}

fn size(bytes: u64) -> String {
    scaled(bytes, 1_024.0, &[" B", " KiB", " MiB", " GiB", " TiB", " PiB"])
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "for people")]
fn rate(bits: f64) -> String {
    scaled(bits as u64, 1_000.0, &[" b/s", " kb/s", " Mb/s", " Gb/s", " Tb/s"])
}

/// Parses a count such as `1_000_000`, `150k`, `1.5M` or `1B`.
fn count(text: &str) -> Result<u64, String> {
    let units = [('k', 1e3), ('K', 1e3), ('M', 1e6), ('G', 1e9), ('B', 1e9), ('T', 1e12)];
    parse_scaled(text, |rest| {
        units.iter().find_map(|(unit, factor)| Some((rest.strip_suffix(*unit)?, *factor)))
    })
    .ok_or_else(|| format!("{text:?} is not a count like 5000, 150k, 20M or 1B"))
}

/// Parses a size such as `16GiB` or `500MB`.
fn bytes(text: &str) -> Result<u64, String> {
    let units = [
        ("KiB", 1024.0),
        ("MiB", 1024.0 * 1024.0),
        ("GiB", 1024.0 * 1024.0 * 1024.0),
        ("TiB", 1024.0 * 1024.0 * 1024.0 * 1024.0),
        ("kB", 1e3),
        ("KB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("TB", 1e12),
    ];
    let size = parse_scaled(text, |rest| {
        units.iter().find_map(|(unit, factor)| Some((rest.strip_suffix(unit)?, *factor)))
    });
    size.filter(|size| *size >= 1 << 20)
        .ok_or_else(|| format!("{text:?} is not a size like 16GiB or 500MB, of at least 1 MiB"))
}

fn parse_scaled<'t>(
    text: &'t str,
    unit: impl Fn(&'t str) -> Option<(&'t str, f64)>,
) -> Option<u64> {
    if let Ok(whole) = text.replace('_', "").parse() {
        return Some(whole);
    }
    let (number, factor) = unit(text).unwrap_or((text, 1.0));
    let number = number.trim_end().replace('_', "");
    let value: f64 = number.parse().ok()?;
    let value = value * factor;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
    (value.is_finite() && (0.0..=1e18).contains(&value) && !number.starts_with('+'))
        .then(|| value.round() as u64)
}

/// Parses a share such as `5%` or `0.05`.
fn share(text: &str) -> Result<f64, String> {
    let number = match text.strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().map(|percent| percent / 100.0),
        None => text.parse(),
    };
    number
        .ok()
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| format!("{text:?} is not a share from 0% to 100%, like 5% or 0.05"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_sizes_and_shares_are_read() {
        for (text, expected) in [
            ("5000", Some(5_000)),
            ("1_000_000", Some(1_000_000)),
            ("150k", Some(150_000)),
            ("1.5M", Some(1_500_000)),
            ("1B", Some(1_000_000_000)),
            ("1e9", Some(1_000_000_000)),
            ("18446744073709551615", Some(u64::MAX)),
            ("-1", None),
            ("k", None),
            ("1e30", None),
            ("NaN", None),
            ("inf", None),
            ("", None),
        ] {
            assert_eq!(count(text).ok(), expected, "{text}");
        }
        assert_eq!(bytes("16GiB"), Ok(16 << 30));
        assert_eq!(bytes("500 MB"), Ok(500_000_000));
        assert!(bytes("1KiB").is_err() && bytes("GiB").is_err());
        assert_eq!(share("5%"), Ok(0.05));
        assert_eq!(share("0.5"), Ok(0.5));
        assert!(share("101%").is_err() && share("-0.1").is_err() && share("x").is_err());
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!(amount(999), "999");
        assert_eq!(amount(1_500_000), "1.5M");
        assert_eq!(size(1_536 * 1_024), "1.5 MiB");
        assert_eq!(rate(2.5e9), "2.5 Gb/s");
        assert_eq!((percent(0.3), percent(0.0025)), ("30 %".to_owned(), "0.25 %".to_owned()));
    }
}
