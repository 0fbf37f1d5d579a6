use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::check::{Record, Run, Sample, Source};
use crate::fleet::{FEW, Fleet, LIMIT, PAIR, TIMEOUT, WINDOW};
use crate::monitor::Monitor;
use crate::servers::Server;

static TURN: Mutex<()> = Mutex::new(());

const ATTEMPTS: usize = 3;
/// On a machine that is never quiet, rows are not measured again for ever.
const TIME_FOR_REPEATS: Duration = Duration::from_secs(7 * 60);
static BEGAN: OnceLock<Instant> = OnceLock::new();
/// A machine that stands still for so long makes calls miss a deadline of 100 ms that would have
/// kept it.
const TOO_LATE: Duration = Duration::from_millis(30);

/// No answer may be later than the deadline and this.
const GRACE: Duration = Duration::from_millis(50);
/// Once decisions come without the store, they come at once.
pub(crate) const AT_ONCE: Duration = Duration::from_millis(10);

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// Until the hot key is exhausted, and what comes first at each start has come.
pub(crate) const WARM_UP: Duration = Duration::from_secs(3);

/// The load goes on meanwhile.
pub(crate) fn let_pass(time: Duration) {
    std::thread::sleep(time);
}

/// A row of the table. It gathers what holds and what does not, and says all of it at its end.
pub(crate) struct Row {
    name: &'static str,
    started: Instant,
    figures: Vec<String>,
    failures: Vec<String>,
    /// Of these, how many no machine excuses, however late.
    inexcusable: usize,
    /// The longest that the machine was late by itself, or a server of the store.
    late: Duration,
    done: bool,
}

/// Measures a row when its turn has come. What must hold on any machine fails at once. A time that
/// is missed is measured again: on a machine that was late itself it proves nothing; on a quiet one
/// it is missed, and missed twice it has failed.
pub(crate) fn row(name: &'static str, measure: impl Fn(&mut Row)) {
    // A row that failed does not stop the next one.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let _preferred = Preferred::before_others();
    let began = *BEGAN.get_or_init(Instant::now);
    let mut missed = false;
    for _ in 0..ATTEMPTS {
        let (started, late) = (Instant::now(), Duration::ZERO);
        let mut row = Row {
            name,
            started,
            figures: Vec::new(),
            failures: Vec::new(),
            inexcusable: 0,
            late,
            done: false,
        };
        measure(&mut row);
        let quiet = row.late < TOO_LATE;
        if row.failures.is_empty() || row.inexcusable > 0 || (quiet && missed) {
            return row.finish();
        }
        missed |= quiet;
        row.done = true;
        row.write(if quiet { "missed" } else { "void" });
        println!("{}", row.failures.join("\n"));
        if !quiet && began.elapsed() > TIME_FOR_REPEATS {
            return;
        }
    }
}

/// While it lives, what this session runs goes before what other sessions run: who measures must
/// not wait for a build.
struct Preferred {
    before: Option<String>,
}

impl Preferred {
    const FILE: &'static str = "/proc/self/autogroup";

    /// Where the kernel has groups by session, and lets us; otherwise as it is.
    fn before_others() -> Self {
        let text = std::fs::read_to_string(Self::FILE).unwrap_or_default();
        let before = text.trim().rsplit(' ').next().map(str::to_owned);
        Self { before: before.filter(|_| std::fs::write(Self::FILE, "-15").is_ok()) }
    }
}

impl Drop for Preferred {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = std::fs::write(Self::FILE, before);
        }
    }
}

impl Row {
    /// Something measured, for the table.
    pub(crate) fn figure(&mut self, what: &str, value: impl std::fmt::Display) {
        self.figures.push(format!("{what} {value}"));
    }

