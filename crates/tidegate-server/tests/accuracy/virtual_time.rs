//! Decisions in virtual time: memory by a manual clock, Redis and the cluster by scripts that take
//! the time of that clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tidegate::{Charge, Limiter, ManualClock, MemoryStore, Quota, RedisStore, Store, Timestamp};

use crate::Place;
use crate::form::{Form, LIMIT, WINDOW};
use crate::oracle::{ExactLog, Figures};
use crate::support::TEST_TIMEOUT;
use crate::traffic::Traffic;
use tidegate_tools::simulate::load::LoadKind;

/// Time of the fault after the start: in the middle of a burst, of a boundary and of an attack.
const MOMENT: Duration = Duration::from_millis(30_050);
/// Instances of the fleet, and the times after the start at which each gets the new configuration.
const ROLLOUT: [Duration; 3] = [MOMENT, Duration::from_secs(35), Duration::from_millis(40_050)];
/// Time by which the clock of the store steps back.
const STEP_BACK: Duration = Duration::from_secs(5);

/// Number of runs at the same time, each with its own connection and clock.
const LANES: usize = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    ClockStepsBack,
    /// Three instances get a new configuration one after the other.
    Rollout(Change),
}

/// Change of a new configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Half of the limit.
    Limit,
    /// Twice the window.
    Window,
    Form(Form),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    pub(crate) form: Form,
    pub(crate) load: LoadKind,
    pub(crate) fault: Fault,
}

impl Run {
    fn quota_before(self) -> Quota {
        self.form.quota(LIMIT, WINDOW)
    }

    fn quota_after(self) -> Quota {
        match self.fault {
            Fault::None | Fault::ClockStepsBack => self.quota_before(),
            Fault::Rollout(Change::Limit) => self.form.quota(LIMIT / 2, WINDOW),
            Fault::Rollout(Change::Window) => self.form.quota(LIMIT, 2 * WINDOW),
            Fault::Rollout(Change::Form(form)) => form.quota(LIMIT, WINDOW),
        }
    }

    /// Returns whether the instance that decides this request has the new configuration.
    fn is_after(self, place: Place, number: usize, elapsed: Duration) -> bool {
        let is_rollout = matches!(self.fault, Fault::Rollout(_));
        // A store in memory belongs to one process, which gets it at once.
        let instance = if place == Place::Memory { 0 } else { number % ROLLOUT.len() };
        is_rollout && elapsed >= ROLLOUT[instance]
    }

    /// Returns the time that the store sees.
    fn store_time(self, time: u64, elapsed: Duration) -> u64 {
        let is_behind = self.fault == Fault::ClockStepsBack && elapsed >= MOMENT;
        time - if is_behind { micros(STEP_BACK) } else { 0 }
    }

    /// Decides all requests of the run, for clients with this prefix.
    async fn decide<S: Store>(
        self,
        place: Place,
        prefix: &str,
        limiter: &Limiter<S>,
        clock: &ManualClock,
    ) -> Vec<bool> {
        let traffic = Traffic::of(self.load);
        let (before, after) = (self.quota_before(), self.quota_after());
        let keys: Vec<String> =
            (0..traffic.clients).map(|client| format!("{prefix}-{client}")).collect();
        let mut decisions = Vec::with_capacity(traffic.requests.len());
        for (number, request) in traffic.requests.iter().enumerate() {
            let elapsed = Duration::from_micros(request.time - traffic.start);
            clock.set(Timestamp::from_micros(self.store_time(request.time, elapsed)));
            let quota = if self.is_after(place, number, elapsed) { &after } else { &before };
            let charge = Charge::new(&keys[request.client], quota).with_policy("accuracy");
            decisions.push(limiter.acquire(&charge).await.expect("a decision").allowed);
        }
        decisions
    }
}

