//! [`EncodedRequests`]: the requests of one call, encoded as KEYS and ARGV of decide.lua, which
//! documents the protocol.
//!
//! ```text
//! add(request, slot, write_key) -> item
//! order(items, repeats) -> [OrderedItem]          the order of the call
//! arguments(order, server_times, mode) -> Command mode: KeyMode::{Declared, CrossSlot}
//! Script::decide(mode, parts(order))              the script that they are for
//! read(order, reply) -> CallReply                 one reply per item, in the same order
//! ```
//!
//! Equal acquires of one charge share one item, which is sent once with their number.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::Arc;

use super::reply::{CallReply, ItemReply, ReplyReader, unexpected};
use super::{KeyMode, Parts};
use crate::algorithm::{Algorithm, CounterSnapshot, Encoding, Grants, RawDecision};
use crate::calendar::Calendar;
use crate::charge::Charge;
use crate::clock::micros;
use crate::hold::{Hold, HoldState, HoldStatus};
use crate::quota::{Quota, window_text};
use crate::store::redis::client::resp::{Command, Value};
use crate::store::redis::client::server_clock::ServerTimes;
use crate::store::redis::routing::slots::slot_of;
use crate::store::{Action, StoreError};

#[cfg(test)]
mod tests;

/// Operation on one or more charges, independent of the other requests in its call.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) operation: Operation,
    pub(crate) charges: &'a [Charge<'a>],
}

/// Operation of decide.lua.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Apply(Action),
    /// An acquire that a charge on another node has already denied: it spends nothing, but quotas
    /// with `count_denied` record it.
    CountDenied,
}

/// Encoded requests of one call. It borrows nothing, so that it can outlive its callers.
#[derive(Default)]
pub(crate) struct EncodedRequests {
    /// The Redis keys, concatenated.
    keys: String,
    charges: Vec<EncodedCharge>,
    blocks: Vec<EncodedBlock>,
    holds: Vec<EncodedHold>,
    quotas: Vec<EncodedQuota>,
    items: Vec<Item>,
    has_calendars: bool,
    /// Expected time in Redis, in units of the time for a small count.
    weight: usize,
    /// Whether two items may have a key in common, so that their order matters.
    keeps_order: bool,
    hasher: RandomState,
}

/// One or more equal requests.
pub(crate) struct Item {
    pub(crate) slot: u16,
    kind: RequestKind,
    charges: Range<usize>,
    blocks: Range<usize>,
    holds: Range<usize>,
    /// Hash of the key of an acquire. A call has few items, so that they are searched in turn.
    key_hash: Option<u64>,
}

/// Item in the order of a call.
pub(crate) struct OrderedItem {
    pub(crate) item: usize,
    run: RunKey,
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
    /// Operation on the hold of one charge that the fast path decides, unless it finds a state that
    /// it leaves to the general part.
    Held(Action),
    /// Release of one unit in flight, which needs no script.
    Release,
}

/// Key of the items that are sent with one header: a group, or acquires or peeks of one quota and cost. Unless two
/// items have a key in common, items are sorted by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum RunKey {
    /// Index of the quota, cost, and number of equal acquires; 0 for a peek.
    Equal(usize, u64, u64),
    /// The item, which no other one is equal to.
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

/// Block of a charge.
struct EncodedBlock {
    /// Range of its key in [`EncodedRequests::keys`].
    key: Range<usize>,
    /// Position of the charge in its request, from 1 on.
    charge: usize,
    quota: Quota,
}

/// Hold of a charge, or the ends of the holds of its quota.
struct EncodedHold {
    /// Ranges of the keys of its record and of the set of ends in [`EncodedRequests::keys`].
    record: Option<Range<usize>>,
    set: Option<Range<usize>>,
    /// Whether ended holds release their units.
    releases: bool,
    /// Position of the charge in its request, from 1 on.
    charge: usize,
    /// Mode, ttl, maximum and the ttl of the quota.
    numbers: [u64; 4],
}

/// Quota in the form that the script expects.
#[derive(Clone, PartialEq, Eq)]
struct EncodedQuota {
    algorithm: Algorithm,
    kind: CountKind,
    limit: u64,
    window: u64,
    option: u64,
    calendar: Option<Arc<Calendar>>,
}