    pub(crate) fn require(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.failures.push(otherwise());
        }
    }

    /// As [`Self::require`], whatever the machine does meanwhile.
    pub(crate) fn insist(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        self.inexcusable += usize::from(!holds);
        self.require(holds, otherwise);
    }

    /// A time that was measured, and its bound.
    pub(crate) fn within(&mut self, what: &str, measured: Option<Duration>, bound: Duration) {
        match measured {
            Some(time) => {
                self.figure(what, format_args!("{:.1} ms", time.as_secs_f64() * 1e3));
                self.require(time <= bound, || {
                    format!("{what}: {time:?}, and at most {bound:?} is promised")
                });
            }
            None => self.failures.push(format!("{what}: never, and at most {bound:?} is promised")),
        }
    }

    /// What must hold whatever happens: all answered, in time, by instances that live; nobody below
    /// a limit denied; no more admitted than `limits` times the limit in any window; every key with
    /// an expiry.
    pub(crate) fn check(&mut self, run: &Run, fleet: &Fleet, limits: usize, servers: &[&Server]) {
        let unanswered: Vec<_> =
            run.records.iter().filter(|record| record.trouble.is_some()).collect();
        let example =
            unanswered.first().and_then(|record| record.trouble.clone()).unwrap_or_default();
        self.insist(unanswered.is_empty(), || {
            format!("{} requests without an answer: {example}", unanswered.len())
        });
        let odd = run.records.iter().filter(|record| !matches!(record.status, 200 | 429)).count();
        self.insist(odd == 0, || format!("{odd} answers that are neither 200 nor 429"));
        self.late = self.late.max(run.lateness());
        self.figure("machine late", format_args!("{} ms", self.late.as_millis()));
        let slowest = run.slowest();
        self.within("slowest", slowest.map(|(took, _)| took), TIMEOUT + GRACE);
        for (name, limit) in [("hot", LIMIT), ("few", FEW), ("pair", PAIR)] {
            let most = run.most_admitted_ever(name, WINDOW);
            if name == "hot" {
                #[expect(clippy::cast_precision_loss, reason = "for the eye")]
                self.figure("at most", format_args!("{:.2} L", most as f64 / limit as f64));
            }
            let told =
                || format!("{name}: {most} in a window, and {limits} × {limit} is the bound");
            self.require(most <= limits * limit, told);
            // Where a machine that stood still made calls miss their deadline, there was a failure
            // of the store after all, and the bound of that holds.
            let fallen = run.records.iter().any(|record| !record.by_store());
            let whatever = if fallen { limits.max(2) } else { limits };
            self.insist(most <= whatever * limit, || {
                format!(
                    "{name}: {whatever} × {limit} is the bound on any machine; instances known: {:?}",
                    run.fleet_sizes()
                )
            });
        }
        let denied = run.of("quiet").filter(|record| !record.allowed).count();
        self.require(denied == 0, || format!("{denied} denials of keys below their limit"));
        self.check_life(fleet);
        for server in servers {
            let eternal = server.keys_without_expiry("rate_limit:*");
            self.insist(eternal.is_empty(), || format!("without expiry: {eternal:?}"));
        }
    }

    /// The store was late by itself, without our doing. To be told before the
    /// [checks](Self::check).
    pub(crate) fn store_was_late(&mut self, by: Duration) {
        self.late = self.late.max(by);
    }

    /// No panic, no exit.
    pub(crate) fn check_life(&mut self, fleet: &Fleet) {
        for service in &fleet.instances {
            let output = service.output();
            self.insist(!output.contains("panicked"), || format!("a panic:\n{output}"));
            assert!(service.memory() > 0, "it runs");
            assert_eq!(service.admin("/healthz").status, 200);
        }
    }

    /// From one moment to the other, nobody was decided by the store, everybody by its policy's
    /// word.
    pub(crate) fn check_failure_modes(&mut self, run: &Run, from: Instant, to: Instant) {
        let mut wrong = String::new();
        for record in run.sent_between(from, to).filter(|record| record.answered <= to) {
            let name = run.stream(record).name.as_str();
            let right = match name {
                "open" => record.source == Source::Allow && record.allowed,
                "ledger" => record.source == Source::Deny && !record.allowed,
                // A denial that the store has made holds, as long as it is not missed.
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
        // In the window in which it fails, what the store had admitted comes on top; then no more.
        let most = run.most_admitted("hot", WINDOW, from + WINDOW, to);
        self.require(most <= LIMIT, || {
            format!("{most} in a window long after the store was gone, and {LIMIT} is the bound")
        });
    }

    /// The store does not answer from one moment to the other: the breaker opens, then every
    /// decision comes at once.
    pub(crate) fn check_outage(&mut self, run: &Run, gone: Instant, back: Instant) {
        let open = run.shown_after(gone, Sample::breaker_is_open);
        self.within("breaker open", open, SECOND);
        let from = gone + open.unwrap_or(SECOND);
        self.within("p99 away", Some(run.p99(from, back)), AT_ONCE);
        self.check_failure_modes(run, from, back);
        let late = run
            .sent_between(gone + SECOND, back)
            .filter(|record| record.source == Source::DenyCache)
            .count();
        self.require(late == 0, || {
            format!("{late} denials from the cache, long after it could be told of a refund")
        });
    }

    /// An old primary that is awake again is left alone: what lay in its socket writes nothing, and
    /// no more calls come.
    pub(crate) fn check_old_primary(&mut self, monitor: &Monitor, awake: Instant) {
        let seen = monitor.written_after(self.started).len();
        self.insist(seen > 0, || "the old primary was not listened to".to_owned());
        let written = monitor.written_after(awake);
        self.figure("written to the old primary", written.len());
        self.insist(written.is_empty(), || {
            format!("{} writes to the old primary: {}", written.len(), written[0])
        });
        let calls = monitor.calls_after(awake + SECOND / 2);
        self.require(calls == 0, || {
            format!("{calls} calls to the old primary long after the failover")
        });
    }

    /// The store decided everything that was sent in this time, but for keys that owe it what they
    /// were admitted without it.
    pub(crate) fn check_store_decides(
        &mut self,
        run: &Run,
        fleet: &Fleet,
        from: Instant,
        to: Instant,
    ) {
        let others = run.without_store(from, to, WINDOW);
        self.require(others.is_empty(), || {
            let mut told = format!("{} decisions that are not the store's", others.len());
            for record in others.iter().take(5) {
                let (name, after, took) = (&run.stream(record).name, record.sent - from, record.answered - record.sent);
                let Record { instance, source, .. } = record;
                let _ = write!(
                    told,
                    "\n  {name} by {source:?} of instance {instance}, sent {after:?} later, took {took:?}"
                );
            }
            for (number, service) in fleet.instances.iter().enumerate() {
                let output = service.output();
                let warnings = output.lines().skip_while(|line| !line.contains(" WARN "));
                let _ = write!(told, "\n  instance {number}:\n{}", warnings.collect::<Vec<_>>().join("\n"));
            }
            told
        });
    }

    /// What the store charged is what it told, but for requests of which nobody can know: those
    /// under way when it went away or came back. `away`: requests sent in this time must not have
    /// been charged, now or later.
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
        self.figure("charged", format_args!("{charged} of {admitted} told"));
        self.insist((admitted..=admitted + unanswered).contains(&charged), || {
            format!("{charged} charged, {admitted} told, {unanswered} of which nobody can know")
        });
    }

    /// Writes the row's line, and fails if something did not hold.
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
