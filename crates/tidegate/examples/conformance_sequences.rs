//! Prints the sequences of the conformance suite with the decisions of its naive model, for tests
//! in other languages (feature `testing`).
//!
//! ```sh
//! cargo run -p tidegate --example conformance_sequences > sequences.jsonl
//! ```
//!
//! Each line is one step on a clock that starts at a fixed time: `now_us`, the action, its charges,
//! and the expected decisions, one per charge. A new `sequence` starts with an empty limiter.

use std::error::Error;
use std::io::{BufWriter, Write as _, stdout};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::testing::conformance;
use tidegate::{
    Action, Charge, Clock, Decision, Limiter, ManualClock, MemoryStore, Outcome, Store, StoreError,
    Timestamp,
};

/// Rare actions, such as reports and refunds with their time, are in even seeds only.
const SEEDS: usize = 1_000;

/// Steps of a sequence; `None` for an action that a limiter does not have.
type Steps = Arc<Mutex<Vec<Option<Value>>>>;

/// Records the steps of the suite. The suite compares each decision with that of the model, so a
/// step that was recorded is right if the suite does not panic.
struct Recorder {
    store: MemoryStore,
    steps: Steps,
}

impl Recorder {
    fn record(&self, action: Action, charges: &[Charge<'_>], decisions: &[Decision]) {
        let step = name(action, charges).map(|action| {
            json!({
                "now_us": self.store.clock().now().as_micros(),
                "action": action,
                "charges": charges.iter().map(charge_fields).collect::<Vec<_>>(),
                "expected": decisions.iter().map(decision_fields).collect::<Vec<_>>(),
            })
        });
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).push(step);
    }
}

impl Store for Recorder {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        self.store.decide(action, charge).map(move |decided| {
            decided.inspect(|decision| {
                self.record(action, std::slice::from_ref(charge), std::slice::from_ref(decision));
            })
        })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        self.store.decide_all(action, charges).map(move |decided| {
            decided.inspect(|decisions| self.record(action, charges, decisions))
        })
    }

    fn clock(&self) -> &dyn Clock {
        self.store.clock()
    }
}

/// Returns the name of an action, if a limiter has it: no partial charge, and no refund without a
/// time. Limiters of Python have no quotas of calendars, either.
fn name(action: Action, charges: &[Charge<'_>]) -> Option<&'static str> {
    if charges.iter().any(|charge| charge.quota().calendar().is_some()) {
        return None;
    }
    let lacks_time = || charges.iter().any(|charge| charge.charged_at() == Timestamp::ZERO);
    match action {
        Action::Acquire => Some("acquire"),
        Action::Peek => Some("peek"),
        Action::Report => Some("report"),
        Action::Reset => Some("reset"),
        Action::Refund if !lacks_time() => Some("refund"),
        Action::Refund | Action::ChargeUpTo | Action::Commit | Action::Release | Action::Renew => {
            None
        }
    }
}

fn charge_fields(charge: &Charge<'_>) -> Value {
    let quota = charge.quota();
    json!({
        "key": charge.key(),
        "policy": charge.policy(),
        "algorithm": quota.algorithm().as_str(),
        "limit": quota.limit(),
        "window_us": micros(quota.window()),
        "burst": quota.burst(),
        "encoding": quota.encoding().as_str(),
        "count_denied": quota.count_denied(),
        "block_for_us": quota.block_for().iter().copied().map(micros).collect::<Vec<_>>(),
        "cost": charge.cost(),
        "charged_at_us": charge.charged_at().as_micros(),
    })
}

fn decision_fields(decision: &Decision) -> Value {
    json!({
        "allowed": decision.allowed,
        "limit": decision.limit,
        "remaining": decision.remaining,
        "retry_after_us": micros(decision.retry_after),
        "reset_after_us": micros(decision.reset_after),
        "delay_us": micros(decision.delay),
    })
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("a quota's times are at most years")
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut output = BufWriter::new(stdout().lock());
    for seed in (0..).step_by(2).take(SEEDS) {
        let steps = Steps::default();
        let new_limiter = async |clock: ManualClock| {
            let store = MemoryStore::builder().clock(clock).build();
            Limiter::new(Recorder { store, steps: Arc::clone(&steps) })
        };
        conformance([seed], new_limiter).await;
        let mut steps = steps.lock().unwrap_or_else(PoisonError::into_inner);
        // Later steps would depend on the action that a limiter does not have.
        for mut step in steps.drain(..).map_while(|step| step) {
            step["sequence"] = json!(seed);
            writeln!(output, "{step}")?;
        }
    }
    output.flush()?;
    Ok(())
}
