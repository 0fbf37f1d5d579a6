//! [`Requests`]: what one call asks, as KEYS and ARGV of decide.lua (which has the contract), and what its reply tells.
//!
//! Equal acquires of one charge are one item that is asked several times.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

use hashbrown::HashTable;
use redis::{Cmd, Value};

use super::fault::error_of_request;
use super::script::{Pieces, Script};
use super::server_clock::ServerTimes;
use crate::algorithm::{Algorithm, CounterSnapshot, Encoding, Grants, RawDecision};
use crate::charge::Charge;
use crate::quota::Quota;
use crate::store::{Action, StoreError};

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
    /// As acquire, when a charge on another node has denied: spends nothing, and counts what counts
    /// denials.
    Forgo,
}

/// Written down, so that they outlive their callers.
#[derive(Default)]
pub(super) struct Requests {
    /// The Redis keys, one after the other.
    text: String,
    charges: Vec<Written>,
    terms: Vec<Terms>,
    items: Vec<Item>,
    /// How many of the charges count in a sorted set.
    sorted_sets: usize,
    /// The items that equal requests can join, by their key.
    equal: HashTable<usize>,
    hasher: RandomState,
}

pub(super) struct Item {
    pub(super) slot: u16,
    form: Form,
    charges: Range<usize>,
}

/// The forms of a request in decide.lua.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// An acquire of one charge, perhaps many times.
    Acquire,
    Together(Verb),
}

struct Written {
    /// Where its key stands in the text.
    key: Range<usize>,
    /// Which of the terms are its own.
    terms: usize,
    cost: u64,
    /// Of a refund: when its charge was made, by the store's own clock; 0 if unknown.
    charged_at: u64,
}

/// A quota as the script gets it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Terms {
    algorithm: Algorithm,
    name: &'static str,
    limit: u64,
    window: u64,
    option: u64,
    pieces: Pieces,
}

/// What a call brings.
pub(super) struct Answer {
    /// The server's time in microseconds.
    pub(super) now: i64,
    /// One an item that was asked, in their order; `None` if the call came too late, and nothing
    /// was done.
    pub(super) told: Option<Vec<Told>>,
}

/// What an item's callers are told.
#[derive(Debug, Clone)]
pub(super) enum Told {
    Grants(Grants),
    /// One a charge.
    Verdicts(Vec<RawDecision>),
    /// What went wrong with this one alone, of several.
    Error(String),
}

/// What a caller is told: one verdict a charge.
pub(super) enum Verdicts {
    One(RawDecision),
    Several(Vec<RawDecision>),
}

/// What the script calls a log in a sorted set.
const SORTED_SET: &str = "sliding-log";
/// The largest cost that the script's doubles hold exactly. No count holds as much.
const MAX_COST: u64 = 1 << 52;
/// How far back equal terms are looked for: most calls have one or two, and to write some twice
/// costs little.
const TERMS_IN_SIGHT: usize = 8;

impl Verb {
    fn name(self) -> &'static str {
        match self {
            Self::Do(Action::Acquire) => "acquire",
            Self::Do(Action::Peek) => "peek",
            Self::Do(Action::Refund) => "refund",
            Self::Do(Action::Reset) => "reset",
            Self::Do(Action::ChargeUpTo) => "take",
            Self::Do(Action::Report) => "report",
            Self::Forgo => "forgo",
        }
    }
}

impl Told {
    /// What the caller of this request is told, before which so many equal ones came.
    pub(super) fn verdicts(
        &self,
        request: &Request<'_>,
        earlier: u64,
    ) -> Result<Verdicts, StoreError> {
        match (self, request.charges) {
            (Self::Grants(grants), [charge]) => {
                Ok(Verdicts::One(grants.decision(charge.quota(), charge.cost(), earlier)))
            }
            (Self::Grants(_), _) => Err(unexpected("one answer to several charges")),
            // The script does not know what a forgotten key has left.
            (Self::Verdicts(_), charges) if request.verb == Verb::Do(Action::Reset) => {
                Ok(Verdicts::Several(
                    charges.iter().map(|charge| RawDecision::untouched(charge.quota())).collect(),
                ))
            }
            (Self::Verdicts(verdicts), _) => Ok(Verdicts::Several(verdicts.clone())),
            (Self::Error(reason), _) => Err(error_of_request(reason)),
        }
    }
}