/// Text between the key of a count and the id of a hold, in the key of its record.
const RECORD_MARK: &str = ":h:";
/// The largest cost that the script's doubles represent exactly. It exceeds every limit.
const MAX_COST: u64 = 1 << 52;
/// Bits of the length of a period in seconds, in the window of a calendar quota.
const LENGTH_BITS: u32 = 25;
/// Deadline of a call that has none: the largest integer that a double represents exactly.
const NO_DEADLINE: i64 = 1 << 53;
/// Number of bytes of a word without its text, and of a header, at most.
const WORD_BYTES: usize = 8;
const HEADER_BYTES: usize = 112;
/// Limit up to which a decision on a packed log takes about as long as on a small count.
const SMALL_LOG: u64 = 250;
/// Factor by which the general part of the script takes longer than its fast paths.
const GENERAL_FACTOR: usize = 4;
/// Factor by which a decision with a hold takes longer than one without.
const HELD_FACTOR: usize = 2;
/// Number of quotas that are searched for an equal one. Most calls have one or two quotas, and a
/// duplicate costs little.
const MAX_QUOTA_SCAN: usize = 8;

impl<'a> Request<'a> {
    pub(crate) fn new(operation: Operation, charges: &'a [Charge<'a>]) -> Self {
        Self { operation, charges }
    }

    /// Returns its expected time in Redis, in units of the time for a small count.
    pub(crate) fn weight(&self) -> usize {
        let factor = match RequestKind::of(self) {
            RequestKind::Acquire | RequestKind::Peek | RequestKind::Release => 1,
            RequestKind::Held(_) => HELD_FACTOR,
            RequestKind::Group(Operation::Apply(Action::Reset)) => return self.charges.len(),
            RequestKind::Group(_) => GENERAL_FACTOR,
        };
        self.charges.iter().map(|charge| factor * quota_weight(charge.quota())).sum()
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
            Self::Apply(Action::Commit | Action::Release) => 8,
            Self::Apply(Action::Renew) => 9,
            Self::CountDenied => 7,
        }
    }

    /// Returns whether it depends on blocks, or starts or deletes them.
    fn uses_blocks(self) -> bool {
        match self {
            Self::Apply(Action::Acquire | Action::Peek | Action::Reset) | Self::CountDenied => true,
            Self::Apply(
                Action::Refund
                | Action::ChargeUpTo
                | Action::Report
                | Action::Commit
                | Action::Release
                | Action::Renew,
            ) => false,
        }
    }

    /// Returns whether it depends on the hold of a charge.
    fn uses_hold(self) -> bool {
        !matches!(self, Self::Apply(Action::Reset | Action::ChargeUpTo | Action::Report))
    }
}

/// Returns the key of a block, given that of its count: `<prefix>:{<key>}block:<policy>`. The name
/// of a count has a colon, or its format, after the brace.
fn block_key(count_key: &str, policy: &str) -> String {
    let up_to_brace = count_key.strip_suffix(policy).and_then(|start| start.strip_suffix(':'));
    format!("{}block:{policy}", up_to_brace.unwrap_or(count_key))
}

impl RequestKind {
    fn of(request: &Request<'_>) -> Self {
        match (request.operation, request.charges) {
            // Requests with `count_denied` are not equal: each denial changes the state for the
            // next. So does the denial that starts a block.
            (Operation::Apply(action @ (Action::Acquire | Action::Peek)), [charge])
                if charge.cost() > 0 && !charge.quota().count_denied() && !charge.is_extended() =>
            {
                if action == Action::Peek {
                    Self::Peek
                } else {
                    Self::Acquire
                }
            }
            (Operation::Apply(Action::Release), [_]) => Self::Release,
            (Operation::Apply(action), [charge]) if has_usual_hold(action, charge) => {
                Self::Held(action)
            }
            (operation, _) => Self::Group(operation),
        }
    }
}

