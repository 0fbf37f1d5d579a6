//! [`EncodedRequests`]: the requests of one call, encoded as KEYS and ARGV of decide.lua; and
//! [`CallReply`]: its decoded reply. decide.lua documents the protocol.
//!
//! Equal acquires of one charge share one item, which is sent once with their number.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

use hashbrown::HashTable;
use redis::{Cmd, Value};

use super::error::item_error;
use super::script::{Script, ScriptParts};
use super::server_clock::ServerTimes;
use crate::algorithm::{Algorithm, CounterSnapshot, Encoding, Grants, RawDecision};
use crate::charge::Charge;
use crate::quota::Quota;
use crate::store::{Action, StoreError};

/// Operation on one or more charges, independent of the other requests in its call.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) operation: Operation,
    pub(super) charges: &'a [Charge<'a>],
}

/// Operation of decide.lua.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Apply(Action),
    /// An acquire that a charge on another node has already denied: it spends nothing, but quotas
    /// with `count_denied` record it.
    CountDenied,
}

/// Encoded requests of one call. It borrows nothing, so that it can outlive its callers.
#[derive(Default)]
pub(super) struct EncodedRequests {
    /// The Redis keys, concatenated.
    keys: String,
    charges: Vec<EncodedCharge>,
    quotas: Vec<EncodedQuota>,
    items: Vec<Item>,
    /// Number of charges whose count is a sorted set.
    sorted_sets: usize,
    /// Items that equal requests can share, by their key.
    shareable: HashTable<usize>,
    hasher: RandomState,
}

/// One or more equal requests.
pub(super) struct Item {
    pub(super) slot: u16,
    kind: RequestKind,
    charges: Range<usize>,
}

/// Form of a request in ARGV.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RequestKind {
    /// Acquire of one charge, which equal requests can share.
    Acquire,
    /// Any other operation, on one or more charges.
    Group(Operation),
}

struct EncodedCharge {
    /// Range of its key in [`EncodedRequests::keys`].
    key: Range<usize>,
    /// Index into [`EncodedRequests::quotas`].
    quota: usize,
    cost: u64,
    /// Time of the charge to refund, by the store's own clock; 0 if unknown.
    charged_at: u64,
}

/// Quota in the form that the script expects.
#[derive(Clone, Copy, PartialEq, Eq)]
struct EncodedQuota {
    algorithm: Algorithm,
    name: &'static str,
    limit: u64,
    window: u64,
    option: u64,
    parts: ScriptParts,
}

/// Decoded reply of one call.
pub(super) struct CallReply {
    /// The server's time in microseconds.
    pub(super) now: i64,
    /// Reply per item that was sent; `None` if the script ran after its deadline and did nothing.
    pub(super) items: Option<Vec<ItemReply>>,
}

/// Reply to one item.
#[derive(Debug, Clone)]
pub(super) enum ItemReply {
    Grants(Grants),
    /// Decision per charge.
    Decisions(Vec<RawDecision>),
    /// Error of this item; other items of the call are not affected.
    Error(String),
}

/// Decision per charge of one request.
pub(super) enum RequestDecisions {
    One(RawDecision),
    Many(Vec<RawDecision>),
}

/// Algorithm name, in the script, of a sliding log in a sorted set.
const SORTED_SET: &str = "sliding-log";
/// The largest cost that the script's doubles represent exactly. It exceeds every limit.
const MAX_COST: u64 = 1 << 52;
/// Number of quotas that are searched for an equal one. Most calls have one or two quotas, and a
/// duplicate costs little.
const MAX_QUOTA_SCAN: usize = 8;

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Apply(Action::Acquire) => "acquire",
            Self::Apply(Action::Peek) => "peek",
            Self::Apply(Action::Refund) => "refund",
            Self::Apply(Action::Reset) => "reset",
            Self::Apply(Action::ChargeUpTo) => "charge-up-to",
            Self::Apply(Action::Report) => "report",
            Self::CountDenied => "count-denied",
        }
    }
}