impl Verdicts {
    pub(super) fn into_vec(self) -> Vec<RawDecision> {
        match self {
            Self::One(verdict) => vec![verdict],
            Self::Several(verdicts) => verdicts,
        }
    }

    /// That of a single charge.
    pub(super) fn first(&self, charge: &Charge<'_>) -> RawDecision {
        match self {
            Self::One(verdict) => *verdict,
            Self::Several(verdicts) => {
                verdicts.first().copied().unwrap_or(RawDecision::untouched(charge.quota()))
            }
        }
    }
}

impl Form {
    fn of(request: &Request<'_>) -> Self {
        match (request.verb, request.charges) {
            // A denial that counts makes the next one another.
            (Verb::Do(Action::Acquire), [charge])
                if charge.cost() > 0 && !charge.quota().count_denied() =>
            {
                Self::Acquire
            }
            (verb, _) => Self::Together(verb),
        }
    }
}

impl Terms {
    fn of(quota: &Quota) -> Self {
        let algorithm = quota.algorithm();
        let (name, option) = match (algorithm, quota.encoding()) {
            (Algorithm::SlidingLog, Encoding::SortedSet) => {
                (SORTED_SET, u64::from(quota.count_denied()))
            }
            (Algorithm::SlidingLog, Encoding::Packed) => {
                ("sliding-log-packed", u64::from(quota.count_denied()))
            }
            (Algorithm::TokenBucket | Algorithm::LeakyBucket, _) => {
                (algorithm.as_str(), quota.burst())
            }
            (Algorithm::SlidingCounter | Algorithm::FixedWindow, _) => (algorithm.as_str(), 0),
        };
        let (limit, window) = (quota.limit(), quota.window_micros());
        Self { algorithm, name, limit, window, option, pieces: Pieces::of(quota) }
    }
}