/// Returns whether the fast path decides this operation on the hold of a charge, if it finds the
/// count in a usual state. Members of units in flight are plain ids then.
fn has_usual_hold(action: Action, charge: &Charge<'_>) -> bool {
    let (quota, cost) = (charge.quota(), charge.cost());
    let Some(hold) = charge.hold() else { return false };
    if quota.is_concurrency() {
        let has_usual_time = || {
            hold.is_lease()
                || !hold.is_settled()
                    && hold.ttl_micros(quota.holds()) == micros(quota.holds().ttl())
        };
        let is_usual = match action {
            Action::Acquire => cost == 1 && has_usual_time(),
            Action::Commit | Action::Renew => true,
            _ => false,
        };
        return is_usual && !hold.id().contains(['*', ':']);
    }
    action == Action::Acquire
        && cost > 0
        && !(quota.count_denied() || quota.has_blocks() || quota.releases_holds())
        && quota.calendar().is_none()
}

impl Item {
    /// Returns whether the script only reads the count.
    pub(crate) fn is_read(&self) -> bool {
        self.kind == RequestKind::Group(Operation::Apply(Action::ChargeUpTo))
    }
}

/// Form of a count in Redis. The discriminants are the kinds of decide.lua.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CountKind {
    SlidingLog = 1,
    PackedLog = 2,
    SlidingCounter = 3,
    PackedCounter = 4,
    FixedWindow = 5,
    TokenBucket = 6,
    LeakyBucket = 7,
    Concurrency = 8,
}

impl CountKind {
    pub(crate) fn of(quota: &Quota) -> Self {
        match (quota.algorithm(), quota.encoding()) {
            (Algorithm::SlidingLog, Encoding::Packed) => Self::PackedLog,
            (Algorithm::SlidingLog, _) => Self::SlidingLog,
            (Algorithm::SlidingCounter, Encoding::Packed) => Self::PackedCounter,
            (Algorithm::SlidingCounter, _) => Self::SlidingCounter,
            (Algorithm::FixedWindow, _) => Self::FixedWindow,
            (Algorithm::TokenBucket, _) => Self::TokenBucket,
            (Algorithm::LeakyBucket, _) => Self::LeakyBucket,
            (Algorithm::Concurrency, _) => Self::Concurrency,
        }
    }

    /// Returns the number of this form in the script.
    pub(crate) fn number(self) -> u8 {
        self as u8
    }
}

impl EncodedQuota {
    fn of(quota: &Quota) -> Self {
        let algorithm = quota.algorithm();
        let option = match algorithm {
            Algorithm::SlidingLog => u64::from(quota.count_denied()),
            Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Concurrency => {
                quota.burst()
            }
            Algorithm::SlidingCounter | Algorithm::FixedWindow => 0,
        };
        let (limit, window) = (quota.limit(), quota.window_micros());
        let calendar = quota.shared_calendar().cloned();
        Self { algorithm, kind: CountKind::of(quota), limit, window, option, calendar }
    }

    /// Returns the window and the option. Those of a calendar are two periods around the time, of
    /// which the script picks one: see calendar.lua.
    fn window_and_option(&self, times: &ServerTimes) -> [u64; 2] {
        let Some(calendar) = &self.calendar else { return [self.window, self.option] };
        let [start, boundary, end] = calendar.boundaries_around(times.server_micros());
        let [first, second] = [boundary - start, end - boundary].map(|micros| micros / 1_000_000);
        [first + (second << LENGTH_BITS), start.max(1)]
    }
}

/// Returns the expected time of a decision on the fast path in Redis, in units of the time for a small
/// count. A packed log is copied as a whole while it is short, and costs more when it is long.
fn quota_weight(quota: &Quota) -> usize {
    match CountKind::of(quota) {
        CountKind::SlidingLog => 2,
        CountKind::PackedLog if quota.limit() > SMALL_LOG => 4,
        _ => 1,
    }
}