impl ItemReply {
    /// Returns the decisions for one request, given the number of equal requests before it.
    pub(super) fn decisions(
        &self,
        request: &Request<'_>,
        preceding: u64,
    ) -> Result<RequestDecisions, StoreError> {
        match (self, request.charges) {
            (Self::Grants(grants), [charge]) => {
                Ok(RequestDecisions::One(grants.decision(charge.quota(), charge.cost(), preceding)))
            }
            (Self::Grants(_), _) => Err(unexpected("one answer to several charges")),
            // The script does not compute the state of a key that it has deleted.
            (Self::Decisions(_), charges)
                if request.operation == Operation::Apply(Action::Reset) =>
            {
                let untouched = |charge: &Charge<'_>| RawDecision::untouched(charge.quota());
                Ok(RequestDecisions::Many(charges.iter().map(untouched).collect()))
            }
            (Self::Decisions(decisions), _) => Ok(RequestDecisions::Many(decisions.clone())),
            (Self::Error(reason), _) => Err(item_error(reason)),
        }
    }
}

impl RequestDecisions {
    pub(super) fn into_vec(self) -> Vec<RawDecision> {
        match self {
            Self::One(decision) => vec![decision],
            Self::Many(decisions) => decisions,
        }
    }

    /// Returns the decision of a request with a single charge.
    pub(super) fn first(&self, charge: &Charge<'_>) -> RawDecision {
        match self {
            Self::One(decision) => *decision,
            Self::Many(decisions) => {
                decisions.first().copied().unwrap_or(RawDecision::untouched(charge.quota()))
            }
        }
    }
}

impl RequestKind {
    fn of(request: &Request<'_>) -> Self {
        match (request.operation, request.charges) {
            // Requests with `count_denied` are not equal: each denial changes the state for the
            // next.
            (Operation::Apply(Action::Acquire), [charge])
                if charge.cost() > 0 && !charge.quota().count_denied() =>
            {
                Self::Acquire
            }
            (operation, _) => Self::Group(operation),
        }
    }
}

impl EncodedQuota {
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
        Self { algorithm, name, limit, window, option, parts: ScriptParts::of(quota) }
    }
}