impl Requests {
    /// Just this one.
    pub(super) fn one(
        request: &Request<'_>,
        slot: u16,
        write_key: impl Fn(&mut String, &Charge<'_>),
    ) -> Self {
        let mut requests = Self::default();
        requests.add(request, slot, write_key);
        requests
    }

    /// Adds a request, or finds an equal one: the number of its item.
    pub(super) fn add(
        &mut self,
        request: &Request<'_>,
        slot: u16,
        write_key: impl Fn(&mut String, &Charge<'_>),
    ) -> usize {
        let (form, first, keys) = (Form::of(request), self.charges.len(), self.text.len());
        for charge in request.charges {
            let start = self.text.len();
            write_key(&mut self.text, charge);
            let terms = self.terms_of(charge.quota());
            let cost = charge.cost().min(MAX_COST);
            let charged_at = charge.charged_at().as_micros();
            self.charges.push(Written { key: start..self.text.len(), terms, cost, charged_at });
        }
        let number = self.items.len();
        if form == Form::Acquire {
            let Self { text, charges, items, equal, hasher, terms, .. } = self;
            let key = |at: usize| &text[charges[at].key.clone()];
            let same = |at: &usize| {
                let at = items[*at].charges.start;
                // By value: terms out of sight are written again under another number.
                let terms_and_cost = |at: usize| (terms[charges[at].terms], charges[at].cost);
                terms_and_cost(at) == terms_and_cost(first) && key(at) == key(first)
            };
            let hash = hasher.hash_one(key(first));
            if let Some(found) = equal.find(hash, same).copied() {
                text.truncate(keys);
                charges.truncate(first);
                return found;
            }
            equal.insert_unique(hash, number, |at| {
                let at = if *at == number { first } else { items[*at].charges.start };
                hasher.hash_one(key(at))
            });
        }
        let is_sorted_set = |charge: &Written| self.terms[charge.terms].name == SORTED_SET;
        self.sorted_sets +=
            self.charges[first..].iter().filter(|charge| is_sorted_set(charge)).count();
        self.items.push(Item { slot, form, charges: first..self.charges.len() });
        number
    }

    fn terms_of(&mut self, quota: &Quota) -> usize {
        let terms = Terms::of(quota);
        let in_sight = self.terms.iter().enumerate().rev().take(TERMS_IN_SIGHT);
        let known = in_sight.into_iter().find(|(_, known)| **known == terms).map(|(at, _)| at);
        known.unwrap_or_else(|| {
            self.terms.push(terms);
            self.terms.len() - 1
        })
    }

    pub(super) fn items(&self) -> &[Item] {
        &self.items
    }

    /// How many counts are looked at.
    pub(super) fn charges(&self) -> usize {
        self.charges.len()
    }

    /// How long Redis will need for them, in the time of a small count: a sorted set that rested
    /// takes about three times as long.
    pub(super) fn weight(&self) -> usize {
        self.charges.len() + 2 * self.sorted_sets
    }

    fn charges_of(&self, item: usize) -> &[Written] {
        &self.charges[self.items[item].charges.clone()]
    }

    /// The script that decides these items.
    pub(super) fn script(&self, items: &[usize]) -> &'static Script {
        let charges = items.iter().flat_map(|item| self.charges_of(*item));
        Script::with(
            charges.fold(Pieces::default(), |pieces, charge| {
                pieces.and(self.terms[charge.terms].pieces)
            }),
        )
    }

    /// The call that asks these items, in this order; each `times` over.
    pub(super) fn command(
        &self,
        items: &[usize],
        times: impl Fn(usize) -> u64,
        times_of_server: &ServerTimes,
    ) -> Cmd {
        let charges = || items.iter().flat_map(|item| self.charges_of(*item));
        let mut command = self.script(items).evalsha(charges().count());
        for charge in charges() {
            command.arg(&self.text[charge.key.clone()]);
        }
        or_empty(&mut command, times_of_server.driven);
        or_empty(&mut command, times_of_server.deadline);

        // The terms that these items name, by their numbers in this call.
        let mut numbers = vec![0; self.terms.len()];
        let mut named = Vec::new();
        for charge in charges() {
            if numbers[charge.terms] == 0 {
                named.push(self.terms[charge.terms]);
                numbers[charge.terms] = named.len();
            }
        }
        command.arg(named.len());
        for terms in named {
            command.arg(terms.name).arg(terms.limit).arg(terms.window).arg(terms.option);
        }

        let single = |item: usize| {
            (self.items[item].form == Form::Acquire).then(|| &self.charges_of(item)[0])
        };
        let mut rest = items;
        while let [item, others @ ..] = rest {
            rest = others;
            match single(*item) {
                Some(charge) if times(*item) > 1 => {
                    command
                        .arg("acquire-times")
                        .arg(numbers[charge.terms])
                        .arg(charge.cost)
                        .arg(times(*item));
                }
                Some(charge) => {
                    let goes_on = |other: &usize| {
                        let other = single(*other).filter(|_| times(*other) == 1);
                        other.is_some_and(|other| {
                            (other.terms, other.cost) == (charge.terms, charge.cost)
                        })
                    };
                    let more = others.iter().take_while(|other| goes_on(other)).count();
                    rest = &others[more..];
                    command
                        .arg("acquire-each")
                        .arg(numbers[charge.terms])
                        .arg(charge.cost)
                        .arg(1 + more);
                }
                None => {
                    let Form::Together(verb) = self.items[*item].form else { continue };
                    command.arg(verb.name()).arg(self.charges_of(*item).len());
                    for charge in self.charges_of(*item) {
                        command.arg(numbers[charge.terms]).arg(charge.cost);
                        if verb == Verb::Do(Action::Refund) {
                            command.arg(times_of_server.of_charge(charge.charged_at));
                        }
                    }
                }
            }
        }
        command
    }

    /// The reply to such a call, decoded once.
    pub(super) fn read(
        &self,
        items: &[usize],
        times: impl Fn(usize) -> u64,
        reply: Value,
    ) -> Result<Answer, StoreError> {
        let Value::Array(values) = reply else { return Err(unexpected("not an array")) };
        let mut values = values.into_iter();
        let now = integer(values.next().as_ref())?.cast_signed();
        let in_time = integer(values.next().as_ref())? == 1;
        if !in_time {
            return Ok(Answer { now, told: None });
        }
        let told = items
            .iter()
            .map(|item| self.told(*item, times(*item), &mut values))
            .collect::<Result<_, _>>()?;
        if values.next().is_some() {
            return Err(unexpected("a wrong length"));
        }
        Ok(Answer { now, told: Some(told) })
    }

    fn told(
        &self,
        item: usize,
        times: u64,
        values: &mut impl Iterator<Item = Value>,
    ) -> Result<Told, StoreError> {
        let charges = self.charges_of(item);
        let first = match values.next() {
            Some(Value::BulkString(text)) => {
                return Ok(Told::Error(String::from_utf8_lossy(&text).into_owned()));
            }
            first => integer(first.as_ref())?,
        };
        let mut next = || integer(values.next().as_ref());
        if self.items[item].form == Form::Acquire {
            let (granted, remaining) = (first, next()?);
            let snapshot =
                CounterSnapshot::read(self.terms[charges[0].terms].algorithm, &mut next)?;
            let (retry_after, reset_after) =
                if granted < times { (next()?, next()?) } else { (0, 0) };
            return Ok(Told::Grants(Grants {
                granted,
                remaining,
                snapshot,
                retry_after,
                reset_after,
            }));
        }
        let mut allowed = Some(first);
        let verdicts = charges.iter().map(|_| {
            let allowed = allowed.take().map_or_else(&mut next, Ok)? == 1;
            let [remaining, retry_after, reset_after, delay] = [next()?, next()?, next()?, next()?];
            Ok(RawDecision { allowed, remaining, retry_after, reset_after, delay })
        });
        Ok(Told::Verdicts(verdicts.collect::<Result<_, _>>()?))
    }
}

fn or_empty(command: &mut Cmd, number: Option<impl redis::ToRedisArgs>) {
    match number {
        Some(number) => command.arg(number),
        None => command.arg(""),
    };
}

fn integer(value: Option<&Value>) -> Result<u64, StoreError> {
    match value {
        Some(Value::Int(integer)) => {
            u64::try_from(*integer).map_err(|_| unexpected("a negative number"))
        }
        Some(_) => Err(unexpected("not integers")),
        None => Err(unexpected("a wrong length")),
    }
}

fn unexpected(what: &str) -> StoreError {
    StoreError::Refused(format!("unexpected reply of the script: {what}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn add(requests: &mut Requests, verb: Verb, charges: &[Charge<'_>]) -> usize {
        requests.add(&Request { verb, charges }, 7, |text, charge| text.push_str(charge.key()))
    }

    fn arguments(command: &Cmd) -> Vec<String> {
        let text = |argument| match argument {
            redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            _ => panic!("a plain argument"),
        };
        command.args_iter().skip(2).map(text).collect()
    }

    #[test]
    fn equal_acquires_are_one_item_and_neighbours_share_their_words() {
        const ACQUIRE: Verb = Verb::Do(Action::Acquire);
        let minute = Duration::from_secs(60);
        let ten = Quota::fixed_window(10, minute).expect("valid");
        let five = Quota::token_bucket(5, minute).expect("valid");
        let strict = Quota::sliding_log(3, minute)
            .and_then(|quota| quota.with_count_denied(true))
            .expect("valid");
        let (a, b, c) = (Charge::new("a", &ten), Charge::new("b", &ten), Charge::new("c", &five));
        let mut requests = Requests::default();
        assert_eq!(add(&mut requests, ACQUIRE, &[a]), 0);
        assert_eq!(add(&mut requests, ACQUIRE, &[b]), 1);
        assert_eq!(add(&mut requests, ACQUIRE, &[c]), 2);
        assert_eq!(add(&mut requests, ACQUIRE, &[a.with_cost(2)]), 3, "another cost");
        assert_eq!(add(&mut requests, ACQUIRE, &[c]), 2, "equal");
        assert_eq!(add(&mut requests, ACQUIRE, &[a, c]), 4, "together");
        assert_eq!(add(&mut requests, ACQUIRE, &[a, c]), 5, "together, and not to be merged");
        assert_eq!(add(&mut requests, Verb::Do(Action::Peek), &[a]), 6, "another action");
        let strict = Charge::new("d", &strict);
        assert_eq!(add(&mut requests, ACQUIRE, &[strict]), 7);
        assert_eq!(
            add(&mut requests, ACQUIRE, &[strict]),
            8,
            "a denial that counts makes the next one another"
        );
        assert_eq!(requests.charges(), 11);

        // The fourth has gone away.
        let times = ServerTimes { deadline: Some(99), ..ServerTimes::default() };
        let command =
            requests.command(&[0, 1, 2, 4, 6, 7], |item| if item == 2 { 2 } else { 1 }, &times);
        let expected = "7 a b c a c a d  99 \
                        3 fixed-window 10 60000000 0 token-bucket 5 60000000 5 sliding-log 3 60000000 1 \
                        acquire-each 1 1 2 acquire-times 2 1 2 acquire 2 1 1 2 1 peek 1 1 1 acquire 1 3 1";
        assert_eq!(arguments(&command).join(" "), expected);
    }

    #[test]
    fn equal_acquires_join_whatever_came_between_them() {
        let quotas: Vec<Quota> = (1..=20)
            .map(|limit| Quota::fixed_window(limit, Duration::from_secs(60)).expect("valid"))
            .collect();
        let mut requests = Requests::default();
        let numbers: Vec<usize> = [quotas.as_slice(), &quotas[..1]]
            .concat()
            .iter()
            .map(|quota| add(&mut requests, Verb::Do(Action::Acquire), &[Charge::new("a", quota)]))
            .collect();
        assert_eq!(numbers.last(), numbers.first());
    }

    #[test]
    fn a_reply_of_another_shape_is_an_error() {
        let quota = Quota::fixed_window(10, Duration::from_secs(60)).expect("valid");
        let mut requests = Requests::default();
        add(&mut requests, Verb::Do(Action::Acquire), &[Charge::new("a", &quota)]);
        let read = |values: &[i64]| {
            let reply = Value::Array(values.iter().map(|value| Value::Int(*value)).collect());
            requests.read(&[0], |_| 1, reply)
        };
        let granted = read(&[5, 1, 1, 10, 60]).expect("right").told.expect("in time");
        assert!(
            matches!(&granted[..], [Told::Grants(grants)] if grants.granted == 1 && grants.remaining == 10)
        );
        assert!(read(&[5, 0]).expect("right").told.is_none(), "too late");
        assert!(read(&[5, 1, 0, 10, 60, 7, 8]).expect("right").told.is_some(), "denied");
        for wrong in [
            &[][..],
            &[5],
            &[5, 1],
            &[5, 1, 1, 10],
            &[5, 1, 0, 10, 60],
            &[5, 1, 1, 10, 60, 1],
            &[5, 1, -1, 10, 60],
        ] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
        assert!(requests.read(&[0], |_| 1, Value::Nil).is_err());
    }
}
