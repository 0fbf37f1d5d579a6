//! [`EncodedRequests`]: the requests of one call, encoded as KEYS and ARGV of decide.lua, which
//! documents the protocol; and [`CallReply`]: its decoded reply.
//!
//! ```text
//! add(request, slot, write_key) -> item
//! command(items, repeats, server_times, mode) -> Cmd      mode: KeyMode::{Declared, CrossSlot}
//! Script::decide(mode)                           the script of that command, for SCRIPT LOAD
//! read(items, repeats, reply) -> CallReply       same items and repeats; one reply per item
//! ```
//!
//! Equal acquires of one charge share one item, which is sent once with their number.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

use hashbrown::HashTable;
use redis::{Cmd, Value};

use super::count::{CountKind, TAGS, keys_of_all_forms};
use super::error::item_error;
use super::reply::{ReplyReader, unexpected};
use super::script::{KeyMode, Script};
use super::server_clock::ServerTimes;
use crate::algorithm::{Algorithm, CounterSnapshot, Grants, RawDecision};
use crate::charge::Charge;
use crate::decision::{Decision, Source};
use crate::quota::{Quota, window_text};
use crate::store::{Action, StoreError};

#[cfg(test)]
mod tests;

/// Operation on one or more charges, independent of the other requests in its call.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) operation: Operation,
    pub(super) charges: &'a [Charge<'a>],
    /// Charges whose count needs a key of its own, one bit each; see [`TAGS`].
    own_keys: u128,
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
    /// Whether two items may have a key in common, so that their order matters.
    keeps_order: bool,
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
    /// Peek of one charge.
    Peek,
    /// Any other operation, on one or more charges.
    Group(Operation),
}

/// Key of the items that are sent with one header: a group, or alike acquires or peeks. Unless two
/// items have a key in common, items are sorted by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum RunKey {
    /// Index of the quota, cost, and number of equal acquires; 0 for a peek.
    Alike(usize, u64, u64),
    /// Position of the item.
    Group(usize),
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
    kind: CountKind,
    limit: u64,
    window: u64,
    option: u64,
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
    One(Decision),
    Many(Vec<Decision>),
}

/// The largest cost that the script's doubles represent exactly. It exceeds every limit.
const MAX_COST: u64 = 1 << 52;
/// Deadline of a call that has none: the largest integer that a double represents exactly.
const NO_DEADLINE: i64 = 1 << 53;
/// Number of quotas that are searched for an equal one. Most calls have one or two quotas, and a
/// duplicate costs little.
const MAX_QUOTA_SCAN: usize = 8;

impl<'a> Request<'a> {
    pub(super) fn new(operation: Operation, charges: &'a [Charge<'a>]) -> Self {
        Self { operation, charges, own_keys: 0 }
    }

    /// Lets a charge use a key of its own. Returns false if it does already.
    pub(super) fn use_own_key(&mut self, charge: usize) -> bool {
        let bit = u32::try_from(charge).ok().and_then(|index| 1_u128.checked_shl(index));
        let bit = bit.unwrap_or_default();
        let is_new = self.own_keys & bit == 0 && bit != 0;
        self.own_keys |= bit;
        is_new
    }

    fn has_own_key(&self, charge: usize) -> bool {
        self.own_keys != 0 && self.own_keys >> charge & 1 == 1
    }
}

impl Operation {
    /// Returns its number in the script.
    fn number(self) -> u8 {
        match self {
            Self::Apply(Action::Acquire) => 1,
            Self::Apply(Action::Peek) => 2,
            Self::Apply(Action::Refund) => 3,
            Self::Apply(Action::Reset) => 4,
            Self::Apply(Action::ChargeUpTo) => 5,
            Self::Apply(Action::Report) => 6,
            Self::CountDenied => 7,
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
        let decision = |raw: RawDecision, charge: &Charge<'_>| {
            raw.into_decision(charge.quota(), Source::Store)
        };
        match (self, request.charges) {
            (Self::Grants(grants), [charge]) => {
                let raw = grants.decision(charge.quota(), charge.cost(), preceding);
                Ok(RequestDecisions::One(decision(raw, charge)))
            }
            (Self::Grants(_), _) => Err(unexpected("one answer to several charges")),
            // The script does not compute the state of a key that it has deleted.
            (Self::Decisions(_), charges)
                if request.operation == Operation::Apply(Action::Reset) =>
            {
                let untouched =
                    |charge: &Charge<'_>| decision(RawDecision::untouched(charge.quota()), charge);
                Ok(RequestDecisions::Many(charges.iter().map(untouched).collect()))
            }
            (Self::Decisions(raw), charges) => {
                let decided = raw.iter().zip(charges).map(|(raw, charge)| decision(*raw, charge));
                Ok(RequestDecisions::Many(decided.collect()))
            }
            (Self::Error(reason), _) => Err(item_error(reason)),
        }
    }
}