impl EncodedRequests {
    /// Encodes a single request.
    pub(super) fn one(
        request: &Request<'_>,
        slot: u16,
        write_key: impl Fn(&mut String, &Charge<'_>),
    ) -> Self {
        let mut requests = Self::default();
        requests.add(request, slot, write_key);
        requests
    }

    /// Adds a request, or finds an item of equal requests. Returns the index of the item.
    pub(super) fn add(
        &mut self,
        request: &Request<'_>,
        slot: u16,
        write_key: impl Fn(&mut String, &Charge<'_>),
    ) -> usize {
        let kind = RequestKind::of(request);
        let first_charge = self.charges.len();
        let keys_start = self.keys.len();
        for charge in request.charges {
            let start = self.keys.len();
            write_key(&mut self.keys, charge);
            let quota = self.quota_index(charge.quota());
            let cost = charge.cost().min(MAX_COST);
            let charged_at = charge.charged_at().as_micros();
            let key = start..self.keys.len();
            self.charges.push(EncodedCharge { key, quota, cost, charged_at });
        }
        let new_item = self.items.len();
        if kind == RequestKind::Acquire {
            let key = |charge: usize| &self.keys[self.charges[charge].key.clone()];
            let is_equal = |item: &usize| {
                let charge = self.items[*item].charges.start;
                self.has_equal_quota_and_cost(charge, first_charge)
                    && key(charge) == key(first_charge)
            };
            let hash = self.hasher.hash_one(key(first_charge));
            if let Some(equal_item) = self.shareable.find(hash, is_equal).copied() {
                self.keys.truncate(keys_start);
                self.charges.truncate(first_charge);
                return equal_item;
            }
            let Self { keys, charges, items, shareable, hasher, .. } = self;
            shareable.insert_unique(hash, new_item, |item| {
                let charge =
                    if *item == new_item { first_charge } else { items[*item].charges.start };
                hasher.hash_one(&keys[charges[charge].key.clone()])
            });
        }
        let is_sorted_set = |charge: &EncodedCharge| self.quotas[charge.quota].name == SORTED_SET;
        self.sorted_sets +=
            self.charges[first_charge..].iter().filter(|charge| is_sorted_set(charge)).count();
        self.items.push(Item { slot, kind, charges: first_charge..self.charges.len() });
        new_item
    }

    /// Returns whether two charges have the same quota and cost. Compares quotas by value, because
    /// the same quota may have two indices; see [`MAX_QUOTA_SCAN`].
    fn has_equal_quota_and_cost(&self, left: usize, right: usize) -> bool {
        let (left, right) = (&self.charges[left], &self.charges[right]);
        self.quotas[left.quota] == self.quotas[right.quota] && left.cost == right.cost
    }

    fn quota_index(&mut self, quota: &Quota) -> usize {
        let quota = EncodedQuota::of(quota);
        let mut recent = self.quotas.iter().enumerate().rev().take(MAX_QUOTA_SCAN);
        let existing = recent.find(|(_, recent)| **recent == quota).map(|(index, _)| index);
        existing.unwrap_or_else(|| {
            self.quotas.push(quota);
            self.quotas.len() - 1
        })
    }

    pub(super) fn items(&self) -> &[Item] {
        &self.items
    }

    /// Returns the number of charges.
    pub(super) fn charges(&self) -> usize {
        self.charges.len()
    }

    /// Returns the expected time in Redis, in units of the time for a small count. A sorted set
    /// with expired members takes about three times as long.
    pub(super) fn weight(&self) -> usize {
        self.charges.len() + 2 * self.sorted_sets
    }

    fn charges_of(&self, item: usize) -> &[EncodedCharge] {
        &self.charges[self.items[item].charges.clone()]
    }

    /// Returns the script that decides these items.
    pub(super) fn script(&self, items: &[usize]) -> &'static Script {
        let charges = items.iter().flat_map(|item| self.charges_of(*item));
        Script::with(charges.fold(ScriptParts::default(), |parts, charge| {
            parts.and(self.quotas[charge.quota].parts)
        }))
    }

    /// Encodes these items, each with its number of equal requests.
    pub(super) fn command(
        &self,
        items: &[usize],
        repeats: impl Fn(usize) -> u64,
        server_times: &ServerTimes,
    ) -> Cmd {
        let charges = || items.iter().flat_map(|item| self.charges_of(*item));
        let mut command = self.script(items).evalsha(charges().count());
        for charge in charges() {
            command.arg(&self.keys[charge.key.clone()]);
        }
        push_optional(&mut command, server_times.driven);
        push_optional(&mut command, server_times.deadline);

        // Quotas of these items, numbered from 1 in this call; 0 if not used.
        let mut numbers = vec![0; self.quotas.len()];
        let mut used_quotas = Vec::new();
        for charge in charges() {
            if numbers[charge.quota] == 0 {
                used_quotas.push(self.quotas[charge.quota]);
                numbers[charge.quota] = used_quotas.len();
            }
        }
        command.arg(used_quotas.len());
        for quota in used_quotas {
            command.arg(quota.name).arg(quota.limit).arg(quota.window).arg(quota.option);
        }

        let mut rest = items;
        while let [item, others @ ..] = rest {
            rest = others;
            match self.shared_charge(*item) {
                Some(charge) if repeats(*item) > 1 => {
                    command
                        .arg("acquire-times")
                        .arg(numbers[charge.quota])
                        .arg(charge.cost)
                        .arg(repeats(*item));
                }
                Some(charge) => {
                    let is_alike = |other: &usize| {
                        let other = self.shared_charge(*other).filter(|_| repeats(*other) == 1);
                        other.is_some_and(|other| {
                            (other.quota, other.cost) == (charge.quota, charge.cost)
                        })
                    };
                    let more = others.iter().take_while(|other| is_alike(other)).count();
                    rest = &others[more..];
                    command
                        .arg("acquire-each")
                        .arg(numbers[charge.quota])
                        .arg(charge.cost)
                        .arg(1 + more);
                }
                None => {
                    let RequestKind::Group(operation) = self.items[*item].kind else { continue };
                    command.arg(operation.name()).arg(self.charges_of(*item).len());
                    for charge in self.charges_of(*item) {
                        command.arg(numbers[charge.quota]).arg(charge.cost);
                        if operation == Operation::Apply(Action::Refund) {
                            command.arg(server_times.to_server_time(charge.charged_at));
                        }
                    }
                }
            }
        }
        command
    }

    /// Returns the charge of an item that equal acquires can share.
    fn shared_charge(&self, item: usize) -> Option<&EncodedCharge> {
        (self.items[item].kind == RequestKind::Acquire).then(|| &self.charges_of(item)[0])
    }

    /// Decodes the reply to [`command`](Self::command) with the same items.
    pub(super) fn read(
        &self,
        items: &[usize],
        repeats: impl Fn(usize) -> u64,
        reply: Value,
    ) -> Result<CallReply, StoreError> {
        let Value::Array(values) = reply else { return Err(unexpected("not an array")) };
        let mut values = values.into_iter();
        let now = integer(values.next().as_ref())?.cast_signed();
        let in_time = integer(values.next().as_ref())? == 1;
        if !in_time {
            return Ok(CallReply { now, items: None });
        }
        let items = items
            .iter()
            .map(|item| self.read_item(*item, repeats(*item), &mut values))
            .collect::<Result<_, _>>()?;
        if values.next().is_some() {
            return Err(unexpected("a wrong length"));
        }
        Ok(CallReply { now, items: Some(items) })
    }

    fn read_item(
        &self,
        item: usize,
        repeats: u64,
        values: &mut impl Iterator<Item = Value>,
    ) -> Result<ItemReply, StoreError> {
        let charges = self.charges_of(item);
        let first = match values.next() {
            Some(Value::BulkString(text)) => {
                return Ok(ItemReply::Error(String::from_utf8_lossy(&text).into_owned()));
            }
            first => integer(first.as_ref())?,
        };
        let mut next = || integer(values.next().as_ref());
        if self.items[item].kind == RequestKind::Acquire {
            let (granted, remaining) = (first, next()?);
            let snapshot =
                CounterSnapshot::read(self.quotas[charges[0].quota].algorithm, &mut next)?;
            let (retry_after, reset_after) =
                if granted < repeats { (next()?, next()?) } else { (0, 0) };
            return Ok(ItemReply::Grants(Grants {
                granted,
                remaining,
                snapshot,
                retry_after,
                reset_after,
            }));
        }
        let mut allowed = Some(first);
        let decisions = charges.iter().map(|_| {
            let allowed = allowed.take().map_or_else(&mut next, Ok)? == 1;
            let [remaining, retry_after, reset_after, delay] = [next()?, next()?, next()?, next()?];
            Ok(RawDecision { allowed, remaining, retry_after, reset_after, delay })
        });
        Ok(ItemReply::Decisions(decisions.collect::<Result<_, _>>()?))
    }
}

fn push_optional(command: &mut Cmd, number: Option<impl redis::ToRedisArgs>) {
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
        Some(_) => Err(unexpected("not an integer")),
        None => Err(unexpected("a wrong length")),
    }
}

