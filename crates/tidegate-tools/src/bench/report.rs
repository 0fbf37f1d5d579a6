//! [`BenchReport`]: the result of a run, as text and as JSON.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};
use tidegate_config::duration::readable;

use super::open_loop::OpenLoop;
use super::{LoadMeasurement, LoadPlan, Pace};
use crate::tool::style;
use crate::tool::text::{flag_name, float, grouped, scaled, whole};

const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];
/// Part of all CPUs from which the generator is considered the bottleneck.
const BUSY_PART: f64 = 0.8;
/// Delay by the generator that is worth a warning.
const MAX_GENERATOR_DELAY: Duration = Duration::from_millis(1);

/// Target of a run, as it is shown.
#[derive(Debug)]
pub(crate) struct TargetSummary {
    /// `memory`, `redis`, `http`, `grpc`, `resp`, `gateway` or `forward-auth`.
    pub kind: &'static str,
    /// Name of the target, without secrets.
    pub name: String,
    /// Description of the requests or of the quota.
    pub requests: String,
    /// Text about the keys that the run leaves behind.
    pub note: Option<String>,
}

impl TargetSummary {
    pub(crate) fn new(kind: &'static str, name: &str, requests: String) -> Self {
        Self { kind, name: name.to_owned(), requests, note: None }
    }
}

/// Result of a run.
#[derive(Debug)]
pub(crate) struct BenchReport {
    pub target: TargetSummary,
    pub load: LoadPlan,
    pub measured: LoadMeasurement,
}

impl BenchReport {
    /// Returns whether there were requests, and none was answered.
    pub(crate) fn all_failed(&self) -> bool {
        let recording = &self.measured.recording;
        recording.answered() == 0 && recording.failed() > 0
    }

    fn per_second(&self) -> f64 {
        float(self.measured.recording.answered()) / self.measured.load_time.as_secs_f64().max(1e-9)
    }

    /// Returns what makes the numbers questionable.
    fn warnings(&self) -> Vec<String> {
        let LoadMeasurement { recording, busy_cpus, not_sent, unanswered, .. } = &self.measured;
        let mut warnings = Vec::new();
        if *unanswered > 0 {
            warnings.push(format!(
                "{} requests had no answer yet when the run was interrupted",
                grouped(*unanswered)
            ));
        }
        let timed_out = recording.failed() - recording.failed_early();
        if timed_out > 0 {
            warnings.push(format!(
                "{} requests had no answer within {}, and count with at least this latency",
                grouped(timed_out),
                readable(self.load.timeout)
            ));
        }
        if recording.failed_early() > 0 {
            warnings.push(format!(
                "{} requests failed: the latencies do not include them",
                grouped(recording.failed_early())
            ));
        }
        if recording.answered() + recording.failed() == 0 {
            let text = match self.load.replay {
                Some(_) => "no request was measured: do --from, --until and --where leave out all?",
                None => "no request was measured: raise --duration, --requests or --rate",
            };
            warnings.push(text.to_owned());
        }
        if let Pace::Open(open) = &self.load.pace {
            let delay = recording.generator_delay.value_at_quantile(0.99);
            let is_delayed = u128::from(delay) > MAX_GENERATOR_DELAY.as_nanos();
            if *not_sent > 0 && self.measured.slots_exhausted {
                warnings.push(format!(
                    "{} requests were due but not sent, because {} were in flight: the target does \
                     not keep up with {}; the latencies do not include them",
                    grouped(*not_sent),
                    grouped(open.max_in_flight as u64),
                    self.rate(open)
                ));
            } else if *not_sent > 0 {
                warnings.push(format!(
                    "{} requests were due but not sent: the load generator is the bottleneck",
                    grouped(*not_sent)
                ));
            } else if recording.sent_late > 0 {
                warnings.push(format!(
                    "{} requests were sent late, because {} were in flight; their latency includes \
                     the wait",
                    grouped(recording.sent_late),
                    grouped(open.max_in_flight as u64)
                ));
            }
            if is_delayed {
                warnings.push(format!(
                    "the load generator itself was late, by more than {} for one request in a \
                     hundred, which is part of the latency: use a lower --rate or another machine",
                    latency(delay)
                ));
            }
        }
        let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        // Decisions in memory are the work of this process.
        if *busy_cpus > BUSY_PART * float(cpus) && self.target.kind != "memory" {
            warnings.push(format!(
                "the load generator used {busy_cpus:.1} of {cpus} CPUs: it may be the bottleneck"
            ));
        }
        if recording.unlimited > 0 {
            warnings.push(format!(
                "no policy applied to {} requests, which were allowed without a limit",
                grouped(recording.unlimited)
            ));
        }
        warnings
    }