impl RequestDecisions {
    pub(super) fn into_vec(self) -> Vec<Decision> {
        match self {
            Self::One(decision) => vec![decision],
            Self::Many(decisions) => decisions,
        }
    }

    /// Returns the decision of a request with a single charge.
    pub(super) fn into_one(self) -> Result<Decision, StoreError> {
        match self {
            Self::One(decision) => Ok(decision),
            Self::Many(decisions) => {
                decisions.first().copied().ok_or_else(|| unexpected("no answer"))
            }
        }
    }
}

impl RequestKind {
    fn of(request: &Request<'_>) -> Self {
        match (request.operation, request.charges) {
            // Requests with `count_denied` are not equal: each denial changes the state for the
            // next.
            (Operation::Apply(action @ (Action::Acquire | Action::Peek)), [charge])
                if charge.cost() > 0 && !charge.quota().count_denied() =>
            {
                if action == Action::Peek { Self::Peek } else { Self::Acquire }
            }
            (operation, _) => Self::Group(operation),
        }
    }
}

impl EncodedQuota {
    fn of(quota: &Quota) -> Self {
        let algorithm = quota.algorithm();
        let option = match algorithm {
            Algorithm::SlidingLog => u64::from(quota.count_denied()),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => quota.burst(),
            Algorithm::SlidingCounter | Algorithm::FixedWindow => 0,
        };
        let (limit, window) = (quota.limit(), quota.window_micros());
        Self { algorithm, kind: CountKind::of(quota), limit, window, option }
    }
}