fn unexpected(reason: &str) -> StoreError {
    StoreError::Refused(format!("unexpected reply of the script: {reason}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn add(requests: &mut EncodedRequests, operation: Operation, charges: &[Charge<'_>]) -> usize {
        requests.add(&Request { operation, charges }, 7, |text, charge| text.push_str(charge.key()))
    }

    fn arguments(command: &Cmd) -> Vec<String> {
        let text = |argument| match argument {
            redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            _ => panic!("not a plain argument"),
        };
        command.args_iter().skip(2).map(text).collect()
    }

    #[test]
    fn equal_acquires_share_an_item_and_adjacent_ones_share_arguments() {
        const ACQUIRE: Operation = Operation::Apply(Action::Acquire);
        let minute = Duration::from_secs(60);
        let ten = Quota::fixed_window(10, minute).expect("valid");
        let five = Quota::token_bucket(5, minute).expect("valid");
        let strict = Quota::sliding_log(3, minute)
            .and_then(|quota| quota.with_count_denied(true))
            .expect("valid");
        let (a, b, c) = (Charge::new("a", &ten), Charge::new("b", &ten), Charge::new("c", &five));
        let mut requests = EncodedRequests::default();
        assert_eq!(add(&mut requests, ACQUIRE, &[a]), 0);
        assert_eq!(add(&mut requests, ACQUIRE, &[b]), 1);
        assert_eq!(add(&mut requests, ACQUIRE, &[c]), 2);
        assert_eq!(add(&mut requests, ACQUIRE, &[a.with_cost(2)]), 3, "another cost");
        assert_eq!(add(&mut requests, ACQUIRE, &[c]), 2, "equal");
        assert_eq!(add(&mut requests, ACQUIRE, &[a, c]), 4, "a group");
        assert_eq!(add(&mut requests, ACQUIRE, &[a, c]), 5, "groups do not share an item");
        assert_eq!(add(&mut requests, Operation::Apply(Action::Peek), &[a]), 6, "a peek");
        let strict = Charge::new("d", &strict);
        assert_eq!(add(&mut requests, ACQUIRE, &[strict]), 7);
        assert_eq!(add(&mut requests, ACQUIRE, &[strict]), 8, "its denials are counted");
        assert_eq!(requests.charges(), 11);

        // The waiters of items 3, 5 and 8 were dropped.
        let times = ServerTimes { deadline: Some(99), ..ServerTimes::default() };
        let repeats = |item| if item == 2 { 2 } else { 1 };
        let command = requests.command(&[0, 1, 2, 4, 6, 7], repeats, &times);
        let expected = "7 a b c a c a d  99 3 \
                        fixed-window 10 60000000 0 token-bucket 5 60000000 5 \
                        sliding-log 3 60000000 1 \
                        acquire-each 1 1 2 acquire-times 2 1 2 acquire 2 1 1 2 1 \
                        peek 1 1 1 acquire 1 3 1";
        assert_eq!(arguments(&command).join(" "), expected);
    }

    #[test]
    fn equal_acquires_share_an_item_across_many_other_quotas() {
        let quotas: Vec<Quota> = (1..=20)
            .map(|limit| Quota::fixed_window(limit, Duration::from_secs(60)).expect("valid"))
            .collect();
        let mut requests = EncodedRequests::default();
        let numbers: Vec<usize> = [quotas.as_slice(), &quotas[..1]]
            .concat()
            .iter()
            .map(|quota| {
                let charges = [Charge::new("a", quota)];
                add(&mut requests, Operation::Apply(Action::Acquire), &charges)
            })
            .collect();
        assert_eq!(numbers.last(), numbers.first());
    }

    #[test]
    fn a_malformed_reply_is_an_error() {
        let quota = Quota::fixed_window(10, Duration::from_secs(60)).expect("valid");
        let mut requests = EncodedRequests::default();
        add(&mut requests, Operation::Apply(Action::Acquire), &[Charge::new("a", &quota)]);
        let read = |values: &[i64]| {
            let reply = Value::Array(values.iter().map(|value| Value::Int(*value)).collect());
            requests.read(&[0], |_| 1, reply)
        };
        let granted = read(&[5, 1, 1, 10, 60]).expect("valid").items.expect("in time");
        let [ItemReply::Grants(grants)] = &granted[..] else { panic!("{granted:?}") };
        assert_eq!((grants.granted, grants.remaining), (1, 10));
        assert!(read(&[5, 0]).expect("valid").items.is_none(), "too late");
        assert!(read(&[5, 1, 0, 10, 60, 7, 8]).expect("valid").items.is_some(), "denied");
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