/// Decides all runs on one store, several at the same time. Returns their decisions in order.
pub(crate) async fn decide_all(place: Place, urls: &[String], runs: &[Run]) -> Vec<Vec<bool>> {
    let next = Arc::new(AtomicUsize::new(0));
    let runs: Arc<[Run]> = runs.into();
    let mut lanes = Vec::new();
    for _ in 0..LANES {
        let (next, runs, urls) = (Arc::clone(&next), Arc::clone(&runs), urls.to_vec());
        lanes.push(tokio::spawn(async move {
            let clock = ManualClock::new();
            let mut done = Vec::new();
            let builder = match place {
                Place::Memory => {
                    while let Some((number, run)) = next_run(&next, &runs) {
                        let store = MemoryStore::builder().clock(clock.clone()).build();
                        let limiter = Limiter::new(store);
                        done.push((number, run.decide(place, "run", &limiter, &clock).await));
                    }
                    return done;
                }
                Place::Redis => RedisStore::builder(&urls[0]),
                Place::Cluster => RedisStore::cluster(&urls),
            };
            let builder = builder.timeout(TEST_TIMEOUT).driven_by(clock.clone());
            let limiter = Limiter::new(builder.connect().await.expect("our own server answers"));
            while let Some((number, run)) = next_run(&next, &runs) {
                let prefix = format!("run-{number}");
                done.push((number, run.decide(place, &prefix, &limiter, &clock).await));
            }
            done
        }));
    }
    let mut results = vec![Vec::new(); runs.len()];
    for lane in lanes {
        for (number, decisions) in lane.await.expect("no panic") {
            results[number] = decisions;
        }
    }
    results
}

fn next_run(next: &AtomicUsize, runs: &[Run]) -> Option<(usize, Run)> {
    let number = next.fetch_add(1, Ordering::Relaxed);
    runs.get(number).map(|run| (number, *run))
}

/// Compares the decisions with the exact log. Each is judged by the limit and window of the
/// instance that made it.
pub(crate) fn figures(run: Run, decisions: &[bool], place: Place) -> Figures {
    let traffic = Traffic::of(run.load);
    let (before, after) = (run.quota_before(), run.quota_after());
    let quota_at = |number: usize, time: u64| {
        let elapsed = Duration::from_micros(time - traffic.start);
        if run.is_after(place, number, elapsed) { &after } else { &before }
    };
    compare(&traffic, decisions, quota_at)
}

fn compare<'a>(
    traffic: &Traffic,
    decisions: &[bool],
    quota_at: impl Fn(usize, u64) -> &'a Quota,
) -> Figures {
    assert_eq!(traffic.requests.len(), decisions.len(), "each request has a decision");
    let mut logs: Vec<ExactLog> = Vec::new();
    logs.resize_with(traffic.clients, ExactLog::default);
    let mut figures = Figures::default();
    for (number, (request, is_allowed)) in traffic.requests.iter().zip(decisions).enumerate() {
        let quota = quota_at(number, request.time);
        let log = &mut logs[request.client];
        figures.record(log.units(request.time, quota.window()), quota.limit(), *is_allowed);
        if *is_allowed {
            log.admit(request.time);
        }
    }
    figures
}

/// Returns the figures of each form for many independent clients in memory.
pub(crate) async fn many_clients() -> Vec<(Form, Figures)> {
    let traffic = Traffic::of_many_clients();
    let mut all = Vec::new();
    for form in Form::ALL {
        let clock = ManualClock::new();
        let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
        let quota = form.quota(LIMIT, WINDOW);
        let mut decisions = Vec::with_capacity(traffic.requests.len());
        for request in &traffic.requests {
            clock.set(Timestamp::from_micros(request.time));
            let key = request.client.to_string();
            let decision = limiter.acquire(&Charge::new(&key, &quota)).await.expect("a decision");
            decisions.push(decision.allowed);
        }
        all.push((form, compare(&traffic, &decisions, |_, _| &quota)));
    }
    all
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("short")
}
