use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::check::{Record, Run, Sample, Source};
use crate::fleet::{Fleet, LIMIT, PAIR_LIMIT, TIMEOUT, TINY_LIMIT, WINDOW};
use crate::monitor::Monitor;
use crate::servers::Server;

static ROW_LOCK: Mutex<()> = Mutex::new(());

const ATTEMPTS: usize = 3;
/// Maximum number of attempts on a machine that is never idle.
const MAX_REPEAT_TIME: Duration = Duration::from_secs(7 * 60);
static SUITE_START: OnceLock<Instant> = OnceLock::new();
/// Stall of the machine that makes calls miss a deadline of 100 ms.
const MAX_MACHINE_DELAY: Duration = Duration::from_millis(30);

/// Maximum time of a response after the deadline.
const GRACE: Duration = Duration::from_millis(50);
/// Maximum time of a decision without the store.
pub(crate) const MAX_LOCAL_LATENCY: Duration = Duration::from_millis(10);

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// Time until the hot key is exhausted and the startup has finished.
pub(crate) const WARM_UP: Duration = Duration::from_secs(3);

/// Waits while the load continues.
pub(crate) fn wait_under_load(time: Duration) {
    std::thread::sleep(time);
}

/// Row of the table. Collects all failures and reports them at the end.
pub(crate) struct Row {
    name: &'static str,
    started: Instant,
    figures: Vec<String>,
    failures: Vec<String>,
    /// Number of failures that no delay of the machine excuses.
    hard_failures: usize,
    /// Maximum delay of the machine or of a server of the store.
    late: Duration,
    done: bool,
}

/// Runs a row when the previous one is done. Guarantees that hold on any machine fail at once. A
/// missed time is measured again: it proves nothing on a delayed machine, and fails the row if it
/// is missed twice on an idle one.
pub(crate) fn row(name: &'static str, measure: impl Fn(&mut Row)) {
    // A failed row does not poison the lock for the next one.
    let _turn = ROW_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let _preferred = PriorityBoost::raise_priority();
    let began = *SUITE_START.get_or_init(Instant::now);
    let mut missed = false;
    for _ in 0..ATTEMPTS {
        let (started, late) = (Instant::now(), Duration::ZERO);
        let mut row = Row {
            name,
            started,
            figures: Vec::new(),
            failures: Vec::new(),
            hard_failures: 0,
            late,
            done: false,
        };
        measure(&mut row);
        let quiet = row.late < MAX_MACHINE_DELAY;
        if row.failures.is_empty() || row.hard_failures > 0 || (quiet && missed) {
            return row.finish();
        }
        missed |= quiet;
        row.done = true;
        row.write(if quiet { "missed" } else { "void" });
        println!("{}", row.failures.join("\n"));
        if !quiet && began.elapsed() > MAX_REPEAT_TIME {
            return;
        }
    }
}

/// Raises the priority of this session while it exists, so that measurements do not wait for a
/// build.
struct PriorityBoost {
    before: Option<String>,
}

impl PriorityBoost {
    const FILE: &'static str = "/proc/self/autogroup";

    /// Uses the kernel's autogroups, if available and permitted.
    fn raise_priority() -> Self {
        let text = std::fs::read_to_string(Self::FILE).unwrap_or_default();
        let before = text.trim().rsplit(' ').next().map(str::to_owned);
        Self { before: before.filter(|_| std::fs::write(Self::FILE, "-15").is_ok()) }
    }
}

impl Drop for PriorityBoost {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = std::fs::write(Self::FILE, before);
        }
    }
}

impl Row {
    /// Adds a measured value to the table.
    pub(crate) fn figure(&mut self, what: &str, value: impl std::fmt::Display) {
        self.figures.push(format!("{what} {value}"));
    }

