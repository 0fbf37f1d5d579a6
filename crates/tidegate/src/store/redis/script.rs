//! The script of a call: assembled from the algorithms that its charges need, its arguments, and its reply.

use std::sync::{Arc, Mutex, PoisonError};

use redis::{Cmd, Value};

use super::super::{Action, StoreError};
use crate::algorithm::{Algorithm, Encoding, Verdict};
use crate::charge::Charge;
use crate::quota::Quota;

/// An action on some charges, all or nothing; independent of the other requests in its call.
pub(super) struct Request<'a> {
    pub(super) action: Action,
    pub(super) charges: &'a [Charge<'a>],
}

/// A Lua script with its name by hash.
pub(super) struct Script {
    text: String,
    sha: String,
}

const PRELUDE: &str = include_str!("prelude.lua");
const DECIDE: &str = include_str!("decide.lua");
const PIECES: [&str; 5] = [
    include_str!("../../algorithm/sliding_log.lua"),
    include_str!("../../algorithm/sliding_log_packed.lua"),
    include_str!("../../algorithm/sliding_counter.lua"),
    include_str!("../../algorithm/fixed_window.lua"),
    include_str!("../../algorithm/bucket.lua"),
];
const INTEGERS_A_CHARGE: usize = 5;

/// Which of the pieces a quota needs.
fn piece(quota: &Quota) -> usize {
    match (quota.algorithm(), quota.encoding()) {
        (Algorithm::SlidingLog, Encoding::SortedSet) => 0,
        (Algorithm::SlidingLog, Encoding::Packed) => 1,
        (Algorithm::SlidingCounter, _) => 2,
        (Algorithm::FixedWindow, _) => 3,
        (Algorithm::TokenBucket | Algorithm::LeakyBucket, _) => 4,
    }
}

impl Script {
    /// The script with just the algorithms that are needed: Lua makes each function anew at every call, so those that are
    /// left out save Redis time.
    pub(super) fn for_requests(requests: &[Request<'_>]) -> Arc<Self> {
        static ASSEMBLED: Mutex<[Option<Arc<Script>>; 1 << PIECES.len()]> =
            Mutex::new([const { None }; 1 << PIECES.len()]);
        let charges = requests.iter().flat_map(|request| request.charges);
        let needed = charges.fold(0, |needed, charge| needed | 1 << piece(charge.quota()));
        let mut assembled = ASSEMBLED.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(assembled[needed].get_or_insert_with(|| Arc::new(Self::assemble(needed))))
    }

    fn assemble(needed: usize) -> Self {
        let chosen = PIECES.iter().enumerate().filter(|(index, _)| needed & (1 << index) != 0).map(|(_, piece)| piece);
        let text = [&PRELUDE].into_iter().chain(chosen).chain([&DECIDE]).copied().collect::<Vec<_>>().join("\n");
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { text, sha }
    }

    pub(super) fn evalsha(&self, requests: &[Request<'_>], key: impl Fn(&Charge<'_>) -> String, time: &str) -> Cmd {
        arguments(redis::cmd("EVALSHA").arg(&self.sha), requests, key, time)
    }

    /// Sends the text along, which also loads it.
    pub(super) fn eval(&self, requests: &[Request<'_>], key: impl Fn(&Charge<'_>) -> String, time: &str) -> Cmd {
        arguments(redis::cmd("EVAL").arg(&self.text), requests, key, time)
    }
}

/// KEYS and ARGV, as decide.lua describes them.
fn arguments(command: &mut Cmd, requests: &[Request<'_>], key: impl Fn(&Charge<'_>) -> String, time: &str) -> Cmd {
    let charges = || requests.iter().flat_map(|request| request.charges);
    command.arg(charges().count());
    for charge in charges() {
        command.arg(key(charge));
    }
    command.arg(time);
    for request in requests {
        command.arg(match request.action {
            Action::Acquire => "acquire",
            Action::Peek => "peek",
            Action::Refund => "refund",
            Action::Reset => "reset",
            Action::Take => "take",
        });
        command.arg(request.charges.len());
        for charge in request.charges {
            let quota = charge.quota();
            let (name, option) = match (quota.algorithm(), quota.encoding()) {
                (Algorithm::SlidingLog, Encoding::SortedSet) => ("sliding-log", u64::from(quota.count_denied())),
                (Algorithm::SlidingLog, Encoding::Packed) => ("sliding-log-packed", u64::from(quota.count_denied())),
                (algorithm @ (Algorithm::TokenBucket | Algorithm::LeakyBucket), _) => {
                    (algorithm.as_str(), quota.burst())
                }
                (algorithm, _) => (algorithm.as_str(), 0),
            };
            command
                .arg(name)
                .arg(quota.limit())
                .arg(quota.window_micros())
                .arg(option)
                .arg(charge.units().min(Quota::MAX_LIMIT));
        }
    }
    std::mem::replace(command, Cmd::new())
}

/// The reply, decoded once: a verdict for each charge, in their order.
pub(super) fn verdicts(requests: &[Request<'_>], reply: Value) -> Result<Vec<Verdict>, StoreError> {
    let charges = requests.iter().flat_map(|request| request.charges.iter().map(|charge| (request.action, charge)));
    let unexpected = |what: &str| StoreError::Refused(format!("unexpected reply of the script: {what}"));
    let Value::Array(values) = reply else { return Err(unexpected("not an array")) };
    let mut integers = Vec::with_capacity(values.len());
    for value in values {
        let Value::Int(integer) = value else { return Err(unexpected("not integers")) };
        integers.push(u64::try_from(integer).map_err(|_| unexpected("a negative number"))?);
    }
    let (groups, []) = integers.as_chunks::<INTEGERS_A_CHARGE>() else { return Err(unexpected("a wrong length")) };
    if groups.len() != charges.clone().count() {
        return Err(unexpected("a wrong length"));
    }
    let decode = |((action, charge), group): ((Action, &Charge<'_>), &[u64; INTEGERS_A_CHARGE])| {
        let &[allowed, remaining, retry_after, reset_after, delay] = group;
        match action {
            Action::Reset => Verdict::untouched(charge.quota()),
            _ => Verdict { allowed: allowed == 1, remaining, retry_after, reset_after, delay },
        }
    };
    Ok(charges.zip(groups).map(decode).collect())
}
