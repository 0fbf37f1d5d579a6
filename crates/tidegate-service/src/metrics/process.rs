//! Metrics of the process, with the names that all Prometheus client libraries use. They are read
//! from `/proc`, and absent where it does not exist.

use super::write_numbers;

/// Values of `/proc/self/stat` (see `proc_pid_stat(5)`).
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    /// CPU time in user and kernel mode, in clock ticks.
    cpu_ticks: u64,
    threads: u64,
    /// Start of the process, in clock ticks since the boot.
    start_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The name of the program, in parentheses, may contain spaces and parentheses.
        let (_, fields) = text.rsplit_once(") ")?;
        let fields: Vec<&str> = fields.split(' ').collect();
        // The first of these fields is the third one in the manual.
        let field = |number: usize| fields.get(number - 3)?.trim_end().parse::<u64>().ok();
        Some(Self {
            cpu_ticks: field(14)? + field(15)?,
            threads: field(20)?,
            start_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

#[expect(clippy::cast_precision_loss, reason = "the metrics are floats")]
fn seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// Appends the metrics. Reads files, one entry per open file descriptor, so it may take
/// milliseconds.
#[cfg(target_os = "linux")]
#[expect(clippy::cast_precision_loss, reason = "the metrics are floats")]
pub fn write(text: &mut String) {
    use rustix::process::{Resource, getrlimit};
    let read = |file: &str| std::fs::read_to_string(file).ok();
    if let Some(stat) = read("/proc/self/stat").and_then(|text| Stat::parse(&text)) {
        #[rustfmt::skip]
        let numbers = [
            ("process_cpu_seconds_total", "counter",
                "Total user and system CPU time spent in seconds.", seconds(stat.cpu_ticks)),
            ("process_threads", "gauge",
                "Number of OS threads in the process.", stat.threads as f64),
            ("process_virtual_memory_bytes", "gauge",
                "Virtual memory size in bytes.", stat.virtual_bytes as f64),
            ("process_resident_memory_bytes", "gauge",
                "Resident memory size in bytes.",
                (stat.resident_pages * rustix::param::page_size() as u64) as f64),
        ];
        write_numbers(text, &numbers);
        if let Some(boot) = read("/proc/stat").and_then(|text| boot_time(&text)) {
            let help = "Start time of the process since unix epoch in seconds.";
            let start = boot as f64 + seconds(stat.start_ticks);
            write_numbers(text, &[("process_start_time_seconds", "gauge", help, start)]);
        }
    }
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        // Reading the directory opened one more.
        let count = files.count().saturating_sub(1);
        let help = "Number of open file descriptors.";
        write_numbers(text, &[("process_open_fds", "gauge", help, count)]);
    }
    if let Some(limit) = getrlimit(Resource::Nofile).current {
        let help = "Maximum number of open file descriptors.";
        write_numbers(text, &[("process_max_fds", "gauge", help, limit)]);
    }
}

#[cfg(not(target_os = "linux"))]
pub fn write(_: &mut String) {}

/// Returns the time of the boot, in seconds since the Unix epoch, from `/proc/stat`.
fn boot_time(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_parsed_whatever_the_name_of_the_program() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 0 0 20 0 9 0 1234 5678 90 1";
        let parsed = Stat {
            cpu_ticks: 200,
            threads: 9,
            start_ticks: 1234,
            virtual_bytes: 5678,
            resident_pages: 90,
        };
        assert_eq!(Stat::parse(stat), Some(parsed));
        assert_eq!(Stat::parse("7 (a) S 1"), None);
        assert_eq!(Stat::parse(""), None);
        assert_eq!(boot_time("cpu 1 2\nbtime 1700000000\nprocesses 3\n"), Some(1_700_000_000));
    }
}