    /// Writes the result as text.
    pub(crate) fn write(&self, output: &mut dyn Write) -> io::Result<()> {
        let Self { target, load, measured, .. } = self;
        let keys = &load.keys;
        let recording = &measured.recording;
        let (heading, reset) = (style::HEADING, style::RESET);
        writeln!(output, "{heading}{}{reset}: {}", target.name, target.requests)?;
        let zipf = keys.zipf.map(|exponent| format!(" with exponent {exponent}"));
        let (count, distribution) = (grouped(keys.count), flag_name(&keys.distribution));
        let keys = match load.replay {
            Some(_) => String::new(),
            None => format!(", keys: {count}, {distribution}{}", zipf.unwrap_or_default()),
        };
        writeln!(output, "{}{keys}", self.pace())?;
        let warmup = match load.warmup {
            Duration::ZERO => String::new(),
            warmup => format!(" after a warm-up of {}", readable(warmup)),
        };
        let interrupted = if measured.interrupted { ", interrupted" } else { "" };
        let [seconds, last] = [measured.load_time, measured.elapsed].map(|it| it.as_secs_f64());
        let last_answer = match last / seconds.max(1e-9) {
            1.05.. => format!(", the last answer after {last:.2} s"),
            _ => String::new(),
        };
        writeln!(output, "measured for {seconds:.2} s{warmup}{last_answer}{interrupted}\n")?;

        let requests = recording.answered() + recording.failed();
        writeln!(
            output,
            "{:<9} {:>13}   {} answered per second",
            "requests",
            grouped(requests),
            rounded(self.per_second())
        )?;
        let share = |count: u64| {
            let percent = float(count) * 100.0 / float(requests.max(1));
            format!("{:>13}   {percent:.1} %", grouped(count))
        };
        writeln!(output, "{:<9} {}", "allowed", share(recording.allowed))?;
        writeln!(output, "{:<9} {}", "denied", share(recording.denied))?;
        writeln!(output, "{:<9} {}", "errors", share(recording.failed()))?;
        for (kind, error) in &recording.errors {
            let (style, count) = (style::DENIED, grouped(error.count));
            writeln!(output, "  {style}{kind}{reset}: {count}, such as: {}", error.example)?;
        }
        if !recording.latency.is_empty() {
            let from = match load.pace {
                Pace::Closed { .. } => "from sending to the answer",
                Pace::Open(_) => "from the due time to the answer",
            };
            writeln!(output, "\n{heading}latency{reset} {from}")?;
            let mut line = String::new();
            for (name, quantile) in QUANTILES {
                let value = latency(recording.latency.value_at_quantile(quantile));
                let _ = write!(line, "{name} {value}   ");
            }
            writeln!(output, "{line}max {}", latency(recording.latency.max()))?;
        }
        for warning in self.warnings() {
            writeln!(output, "\n{}warning:{reset} {warning}", style::WARNING)?;
        }
        if let Some(note) = &target.note {
            writeln!(output, "\n{}note:{reset} {note}", style::NOTE)?;
        }
        Ok(())
    }

    fn pace(&self) -> String {
        match &self.load.pace {
            Pace::Closed { concurrency } => {
                format!("closed loop, {} callers", grouped(*concurrency as u64))
            }
            Pace::Open(open) => {
                let arrivals = flag_name(&open.arrivals);
                match &self.load.replay {
                    Some(_) => format!("open loop, {}", self.rate(open)),
                    None => format!("open loop, {} requests per second ({arrivals})", open.rate),
                }
            }
        }
    }