    pub(crate) fn require(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.failures.push(otherwise());
        }
    }

    /// Like [`Self::require`], but a delay of the machine is no excuse.
    pub(crate) fn require_always(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        self.hard_failures += usize::from(!holds);
        self.require(holds, otherwise);
    }

    /// Checks a measured time against its bound.
    pub(crate) fn within(&mut self, what: &str, measured: Option<Duration>, bound: Duration) {
        match measured {
            Some(time) => {
                self.figure(what, format_args!("{:.1} ms", time.as_secs_f64() * 1e3));
                self.require(time <= bound, || {
                    format!("{what}: {time:?}, the guarantee is at most {bound:?}")
                });
            }
            None => {
                self.failures.push(format!("{what}: never, the guarantee is at most {bound:?}"));
            }
        }
    }

    /// Checks the guarantees of every row: all requests get a timely response, no key below its
    /// limit is denied, no window exceeds `limits` times the limit, and every key has an expiry.
    pub(crate) fn check(&mut self, run: &Run, fleet: &Fleet, limits: usize, servers: &[&Server]) {
        let unanswered: Vec<_> =
            run.records.iter().filter(|record| record.failure.is_some()).collect();
        let example =
            unanswered.first().and_then(|record| record.failure.clone()).unwrap_or_default();
        self.require_always(unanswered.is_empty(), || {
            format!("{} requests without an answer: {example}", unanswered.len())
        });
        let unexpected =
            run.records.iter().filter(|record| !matches!(record.status, 200 | 429)).count();
        self.require_always(unexpected == 0, || {
            format!("{unexpected} responses that are neither 200 nor 429")
        });
        self.late = self.late.max(run.max_delay());
        self.figure("machine late", format_args!("{} ms", self.late.as_millis()));
        let slowest = run.slowest();
        self.within("slowest", slowest.map(|(took, _)| took), TIMEOUT + GRACE);
        for (name, limit) in [("hot", LIMIT), ("few", TINY_LIMIT), ("pair", PAIR_LIMIT)] {
            let most = run.max_allowed_overall(name, WINDOW);
            if name == "hot" {
                #[expect(clippy::cast_precision_loss, reason = "only printed")]
                self.figure("at most", format_args!("{:.2} L", most as f64 / limit as f64));
            }
            let message =
                || format!("{name}: {most} in a window, and {limits} × {limit} is the bound");
            self.require(most <= limits * limit, message);
            // If a stall of the machine made calls miss their deadline, the store did fail, and the
            // bound for failures applies.
            let fallen = run.records.iter().any(|record| !record.by_store());
            let whatever = if fallen { limits.max(2) } else { limits };
            self.require_always(most <= whatever * limit, || {
                format!(
                    "{name}: {whatever} × {limit} is the bound on any machine; instances known: \
                     {:?}",
                    run.fleet_sizes()
                )
            });
        }
        let denied = run.of("quiet").filter(|record| !record.allowed).count();
        self.require(denied == 0, || format!("{denied} denials of keys below their limit"));
        self.check_alive(fleet);
        for server in servers {
            let eternal = server.keys_without_expiry("rate_limit:*");
            self.require_always(eternal.is_empty(), || format!("without expiry: {eternal:?}"));
        }
    }

    /// Records a delay of the store that the test did not cause. Must be called before the
    /// [checks](Self::check).
    pub(crate) fn record_store_delay(&mut self, by: Duration) {
        self.late = self.late.max(by);
    }

    /// Checks that no instance panicked or exited.
    pub(crate) fn check_alive(&mut self, fleet: &Fleet) {
        for service in &fleet.instances {
            let output = service.output();
            self.require_always(!output.contains("panicked"), || format!("a panic:\n{output}"));
            assert!(service.memory() > 0, "the instance runs");
            assert_eq!(service.admin("/healthz").status, 200);
        }
    }

    /// Checks that all decisions of a period were made by the failure modes of the policies.
    pub(crate) fn check_failure_modes(&mut self, run: &Run, from: Instant, to: Instant) {
        let mut wrong = String::new();
        for record in run.sent_between(from, to).filter(|record| record.responded <= to) {
            let name = run.stream(record).name.as_str();
            let right = match name {
                "open" => record.source == Source::Allow && record.allowed,
                "ledger" => record.source == Source::Deny && !record.allowed,
                // Denials of the store stay valid in the deny cache.
                _ => {
                    record.source == Source::Local
                        || (record.source == Source::DenyCache && !record.allowed)
                }
            };
            if !right && wrong.len() < 200 {
                let _ = write!(wrong, " {name} by {:?}", record.source);
            }
        }
        self.require(wrong.is_empty(), || format!("while the store is away:{wrong}"));
        // Only the window of the failure may also contain requests that the store had allowed.
        let most = run.max_allowed("hot", WINDOW, from + WINDOW, to);
        self.require(most <= LIMIT, || {
            format!("{most} in a window long after the store was gone, and {LIMIT} is the bound")
        });
    }

    /// Checks an outage: the circuit opens, and then every decision is fast.
    pub(crate) fn check_outage(&mut self, run: &Run, gone: Instant, back: Instant) {
        let open = run.shown_after(gone, Sample::breaker_is_open);
        self.within("breaker open", open, SECOND);
        let from = gone + open.unwrap_or(SECOND);
        self.within("p99 away", Some(run.p99(from, back)), MAX_LOCAL_LATENCY);
        self.check_failure_modes(run, from, back);
        let late = run
            .sent_between(gone + SECOND, back)
            .filter(|record| record.source == Source::DenyCache)
            .count();
        self.require(late == 0, || {
            format!("{late} denials from the cache, long after its entries became stale")
        });
    }

    /// Checks that a resumed old primary is not used: pending calls in its socket write nothing,
    /// and no further calls arrive.
    pub(crate) fn check_old_primary(&mut self, monitor: &Monitor, awake: Instant) {
        let seen = monitor.written_after(self.started).len();
        self.require_always(seen > 0, || "the monitor of the old primary saw nothing".to_owned());
        let written = monitor.written_after(awake);
        self.figure("written to the old primary", written.len());
        self.require_always(written.is_empty(), || {
            format!("{} writes to the old primary: {}", written.len(), written[0])
        });
        let calls = monitor.calls_after(awake + SECOND / 2);
        self.require(calls == 0, || {
            format!("{calls} calls to the old primary long after the failover")
        });
    }

    /// Checks that the store decided all requests of a period, except for keys with pending debits.
    pub(crate) fn check_store_decides(
        &mut self,
        run: &Run,
        fleet: &Fleet,
        from: Instant,
        to: Instant,
    ) {
        let others = run.without_store(from, to, WINDOW);
        self.require(others.is_empty(), || {
            let mut message = format!("{} decisions that are not the store's", others.len());
            for record in others.iter().take(5) {
                let (name, after, took) =
                    (&run.stream(record).name, record.sent - from, record.responded - record.sent);
                let Record { instance, source, .. } = record;
                let _ = write!(
                    message,
                    "\n  {name} by {source:?} of instance {instance}, sent {after:?} later, took \
                     {took:?}"
                );
            }
            for (number, service) in fleet.instances.iter().enumerate() {
                let output = service.output();
                let warnings = output.lines().skip_while(|line| !line.contains(" WARN "));
                let _ = write!(
                    message,
                    "\n  instance {number}:\n{}",
                    warnings.collect::<Vec<_>>().join("\n")
                );
            }
            message
        });
    }

    /// Checks that the store charged exactly the allowed requests, except for those in flight at
    /// the start or end of the outage. Requests sent within `away` must never be charged.
    pub(crate) fn check_ledger(
        &mut self,
        run: &Run,
        charged: u64,
        away: Option<(Instant, Instant)>,
    ) {
        let admitted = run.of("ledger").filter(|record| record.allowed).count() as u64;
        let unknown = |sent: Instant| away.is_none_or(|(from, to)| sent < from || sent >= to);
        let unanswered =
            run.of("ledger").filter(|record| !record.by_store() && unknown(record.sent)).count()
                as u64;
        self.figure("charged", format_args!("{charged} of {admitted} reported"));
        self.require_always((admitted..=admitted + unanswered).contains(&charged), || {
            format!("{charged} charged, {admitted} reported, {unanswered} unknown")
        });
    }

    /// Prints the row, and panics if it has failures.
    fn finish(mut self) {
        self.done = true;
        self.write(if self.failures.is_empty() { "ok" } else { "FAILED" });
        assert!(self.failures.is_empty(), "{}:\n- {}", self.name, self.failures.join("\n- "));
    }

    fn write(&self, verdict: &str) {
        let seconds = self.started.elapsed().as_secs();
        let mut line =
            format!("{verdict:<6} {:<34} {seconds:>3} s  {}", self.name, self.figures.join(", "));
        for failure in &self.failures {
            let _ = write!(line, "\n       - {}", failure.lines().next().unwrap_or_default());
        }
        println!("{line}");
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("faults.txt");
        let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
        let _ = file.and_then(|mut file| writeln!(file, "{line}"));
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        if !self.done {
            self.write("FAILED");
        }
    }
}