impl EncodedRequests {
    /// Adds a request, or finds an item of equal requests. Returns the index of the item.
    pub(crate) fn add(
        &mut self,
        request: &Request<'_>,
        slot: u16,
        write_key: impl Fn(&mut String, &Charge<'_>),
    ) -> usize {
        let kind = RequestKind::of(request);
        let (first_charge, first_block) = (self.charges.len(), self.blocks.len());
        let first_hold = self.holds.len();
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
        for (index, charge) in request.charges.iter().enumerate() {
            if charge.quota().has_blocks() && request.operation.uses_blocks() {
                let count = self.key_of(first_charge + index);
                let block = block_key(count, charge.policy());
                let start = self.keys.len();
                self.keys.push_str(&block);
                let (key, quota) = (start..self.keys.len(), charge.quota().clone());
                self.blocks.push(EncodedBlock { key, charge: index + 1, quota });
            }
        }
        for (index, charge) in request.charges.iter().enumerate() {
            let is_reset = request.operation == Operation::Apply(Action::Reset);
            if charge.is_extended() || is_reset {
                self.add_hold(request.operation, charge, first_charge, index);
            }
        }
        let key_hash =
            (kind == RequestKind::Acquire).then(|| self.hasher.hash_one(self.key_of(first_charge)));
        if key_hash.is_some() {
            let (equal_item, has_same_key) = self.find_equal(first_charge, key_hash);
            if let Some(equal_item) = equal_item {
                self.keys.truncate(keys_start);
                self.charges.truncate(first_charge);
                return equal_item;
            }
            self.keeps_order |= has_same_key;
        } else {
            self.keeps_order = true;
        }
        self.weight += request.weight();
        let (charges, blocks) = (first_charge..self.charges.len(), first_block..self.blocks.len());
        let holds = first_hold..self.holds.len();
        self.items.push(Item { slot, kind, charges, blocks, holds, key_hash });
        self.items.len() - 1
    }

    /// Adds the hold of a charge, or the set of the holds of its quota.
    fn add_hold(
        &mut self,
        operation: Operation,
        charge: &Charge<'_>,
        first_charge: usize,
        index: usize,
    ) {
        let quota = charge.quota();
        let hold = charge.hold().filter(|_| operation.uses_hold());
        // The terms may have changed since the reservation.
        let is_of_hold =
            matches!(operation, Operation::Apply(Action::Commit | Action::Refund | Action::Renew));
        let is_reset = operation == Operation::Apply(Action::Reset);
        let has_set = (quota.releases_holds() || is_of_hold || is_reset) && !quota.is_concurrency();
        if hold.is_none() && !has_set && !quota.releases_holds() {
            return;
        }
        let count = self.key_of(first_charge + index).to_owned();
        let mut add_key = |suffix: &[&str]| {
            let start = self.keys.len();
            self.keys.push_str(&count);
            for text in suffix {
                self.keys.push_str(text);
            }
            start..self.keys.len()
        };
        let record = hold.map(|hold| add_key(&[RECORD_MARK, hold.id()]));
        let set = has_set.then(|| add_key(&[":h"]));
        let terms = quota.holds();
        let ttl = micros(terms.ttl());
        let mode = hold.map_or(0, |hold| 1 + u64::from(hold.is_settled()));
        let of_hold = hold.map_or(ttl, |hold| hold.ttl_micros(terms));
        // The time of a lease is as usual as that of the quota: it needs no record.
        let usual = if hold.is_some_and(Hold::is_lease) { of_hold } else { ttl };
        let numbers = [mode, of_hold, terms.max_ttl_micros(), usual];
        let releases = quota.releases_holds();
        self.holds.push(EncodedHold { record, set, releases, charge: index + 1, numbers });
    }

    /// Returns the acquire that is equal to that of this charge, and whether any acquire has the
    /// same key.
    fn find_equal(&self, charge: usize, key_hash: Option<u64>) -> (Option<usize>, bool) {
        let (mut equal_item, mut has_same_key) = (None, false);
        for (index, item) in self.items.iter().enumerate() {
            let other = item.charges.start;
            if item.key_hash == key_hash && self.key_of(other) == self.key_of(charge) {
                has_same_key = true;
                if self.has_equal_quota_and_cost(other, charge) {
                    equal_item = Some(index);
                }
            }
        }
        (equal_item, has_same_key)
    }

    fn key_of(&self, charge: usize) -> &str {
        &self.keys[self.charges[charge].key.clone()]
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
            self.has_calendars |= quota.calendar.is_some();
            self.quotas.push(quota);
            self.quotas.len() - 1
        })
    }

    pub(crate) fn items(&self) -> &[Item] {
        &self.items
    }

    /// Returns whether a charge has the time of an earlier one, to refund it, or a calendar.
    pub(crate) fn need_time(&self) -> bool {
        self.has_calendars || self.charges.iter().any(|charge| charge.charged_at != 0)
    }

    /// Returns the expected time in Redis, in units of the time for a small count.
    pub(crate) fn weight(&self) -> usize {
        self.weight
    }

    /// Returns whether an item is decided by [`release`](Self::release).
    pub(crate) fn is_release(&self, item: usize) -> bool {
        self.items[item].kind == RequestKind::Release
    }

    /// Encodes the arguments of ZREM, which releases a unit in flight.
    pub(crate) fn release(&self, item: usize) -> Command {
        let key = self.key_of(self.items[item].charges.start);
        let record = self.holds_of(item).first().and_then(|hold| hold.record.clone());
        let id = record.and_then(|record| self.keys[record].get(key.len() + RECORD_MARK.len()..));
        Command::new(key).arg(id.unwrap_or_default())
    }

    /// Decodes the reply to [`release`](Self::release).
    pub(crate) fn read_release(reply: &Value) -> Result<ItemReply, StoreError> {
        let status = match reply {
            Value::Integer(0) => HoldStatus::Unknown,
            Value::Integer(1) => HoldStatus::Settled,
            _ => return Err(unexpected("not the result of ZREM")),
        };
        let hold = HoldState::of_micros(status, 0);
        Ok(ItemReply::Decisions(vec![(RawDecision::untouched(0), Some(hold))]))
    }

    /// Returns whether a request has keys of several slots.
    pub(crate) fn spans_slots(&self, item: usize) -> bool {
        let Item { slot, charges, .. } = &self.items[item];
        charges.len() > 1 && charges.clone().any(|charge| slot_of(self.key_of(charge)) != *slot)
    }

    fn charges_of(&self, item: usize) -> &[EncodedCharge] {
        &self.charges[self.items[item].charges.clone()]
    }

    fn blocks_of(&self, item: usize) -> &[EncodedBlock] {
        &self.blocks[self.items[item].blocks.clone()]
    }

    fn holds_of(&self, item: usize) -> &[EncodedHold] {
        &self.holds[self.items[item].holds.clone()]
    }

    /// Returns the Redis keys of an item.
    fn keys_of(&self, item: usize) -> impl Iterator<Item = &[u8]> {
        let counts = self.charges_of(item).iter().map(|charge| &charge.key);
        let blocks = self.blocks_of(item).iter().map(|block| &block.key);
        let holds = self.holds_of(item).iter().flat_map(|hold| hold.record.iter().chain(&hold.set));
        counts.chain(blocks).chain(holds).map(|key| self.keys[key.clone()].as_bytes())
    }

    /// Returns these items in the order of a call, each with its number of equal requests.
    pub(crate) fn order(
        &self,
        items: impl IntoIterator<Item = usize>,
        repeats: impl Fn(usize) -> u64,
    ) -> Vec<OrderedItem> {
        let ordered = |item: usize| {
            let equal = |times| {
                let charge = &self.charges_of(item)[0];
                RunKey::Equal(charge.quota, charge.cost, times)
            };
            let run = match self.items[item].kind {
                RequestKind::Acquire => equal(repeats(item)),
                RequestKind::Peek => equal(0),
                RequestKind::Group(_) | RequestKind::Held(_) | RequestKind::Release => {
                    RunKey::Group(item)
                }
            };
            OrderedItem { item, run }
        };
        let mut order: Vec<_> = items.into_iter().map(ordered).collect();
        if !self.keeps_order {
            order.sort_by_key(|ordered| ordered.run);
        }
        order
    }

    /// Returns the parts of the script that these items need.
    pub(crate) fn parts(&self, order: &[OrderedItem]) -> Parts {
        let holds = order.iter().any(|ordered| !self.items[ordered.item].holds.is_empty());
        Parts { holds, calendars: self.has_calendars }
    }

    /// Encodes the arguments of the call of these items.
    pub(crate) fn arguments(
        &self,
        order: &[OrderedItem],
        server_times: &ServerTimes,
        mode: KeyMode,
    ) -> Command {
        let all_keys = || order.iter().flat_map(|ordered| self.keys_of(ordered.item));
        let keys = all_keys().count();
        let declared = if mode == KeyMode::Declared { keys } else { keys.min(1) };
        let runs = || order.chunk_by(|one, other| one.run == other.run);
        let run_count = runs().count();
        let capacity = self.keys.len() + WORD_BYTES * (1 + keys) + HEADER_BYTES * run_count;
        let mut arguments = Command::with_capacity(capacity);
        arguments.push(itoa::Buffer::new().format(declared).as_bytes());
        all_keys().take(declared).for_each(|key| arguments.push(key));
        let mut header = Vec::with_capacity(HEADER_BYTES);
        for run in runs() {
            let Some(OrderedItem { item, run: run_key }) = run.first() else { continue };
            header.clear();
            #[expect(clippy::cast_precision_loss, reason = "all numbers are below 2^53")]
            let mut push = |number: i64| header.extend((number as f64).to_le_bytes());
            let deadline = server_times.estimated.or(server_times.deadline);
            push(deadline.unwrap_or(NO_DEADLINE));
            push(signed(server_times.driven.unwrap_or(0)));
            push(signed(run_count as u64));
            match *run_key {
                RunKey::Equal(quota, cost, times) => {
                    let quota = &self.quotas[quota];
                    push(i64::from(quota.kind.number()));
                    push(signed(run.len() as u64));
                    let [window, option] = quota.window_and_option(server_times);
                    for number in [quota.limit, window, option, cost, times] {
                        push(signed(number));
                    }
                    if matches!(quota.kind, CountKind::SlidingLog | CountKind::SlidingCounter) {
                        header.extend(window_text(quota.window).into_bytes());
                    }
                }
                RunKey::Group(_) => {
                    self.push_group(*item, server_times, push);
                    if let (RequestKind::Held(_), [charge]) =
                        (self.items[*item].kind, self.charges_of(*item))
                    {
                        header.extend(window_text(self.quotas[charge.quota].window).into_bytes());
                    }
                }
            }
            arguments.push(&header);
        }
        all_keys().skip(declared).for_each(|key| arguments.push(key));
        arguments
    }

    /// Writes the part of a group's header that follows the call's numbers.
    fn push_group(&self, item: usize, server_times: &ServerTimes, mut push: impl FnMut(i64)) {
        let (charges, blocks) = (self.charges_of(item), self.blocks_of(item));
        let (holds, keys) = (self.holds_of(item), self.keys_of(item).count());
        let (operation, times) = match self.items[item].kind {
            RequestKind::Group(operation) => (operation, 0),
            RequestKind::Held(action) => (Operation::Apply(action), 1),
            RequestKind::Acquire | RequestKind::Peek | RequestKind::Release => return,
        };
        push(0);
        push(signed(keys as u64));
        push(i64::from(operation.number()));
        push(signed(charges.len() as u64));
        push(signed(blocks.len() as u64));
        push(signed(holds.len() as u64));
        push(times);
        for charge in charges {
            let quota = &self.quotas[charge.quota];
            push(i64::from(quota.kind.number()));
            let [window, option] = quota.window_and_option(server_times);
            for number in [quota.limit, window, option, charge.cost] {
                push(signed(number));
            }
            push(server_times.to_server_time(charge.charged_at));
        }
        for hold in holds {
            push(signed(hold.charge as u64));
            hold.numbers.iter().for_each(|number| push(signed(*number)));
            push(i64::from(hold.record.is_some()));
            push(hold.set.as_ref().map_or(0, |_| if hold.releases { 1 } else { 2 }));
        }
        for block in blocks {
            let lengths = block.quota.block_for();
            push(signed(block.charge as u64));
            push(signed(lengths.len() as u64));
            for length in lengths {
                push(signed(micros(*length)));
            }
        }
    }

    fn is_reset(&self, item: usize) -> bool {
        self.items[item].kind == RequestKind::Group(Operation::Apply(Action::Reset))
    }

    /// Decodes the reply to [`arguments`](Self::arguments) with the same order.
    pub(crate) fn read(
        &self,
        order: &[OrderedItem],
        reply: &Value,
    ) -> Result<CallReply, StoreError> {
        let Value::String(bytes) = reply else { return Err(unexpected("not a string")) };
        let mut reader = ReplyReader::new(bytes);
        let now = signed(reader.number()?);
        if reader.is_at_end() && !order.is_empty() {
            return Ok(CallReply { now, items: None });
        }
        let mut items = Vec::with_capacity(order.len());
        for ordered in order {
            items.push(match reader.error()? {
                Some(error) => ItemReply::Error(error),
                None => self.read_item(ordered, &mut reader)?,
            });
        }
        if !reader.is_at_end() {
            return Err(unexpected("a wrong length"));
        }
        Ok(CallReply { now, items: Some(items) })
    }

    fn read_grants(
        &self,
        quota: usize,
        times: u64,
        reader: &mut ReplyReader<'_>,
    ) -> Result<Grants, StoreError> {
        let (granted, remaining) = (reader.number()?, reader.number()?);
        let algorithm = self.quotas[quota].algorithm;
        let snapshot = CounterSnapshot::read(algorithm, || reader.number())?;
        let is_denied = granted < times.max(1);
        let (retry_after, reset_after) =
            if is_denied { (reader.number()?, reader.number()?) } else { (0, 0) };
        Ok(Grants { granted, remaining, snapshot, retry_after, reset_after })
    }

    fn read_item(
        &self,
        ordered: &OrderedItem,
        reader: &mut ReplyReader<'_>,
    ) -> Result<ItemReply, StoreError> {
        if let RunKey::Equal(quota, _, times) = ordered.run {
            return Ok(ItemReply::Grants(self.read_grants(quota, times, reader)?));
        }
        if self.is_reset(ordered.item) {
            reader.number()?;
            return Ok(ItemReply::Decisions(Vec::new()));
        }
        let holds = self.holds_of(ordered.item);
        if matches!(self.items[ordered.item].kind, RequestKind::Held(_)) {
            if !reader.skip(AS_GROUP) {
                let quota = self.charges_of(ordered.item)[0].quota;
                let grants = self.read_grants(quota, 1, reader)?;
                let [mode, ttl, ..] = holds[0].numbers;
                let expires_after = if mode == SETTLED { 0 } else { ttl };
                let state = HoldState::of_micros(HoldStatus::Held, expires_after);
                return Ok(ItemReply::Held(grants, (grants.granted == 1).then_some(state)));
            }
            if let Some(error) = reader.error()? {
                return Ok(ItemReply::Error(error));
            }
        }
        let has_hold =
            |charge| holds.iter().any(|hold| hold.charge == charge && hold.record.is_some());
        let decisions = (1..=self.charges_of(ordered.item).len()).map(|charge| {
            let allowed = reader.number()? == 1;
            let mut next = || reader.number();
            let [remaining, retry_after, reset_after, delay] = [next()?, next()?, next()?, next()?];
            let decision = RawDecision { allowed, remaining, retry_after, reset_after, delay };
            let hold = if has_hold(charge) { hold_state(next()?, next()?)? } else { None };
            Ok((decision, hold))
        });
        Ok(ItemReply::Decisions(decisions.collect::<Result<_, StoreError>>()?))
    }
}

/// First number of the reply to a hold that is not the reply of a run: that of a group follows.
const AS_GROUP: f64 = 2.0;
/// Mode of an acquire that is settled at once.
const SETTLED: u64 = 2;

/// Decodes the state of a hold.
fn hold_state(status: u64, expires_after: u64) -> Result<Option<HoldState>, StoreError> {
    let status = match status {
        0 => return Ok(None),
        1 => HoldStatus::Held,
        2 => HoldStatus::Replayed,
        3 => HoldStatus::Settled,
        4 => HoldStatus::Ended,
        5 => HoldStatus::Unknown,
        6 => HoldStatus::Reported,
        _ => return Err(unexpected("a wrong state of a hold")),
    };
    Ok(Some(HoldState::of_micros(status, expires_after)))
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
