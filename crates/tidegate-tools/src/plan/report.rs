//! A plan as text: a table, its assumptions, and the recommendation.

use std::io::{self, Write};

use tidegate_config::duration::readable;

use super::{CapacityPlan, Form, Need};
use crate::tool::style;
use crate::tool::table::TextTable;
use crate::tool::text::{float, grouped, scaled, three_digits};

const TEXTS: [&str; 2] = ["algorithm", "encoding"];
const NUMBERS: [&str; 12] = [
    "keys",
    "bytes/key",
    "if full",
    "memory",
    "if full",
    "CPU",
    "cores",
    "network",
    "by memory",
    "by CPU",
    "primaries",
    "room used",
];

impl CapacityPlan {
    /// Writes the plan for people.
    pub(crate) fn write(&self, output: &mut dyn Write) -> io::Result<()> {
        let demand = &self.demand;
        writeln!(
            output,
            "{} with {} per {}, {} requests per second at the peak\n",
            counted(demand.users, "user"),
            grouped(demand.limit),
            readable(demand.window),
            amount(demand.rps)
        )?;
        let mut table = TextTable::new(&TEXTS, &NUMBERS);
        for need in &self.forms {
            table.add(row(need));
        }
        table.write(output)?;
        for form in &self.unavailable {
            writeln!(output, "{}: {}", name(form.form), form.reason)?;
        }
        writeln!(output, "\nAssumptions:")?;
        for assumption in self.assumptions() {
            writeln!(output, "- {assumption}")?;
        }
        writeln!(output, "\n{}{}{}", style::HEADING, self.recommendation, style::RESET)
    }

    fn assumptions(&self) -> Vec<String> {
        let Self { servers, calls, .. } = self;
        let source = if self.measured { "your Redis" } else { "the machine of the benchmarks" };
        let batch = match calls.batch {
            1 => "1 decision per call, the most expensive way; see --batch".to_owned(),
            batch => format!("{batch} decisions per call"),
        };
        let mut assumptions = vec![
            self.keys_assumption(),
            format!(
                "memory: keys of {} bytes, the policy {} and the prefix {}, {} for \
                 fragmentation; \"if full\": all of these keys have used up their limit",
                calls.key_bytes,
                calls.policy,
                calls.prefix,
                percent(self.fragmentation - 1.0)
            ),
            format!(
                "CPU: {batch}; times of {source}, where a call of an empty script takes {} µs",
                three_digits(self.empty_script_micros)
            ),
            format!(
                "primaries: {} and 1 core each, {} of both free; the others can take over if one \
                 fails; replicas are extra",
                size(servers.node_memory_bytes),
                percent(servers.headroom)
            ),
            format!(
                "room used: part of what the primaries have beside that; up to {} are accepted, \
                 because the costs are no more precise, and above it more primaries are needed",
                percent(1.0 + self.tolerance)
            ),
        ];
        if self.forms.iter().any(|need| need.cores > float(need.primaries)) {
            assumptions.push(
                "the keys are too few for more primaries, and a key is on one: its CPU does not \
                 suffice; see --batch"
                    .to_owned(),
            );
        }
        let admitted = self.demand.limit_of_all_users();
        if self.demand.rps > admitted {
            assumptions.push(format!(
                "at most {} of these requests per second are admitted: a deny cache answers most \
                 others without Redis",
                amount(admitted)
            ));
        }
        assumptions
    }

    fn keys_assumption(&self) -> String {
        let demand = &self.demand;
        let users = demand.active_users();
        let bounded_by_requests =
            self.forms.iter().filter(|need| float(need.keys) < users.floor()).count();
        let expired = percent(self.expired_keys);
        let requests = format!(
            "as many as requests within their lifetime, and {expired} that have expired but are \
             not removed yet"
        );
        let active = match demand.active {
            Some(share) => format!("the active {} of the users", percent(share)),
            None => "all users".to_owned(),
        };
        if bounded_by_requests == 0 {
            format!("keys: {active} have a count at the same time")
        } else if bounded_by_requests == self.forms.len() {
            format!("keys: {requests}; fewer than {active}")
        } else {
            format!("keys: {requests}, but not more than {active}")
        }
    }
}

fn row(need: &Need) -> [String; 14] {
    [
        need.form.algorithm.to_string(),
        need.form.encoding_str().to_owned(),
        amount(float(need.keys)),
        amount(float(need.bytes_per_key)),
        amount(float(need.bytes_per_full_key)),
        size(need.memory_bytes),
        size(need.full_memory_bytes),
        format!("{} µs", three_digits(need.cpu_micros)),
        three_digits(need.cores),
        scaled(need.network_bits_per_second, 1e3, &[" b/s", " kb/s", " Mb/s", " Gb/s", " Tb/s"]),
        grouped(need.primaries_by_memory),
        grouped(need.primaries_by_cpu),
        grouped(need.primaries),
        format!("{:.0} %", need.room_used * 100.0),
    ]
}

fn name(form: Form) -> String {
    format!("{} {}", form.algorithm, form.encoding_str()).trim_end().to_owned()
}

fn counted(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(count), if count == 1 { "" } else { "s" })
}

/// Formats a number with a unit, which is a thousand of the previous one.
fn amount(number: f64) -> String {
    scaled(number, 1e3, &["", "k", "M", "B", "T"])
}

fn size(bytes: u64) -> String {
    let units = [" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"];
    scaled(float(bytes), 1_024.0, &units)
}

/// Formats a share in percent, with as many digits as it needs.
fn percent(share: f64) -> String {
    let hundredths = (share * 1e4).round() / 1e2;
    format!("{hundredths} %")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        let amounts = [0.0, 7.0, 0.25, 999.0, 999.6, 1_500.0, 99_960.0, 4.3e6, 1e9, 5e15];
        let expected = ["0", "7", "0.25", "999", "1.00k", "1.50k", "100k", "4.30M", "1.00B"];
        assert_eq!(amounts.map(amount)[..9], expected);
        assert_eq!(amount(5e15), "5000T");
        assert_eq!(
            [0, 1_023, 1_536, 16 << 30].map(size),
            ["0 B", "1023 B", "1.50 KiB", "16.0 GiB"]
        );
        assert_eq!(size(u64::MAX), "16.0 EiB");
        assert_eq!([0.3, 0.0025, 0.05, 1.0].map(percent), ["30 %", "0.25 %", "5 %", "100 %"]);
    }
}