    fn rate(&self, open: &OpenLoop) -> String {
        match &self.load.replay {
            Some(replay) => format!("a log at {} times its pace", replay.speed),
            None => format!("{} per second", open.rate),
        }
    }

    /// Returns the result as one JSON object.
    pub(crate) fn to_json(&self) -> Value {
        let Self { target, load, measured } = self;
        let keys = &load.keys;
        let recording = &measured.recording;
        let mut pace = match &load.pace {
            Pace::Closed { concurrency } => json!({"kind": "closed", "concurrency": concurrency}),
            Pace::Open(open) => json!({
                "kind": "open",
                "rate": open.rate,
                "arrivals": flag_name(&open.arrivals),
                "max_in_flight": open.max_in_flight,
                "due": recording.answered() + recording.failed() + measured.unanswered
                    + measured.not_sent,
                "not_sent": measured.not_sent,
                "sent_late": recording.sent_late,
                "generator_delay_us": percentiles(&recording.generator_delay),
            }),
        };
        if let Some(replay) = &load.replay {
            pace["kind"] = json!("replay");
            pace["speed"] = json!(replay.speed);
        }
        pace["warmup_seconds"] = json!(load.warmup.as_secs_f64());
        pace["timeout_ms"] = json!(tidegate_api::duration::millis(load.timeout));
        pace["seed"] = json!(load.seed);
        let errors = recording.errors.iter().map(
            |(kind, error)| json!({"kind": kind, "count": error.count, "example": error.example}),
        );
        json!({
            "target": {"kind": target.kind, "name": target.name, "requests": target.requests},
            "keys": {
                "count": keys.count,
                "distribution": flag_name(&keys.distribution),
                "zipf": keys.zipf,
                "prefix": keys.prefix,
            },
            "loop": pace,
            "seconds": measured.elapsed.as_secs_f64(),
            "load_seconds": measured.load_time.as_secs_f64(),
            "interrupted": measured.interrupted,
            "requests": recording.answered() + recording.failed(),
            "answered": recording.answered(),
            "answered_per_second": self.per_second(),
            "allowed": recording.allowed,
            "denied": recording.denied,
            "unlimited": recording.unlimited,
            "failed": recording.failed(),
            "unanswered": measured.unanswered,
            "errors": errors.collect::<Vec<_>>(),
            "latency_us": percentiles(&recording.latency),
            "generator_cpus": measured.busy_cpus,
            "warnings": self.warnings(),
        })
    }
}

/// Returns the percentiles in microseconds, or null without any value.
fn percentiles(histogram: &Histogram<u64>) -> Value {
    if histogram.is_empty() {
        return Value::Null;
    }
    let micros = |nanos: u64| json!(float(nanos) / 1e3);
    let mut values = serde_json::Map::new();
    for (name, quantile) in QUANTILES {
        values.insert(name.replace('.', "_"), micros(histogram.value_at_quantile(quantile)));
    }
    values.insert("max".to_owned(), micros(histogram.max()));
    values.insert("mean".to_owned(), json!(histogram.mean() / 1e3));
    Value::Object(values)
}

/// Formats nanoseconds with three digits.
fn latency(nanos: u64) -> String {
    scaled(float(nanos), 1e3, &[" ns", " µs", " ms", " s"])
}

/// Formats a number without decimals.
fn rounded(number: f64) -> String {
    if number < 10.0 { format!("{number:.2}") } else { grouped(whole(number.round())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_have_three_digits() {
        for (nanos, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_000, "1.00 µs"),
            (12_345, "12.3 µs"),
            (999_400, "999 µs"),
            (1_234_567, "1.23 ms"),
            (99_960_000, "100 ms"),
            (1_020_000_000, "1.02 s"),
        ] {
            assert_eq!(latency(nanos), text);
        }
    }
}
