//! The script of a call: assembled from the algorithms that its charges need, its arguments, and its reply.

use std::sync::OnceLock;

use redis::{Cmd, Value};

use super::super::{Action, StoreError};
use crate::algorithm::{Algorithm, Encoding, Verdict};
use crate::charge::Charge;
use crate::quota::Quota;

/// A verb on some charges, all or nothing; independent of the other requests in its call.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) verb: Verb,
    pub(super) charges: &'a [Charge<'a>],
}

/// What decide.lua is to do with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Do(Action),
    /// As acquire, when a charge on another node has denied: spends nothing, and counts what counts denials.
    Forgo,
}

/// A Lua script with its name by hash.
pub(super) struct Script {
    index: usize,
    text: String,
    sha: String,
}

/// What a call of decide.lua brings.
pub(super) struct Answer {
    /// The server's time in microseconds.
    pub(super) now: i64,
    /// One a charge, in their order; `None` if the call came too late, and nothing was done.
    pub(super) verdicts: Option<Vec<Verdict>>,
}

const PRELUDE: &str = include_str!("prelude.lua");
const DECIDE: &str = include_str!("decide.lua");
const ALIVE: &str = include_str!("alive.lua");
const NEWS: &str = include_str!("news.lua");
const PIECES: [&str; 5] = [
    include_str!("../../algorithm/sliding_log.lua"),
    include_str!("../../algorithm/sliding_log_packed.lua"),
    include_str!("../../algorithm/sliding_counter.lua"),
    include_str!("../../algorithm/fixed_window.lua"),
    include_str!("../../algorithm/bucket.lua"),
];
/// decide.lua with each choice of pieces, alive.lua and news.lua.
pub(super) const SCRIPTS: usize = (1 << PIECES.len()) + 2;

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
    pub(super) fn for_requests(requests: &[Request<'_>]) -> &'static Self {
        static ASSEMBLED: [OnceLock<Script>; 1 << PIECES.len()] = [const { OnceLock::new() }; 1 << PIECES.len()];
        let charges = requests.iter().flat_map(|request| request.charges);
        let needed = charges.fold(0, |needed, charge| needed | 1 << piece(charge.quota()));
        ASSEMBLED[needed].get_or_init(|| Self::assemble(needed))
    }

    fn assemble(needed: usize) -> Self {
        let chosen = PIECES.iter().enumerate().filter(|(index, _)| needed & (1 << index) != 0).map(|(_, piece)| piece);
        let text = [&PRELUDE].into_iter().chain(chosen).chain([&DECIDE]).copied().collect::<Vec<_>>().join("\n");
        Self::named(needed, text)
    }

    fn named(index: usize, text: String) -> Self {
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { index, text, sha }
    }

    /// Who is alive.
    pub(super) fn alive() -> &'static Self {
        static SCRIPT: OnceLock<Script> = OnceLock::new();
        SCRIPT.get_or_init(|| Self::named(SCRIPTS - 1, ALIVE.to_owned()))
    }

    /// Which counts have room again.
    pub(super) fn news() -> &'static Self {
        static SCRIPT: OnceLock<Script> = OnceLock::new();
        SCRIPT.get_or_init(|| Self::named(SCRIPTS - 2, NEWS.to_owned()))
    }

    /// Its number among [`SCRIPTS`].
    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// EVALSHA, up to where the keys begin.
    pub(super) fn evalsha(&self, keys: usize) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.sha).arg(keys);
        command
    }

    /// A call of decide.lua: KEYS and ARGV as it describes them.
    pub(super) fn decide(
        &self,
        requests: &[Request<'_>],
        key: impl Fn(&Charge<'_>) -> String,
        driven_time: Option<u64>,
        deadline: Option<i64>,
    ) -> Cmd {
        let charges = || requests.iter().flat_map(|request| request.charges);
        let mut command = self.evalsha(charges().count());
        for charge in charges() {
            command.arg(key(charge));
        }
        or_empty(&mut command, driven_time);
        or_empty(&mut command, deadline);
        arguments(&mut command, requests);
        command
    }
}

fn or_empty(command: &mut Cmd, number: Option<impl redis::ToRedisArgs>) {
    match number {
        Some(number) => command.arg(number),
        None => command.arg(""),
    };
}

fn arguments(command: &mut Cmd, requests: &[Request<'_>]) {
    for request in requests {
        command.arg(match request.verb {
            Verb::Do(Action::Acquire) => "acquire",
            Verb::Do(Action::Peek) => "peek",
            Verb::Do(Action::Refund) => "refund",
            Verb::Do(Action::Reset) => "reset",
            Verb::Do(Action::Take) => "take",
            Verb::Forgo => "forgo",
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
}

/// The reply, decoded once.
pub(super) fn answer(requests: &[Request<'_>], reply: Value) -> Result<Answer, StoreError> {
    let unexpected = |what: &str| StoreError::Refused(format!("unexpected reply of the script: {what}"));
    let Value::Array(values) = reply else { return Err(unexpected("not an array")) };
    let mut integers = values.into_iter().map(|value| match value {
        Value::Int(integer) => u64::try_from(integer).map_err(|_| unexpected("a negative number")),
        _ => Err(unexpected("not integers")),
    });
    let mut next = || integers.next().unwrap_or_else(|| Err(unexpected("a wrong length")));
    let now = next()?.cast_signed();
    let in_time = next()? == 1;
    if !in_time {
        return Ok(Answer { now, verdicts: None });
    }
    let charges = || requests.iter().flat_map(|request| request.charges.iter().map(|charge| (request.verb, charge)));
    let mut verdicts = Vec::with_capacity(charges().count());
    for (verb, charge) in charges() {
        let [allowed, remaining, retry_after, reset_after, delay] = [next()?, next()?, next()?, next()?, next()?];
        verdicts.push(match verb {
            Verb::Do(Action::Reset) => Verdict::untouched(charge.quota()),
            _ => Verdict { allowed: allowed == 1, remaining, retry_after, reset_after, delay },
        });
    }
    if integers.next().is_some() {
        return Err(unexpected("a wrong length"));
    }
    Ok(Answer { now, verdicts: Some(verdicts) })
}