impl EncodedRequests {
    /// Adds a request, or finds an item of equal requests. Returns the index of the item.
    pub(super) fn add(
        &mut self,
        request: &Request<'_>,
        slot: u16,
        write_key: impl Fn(&mut String, &Charge<'_>, &str),
    ) -> usize {
        let kind = RequestKind::of(request);
        let first_charge = self.charges.len();
        let keys_start = self.keys.len();
        for (index, charge) in request.charges.iter().enumerate() {
            let start = self.keys.len();
            let has_own_key = request.has_own_key(index);
            let tag = if has_own_key { CountKind::of(charge.quota()).tag() } else { "" };
            write_key(&mut self.keys, charge, tag);
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
            let has_same_key =
                |item: &usize| key(self.items[*item].charges.start) == key(first_charge);
            self.keeps_order |= self.shareable.find(hash, has_same_key).is_some();
            let Self { keys, charges, items, shareable, hasher, .. } = self;
            shareable.insert_unique(hash, new_item, |item| {
                let charge =
                    if *item == new_item { first_charge } else { items[*item].charges.start };
                hasher.hash_one(&keys[charges[charge].key.clone()])
            });
        } else {
            self.keeps_order = true;
        }
        let is_sorted_set =
            |charge: &EncodedCharge| self.quotas[charge.quota].kind == CountKind::SlidingLog;
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

    /// Encodes these items, each with its number of equal requests.
    pub(super) fn command(
        &self,
        items: &[usize],
        repeats: impl Fn(usize) -> u64,
        server_times: &ServerTimes,
        mode: KeyMode,
    ) -> Cmd {
        let order = self.order(items, &repeats);
        let runs = || order.chunk_by(|one, other| one.0 == other.0);
        let keys: usize = order.iter().map(|(_, item)| self.key_count(*item)).sum();
        let declared = match mode {
            KeyMode::Declared => keys,
            KeyMode::CrossSlot => keys.min(1),
        };
        let mut command = Script::decide(mode).evalsha(declared);
        let push_keys = |command: &mut Cmd, range: Range<usize>| {
            let mut position = 0;
            for (_, item) in &order {
                self.for_each_key(*item, |key| {
                    if range.contains(&position) {
                        command.arg(key);
                    }
                    position += 1;
                });
            }
        };
        push_keys(&mut command, 0..declared);
        let mut header = Vec::with_capacity(80);
        for run in runs() {
            let Some((key, item)) = run.first() else { continue };
            header.clear();
            #[expect(clippy::cast_precision_loss, reason = "all numbers are below 2^53")]
            let mut push = |number: i64| header.extend((number as f64).to_le_bytes());
            push(server_times.deadline.unwrap_or(NO_DEADLINE));
            push(signed(server_times.driven.unwrap_or(0)));
            push(signed(runs().count() as u64));
            match *key {
                RunKey::Alike(quota, cost, times) => {
                    let quota = &self.quotas[quota];
                    push(i64::from(quota.kind.number()));
                    push(signed(run.len() as u64));
                    for number in [quota.limit, quota.window, quota.option, cost, times] {
                        push(signed(number));
                    }
                    if matches!(quota.kind, CountKind::SlidingLog | CountKind::SlidingCounter) {
                        header.extend(window_text(quota.window).into_bytes());
                    }
                }
                RunKey::Group(_) => self.push_group(*item, server_times, push),
            }
            command.arg(&header[..]);
        }
        if declared < keys {
            push_keys(&mut command, declared..keys);
        }
        command
    }

    /// Writes the part of a group's header that follows the call's numbers.
    fn push_group(&self, item: usize, server_times: &ServerTimes, mut push: impl FnMut(i64)) {
        let charges = self.charges_of(item);
        let RequestKind::Group(operation) = self.items[item].kind else { return };
        push(0);
        push(signed(self.key_count(item) as u64));
        push(i64::from(operation.number()));
        push(signed(charges.len() as u64));
        (0..3).for_each(|_| push(0));
        for charge in charges {
            let quota = &self.quotas[charge.quota];
            push(i64::from(quota.kind.number()));
            for number in [quota.limit, quota.window, quota.option, charge.cost] {
                push(signed(number));
            }
            push(server_times.to_server_time(charge.charged_at));
        }
    }

    /// Returns the items in the order of the call, each with the key of its run.
    fn order(&self, items: &[usize], repeats: impl Fn(usize) -> u64) -> Vec<(RunKey, usize)> {
        let run_key = |(position, item): (usize, &usize)| {
            let alike = |times| {
                let charge = &self.charges_of(*item)[0];
                RunKey::Alike(charge.quota, charge.cost, times)
            };
            let key = match self.items[*item].kind {
                RequestKind::Acquire => alike(repeats(*item)),
                RequestKind::Peek => alike(0),
                RequestKind::Group(_) => RunKey::Group(position),
            };
            (key, *item)
        };
        let mut order: Vec<_> = items.iter().enumerate().map(run_key).collect();
        if !self.keeps_order {
            order.sort_by_key(|(key, _)| *key);
        }
        order
    }

    fn is_reset(&self, item: usize) -> bool {
        self.items[item].kind == RequestKind::Group(Operation::Apply(Action::Reset))
    }

    fn key_count(&self, item: usize) -> usize {
        self.charges_of(item).len() * if self.is_reset(item) { TAGS.len() } else { 1 }
    }

    fn for_each_key(&self, item: usize, mut push: impl FnMut(&str)) {
        for charge in self.charges_of(item) {
            let key = &self.keys[charge.key.clone()];
            if self.is_reset(item) {
                keys_of_all_forms(key).for_each(|key| push(&key));
            } else {
                push(key);
            }
        }
    }

    /// Decodes the reply to [`command`](Self::command) with the same items.
    pub(super) fn read(
        &self,
        items: &[usize],
        repeats: impl Fn(usize) -> u64,
        reply: Value,
    ) -> Result<CallReply, StoreError> {
        let Value::BulkString(bytes) = reply else { return Err(unexpected("not a string")) };
        let mut reader = ReplyReader::new(&bytes);
        let now = signed(reader.number()?);
        if reader.is_at_end() && !items.is_empty() {
            return Ok(CallReply { now, items: None });
        }
        // The replies have the order of the call.
        let mut by_item: Vec<Option<ItemReply>> = vec![None; self.items.len()];
        for (_, item) in self.order(items, &repeats) {
            by_item[item] = Some(match reader.error()? {
                Some(error) => ItemReply::Error(error),
                None => self.read_item(item, repeats(item), &mut reader)?,
            });
        }
        if !reader.is_at_end() {
            return Err(unexpected("a wrong length"));
        }
        let items = items.iter().filter_map(|item| by_item[*item].take()).collect();
        Ok(CallReply { now, items: Some(items) })
    }

    fn read_item(
        &self,
        item: usize,
        repeats: u64,
        reader: &mut ReplyReader<'_>,
    ) -> Result<ItemReply, StoreError> {
        let charges = self.charges_of(item);
        if matches!(self.items[item].kind, RequestKind::Acquire | RequestKind::Peek) {
            let (granted, remaining) = (reader.number()?, reader.number()?);
            let algorithm = self.quotas[charges[0].quota].algorithm;
            let snapshot = CounterSnapshot::read(algorithm, || reader.number())?;
            let (retry_after, reset_after) =
                if granted < repeats { (reader.number()?, reader.number()?) } else { (0, 0) };
            return Ok(ItemReply::Grants(Grants {
                granted,
                remaining,
                snapshot,
                retry_after,
                reset_after,
            }));
        }
        if self.is_reset(item) {
            reader.number()?;
            return Ok(ItemReply::Decisions(Vec::new()));
        }
        let decisions = charges.iter().map(|_| {
            let allowed = reader.number()? == 1;
            let mut next = || reader.number();
            let [remaining, retry_after, reset_after, delay] = [next()?, next()?, next()?, next()?];
            Ok(RawDecision { allowed, remaining, retry_after, reset_after, delay })
        });
        Ok(ItemReply::Decisions(decisions.collect::<Result<_, _>>()?))
    }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
