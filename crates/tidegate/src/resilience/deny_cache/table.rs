//! The denials themselves: a table of fixed size, in which a count can only be in one small set of
//! places.
//!
//! So to find, to forget and to make room are all a look at a handful of entries, whatever is put
//! in. Which set it is, is the process's secret: nobody can choose keys that drive out somebody
//! else's.

use std::hash::Hasher;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use siphasher::sip128::{Hasher128, SipHasher13};

use super::{COUNTED_DENIAL_TTL, MAX_ENTRY_TTL};
use crate::algorithm::{Algorithm, RawDecision, mul_div_ceil};
use crate::charge::Charge;
use crate::clock::micros;
use crate::decision::{Decision, Source};
use crate::quota::Quota;
use crate::resilience::random;
use crate::store::news::CountId;

/// Places for one count, and for those that share its set.
const WAYS: usize = 8;
const SHARDS: usize = 64;
/// What a quota takes of a name: a byte before it, its numbers, its kind.
const QUOTA_BYTES: usize = 1 + 3 * 8 + 3;
/// Of so many costs of one count each has its own denial. Who asks for yet another is answered by
/// that of the next lower one: a denial all the same, but the wait that it tells may be too short.
const COSTS: usize = 3;

#[derive(Debug)]
pub(super) struct Table {
    shards: Box<[Mutex<Shard>]>,
    ways: usize,
    entries: AtomicUsize,
    secret: [u64; 4],
}

#[derive(Debug)]
struct Shard {
    sets: Box<[Vec<Entry>]>,
    /// Goes up whenever something in here may have become wrong. A denial that was asked for before
    /// that is not kept.
    generation: u64,
    /// The serial number of the latest entry.
    serial: NonZeroU64,
}

#[derive(Debug)]
struct Entry {
    count: CountId,
    /// Of key, policy and quota.
    fingerprint: Fingerprint,
    cost: u64,
    /// As the store said at the denial.
    remaining: u64,
    retry_after: u64,
    reset_after: u64,
    /// When the store was asked, and when its answer came.
    sent: u64,
    received: u64,
    /// The store's epoch before it was asked.
    epoch: u64,
    serial: NonZeroU64,
    /// Surely denied before this time.
    until: u64,
    /// Of a bucket: units that this instance has asked for since the denial. Of a log that counts
    /// denials: units that were denied from here, and that the store has not recorded yet.
    units: u64,
    companions: Option<Box<Companions>>,
    /// It was of use since others last needed room.
    used: bool,
}

/// What was left of the other charges of a request that was denied.
#[derive(Debug)]
pub(super) struct Companions {
    /// Of all charges of the request, this one included.
    pub(super) request: u128,
    pub(super) left: Box<[Left]>,
}

/// What a charge had left when nothing was taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Left {
    pub(super) remaining: u64,
    pub(super) reset_at: u64,
}

/// 128 bits of a hash, without the alignment of `u128`: tickets are part of futures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Fingerprint([u64; 2]);

/// A charge in the table's words.
#[derive(Debug, Clone, Copy)]
pub(super) struct Name {
    count: CountId,
    fingerprint: Fingerprint,
}

impl Name {
    pub(super) fn count(self) -> CountId {
        self.count
    }
}

/// What was known before the store was asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticket {
    pub(super) name: Name,
    generation: u64,
    epoch: u64,
    /// There are denials whose wait becomes too short if this request is admitted.
    has_others: bool,
    /// The entry of this very cost, of a bucket whose time has come: its serial number.
    bucket_entry: Option<NonZeroU64>,
    /// The request is already counted in that entry.
    pub(super) counted: bool,
}

/// A charge that is looked up, and when.
#[derive(Clone, Copy)]
pub(super) struct Query<'a> {
    pub(super) name: Name,
    pub(super) charge: &'a Charge<'a>,
    /// The store's epoch of this charge.
    pub(super) epoch: u64,
    pub(super) now: u64,
    /// Of several charges, of which this is one.
    pub(super) request: Option<u128>,
    /// It is an acquire.
    pub(super) spends: bool,
}

/// A denial, and what was left of all charges of the request; or what to come back with once the
/// store has answered.
pub(super) type Found = Result<(Decision, Option<Vec<Left>>), Ticket>;

/// A denial by the store, to be kept.
#[derive(Debug)]
pub(super) struct Denial {
    pub(super) cost: u64,
    pub(super) decision: Decision,
    /// When the store was asked, and when it had answered. It decided in between.
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) companions: Option<Box<Companions>>,
}

impl Shard {
    /// The request is let through to the store.
    fn ticket(&mut self, query: &Query<'_>, set: usize) -> Ticket {
        let Query { name, charge, epoch, now, .. } = *query;
        let is_bucket = is_bucket(charge.quota());
        let mut ticket = Ticket {
            name,
            generation: self.generation,
            epoch,
            has_others: false,
            bucket_entry: None,
            counted: false,
        };
        for entry in self.sets[set].iter_mut().filter(|entry| entry.fingerprint == name.fingerprint)
        {
            if is_bucket && entry.cost == charge.cost() {
                if entry.epoch == epoch && now < entry.expires() {
                    ticket.bucket_entry = Some(entry.serial);
                    // Of several charges, the others decide as well whether this one is spent.
                    ticket.counted = query.spends && query.request.is_none();
                    if ticket.counted {
                        entry.count_ask(charge.quota(), charge.cost());
                    }
                }
            } else {
                ticket.has_others = true;
                if query.spends && charge.quota().count_denied() {
                    entry.extend(now);
                }
            }
        }
        ticket
    }
}

impl Entry {
    /// `None` if it is of no use.
    fn new(ticket: Ticket, serial: NonZeroU64, quota: &Quota, denial: Denial) -> Option<Self> {
        let Denial { cost, decision, sent, received, companions } = denial;
        let (retry_after, reset_after) =
            (micros(decision.retry_after), micros(decision.reset_after));
        let ttl = if quota.count_denied() { COUNTED_DENIAL_TTL } else { MAX_ENTRY_TTL };
        let until = sent.saturating_add(surely(retry_after).min(micros(ttl)));
        (until > sent || is_bucket(quota)).then_some(Self {
            count: ticket.name.count,
            fingerprint: ticket.name.fingerprint,
            cost,
            remaining: decision.remaining,
            retry_after,
            reset_after,
            sent,
            received,
            epoch: ticket.epoch,
            serial,
            until,
            units: 0,
            companions,
            used: false,
        })
    }

    /// When it is dropped, whatever it says.
    fn expires(&self) -> u64 {
        self.sent.saturating_add(micros(MAX_ENTRY_TTL))
    }

    /// One request asks the store again; the denial holds for the others, as long as it would
    /// without its being counted.
    fn extend(&mut self, now: u64) {
        let holds = surely(self.retry_after).min(micros(MAX_ENTRY_TTL));
        self.until =
            self.sent.saturating_add(holds).min(now.saturating_add(micros(COUNTED_DENIAL_TTL)));
    }

    /// Counts units of a bucket that the store is asked for after this denial.
    ///
    /// Why a later request of the same cost is surely denied before `until`: `retry_after` says
    /// when the first such request could be admitted, and each further one needs `cost` units more,
    /// which take `cost * W / L` to drain. An ask that is admitted takes its units, other instances
    /// only take more, and refunds, resets and other quotas drop the entry. An ask in flight counts
    /// as admitted: if it is denied instead, there were fewer than `cost` units, so that the later
    /// request is denied as well, and the entry is replaced or dropped by its answer. One that
    /// fails drops the entry.
    fn count_ask(&mut self, quota: &Quota, units: u64) {
        self.units = self.units.saturating_add(units);
        let drained = mul_div_floor(self.units, quota.window_micros(), quota.limit());
        let holds = surely(self.retry_after.saturating_add(drained));
        self.until = self.sent.saturating_add(holds.min(micros(MAX_ENTRY_TTL)));
    }

    fn decision(&self, charge: &Charge<'_>, now: u64) -> Decision {
        let quota = charge.quota();
        if quota.count_denied() {
            // This denial counts, too: the wait begins again.
            let Self { remaining, retry_after, reset_after, .. } = *self;
            let verdict =
                RawDecision { allowed: false, remaining, retry_after, reset_after, delay: 0 };
            return verdict.into_decision(quota, Source::DenyCache);
        }
        let drained = if self.units == 0 {
            0
        } else {
            mul_div_ceil(self.units, quota.window_micros(), quota.limit())
        };
        let left = |told: u64| {
            self.received.saturating_add(told).saturating_add(drained).saturating_sub(now)
        };
        let reset_after = left(self.reset_after);
        // What was left at the denial has been asked for since.
        let told = if self.units == 0 { self.remaining } else { 0 };
        let verdict = RawDecision {
            allowed: false,
            remaining: remaining(quota, told, reset_after),
            retry_after: left(self.retry_after),
            reset_after,
            delay: 0,
        };
        verdict.into_decision(quota, Source::DenyCache)
    }
}

impl Left {
    pub(super) fn decision(self, charge: &Charge<'_>, now: u64) -> Decision {
        let reset_after = self.reset_at.saturating_sub(now);
        let remaining = remaining(charge.quota(), self.remaining, reset_after);
        let verdict =
            RawDecision { remaining, reset_after, ..RawDecision::untouched(charge.quota()) };
        verdict.into_decision(charge.quota(), Source::DenyCache)
    }
}

impl Table {
    pub(super) fn new(max_entries: usize) -> Self {
        let ways = WAYS.min(max_entries);
        let sets = (max_entries / WAYS).max(1);
        let shards = SHARDS.min(sets);
        let shard = || Shard {
            sets: std::iter::repeat_with(Vec::new).take(sets / shards).collect(),
            generation: 0,
            serial: NonZeroU64::MIN,
        };
        Self {
            shards: std::iter::repeat_with(|| Mutex::new(shard())).take(shards).collect(),
            ways,
            entries: AtomicUsize::new(0),
            secret: std::array::from_fn(|_| random()),
        }
    }

    /// How many entries there are, expired ones among them.
    pub(super) fn entries(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    pub(super) fn name(&self, charge: &Charge<'_>) -> Name {
        let (key, policy, quota) =
            (charge.key().as_bytes(), charge.policy().as_bytes(), charge.quota());
        // In one piece, on the stack if it is not unusually long: bit by bit it would take twice
        // the time of all the rest.
        let length = key.len() + 1 + policy.len();
        let (mut short, mut long) = ([0; 192], Vec::new());
        let bytes = match short.get_mut(..length + QUOTA_BYTES) {
            Some(bytes) => bytes,
            None => {
                long.resize(length + QUOTA_BYTES, 0);
                &mut long
            }
        };
        bytes[..key.len()].copy_from_slice(key);
        // No UTF-8 text has this byte, so a key and a policy cannot flow into each other.
        bytes[key.len()] = 0xff;
        bytes[key.len() + 1..length].copy_from_slice(policy);
        bytes[length] = 0xff;
        let numbers = [quota.limit(), quota.window_micros(), quota.burst()];
        let kind =
            [quota.algorithm() as u8, quota.encoding() as u8, u8::from(quota.count_denied())];
        for (place, number) in bytes[length + 1..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes[length + QUOTA_BYTES - kind.len()..].copy_from_slice(&kind);
        let hash = SipHasher13::new_with_keys(self.secret[0], self.secret[1]).hash(bytes);
        let fingerprint = Fingerprint([hash.h1, hash.h2]);
        Name { count: CountId::of_bytes(&bytes[..length]), fingerprint }
    }

    /// All charges of a request as one number.
    pub(super) fn request(
        &self,
        charges: &[Charge<'_>],
        names: impl Iterator<Item = Name>,
    ) -> u128 {
        let mut hasher = SipHasher13::new_with_keys(self.secret[1], self.secret[0]);
        for (charge, name) in charges.iter().zip(names) {
            let Fingerprint(parts) = name.fingerprint;
            for part in parts {
                hasher.write_u64(part);
            }
            hasher.write_u64(charge.cost());
        }
        hasher.finish128().as_u128()
    }

    /// The denial that holds for this charge, or else a ticket for the store.
    pub(super) fn find(&self, query: &Query<'_>) -> Found {
        let (mut shard, set) = self.lock(query.name.count);
        let Some(entry) = covering(&mut shard.sets[set], query) else {
            return Err(shard.ticket(query, set));
        };
        entry.used = true;
        let companions = entry
            .companions
            .as_ref()
            .filter(|companions| query.request == Some(companions.request));
        Ok((
            entry.decision(query.charge, query.now),
            companions.map(|companions| companions.left.to_vec()),
        ))
    }

    /// A ticket for the store, while entries are stale.
    pub(super) fn ticket(&self, query: &Query<'_>) -> Ticket {
        let (mut shard, set) = self.lock(query.name.count);
        shard.ticket(query, set)
    }

    /// Counts a denial from here that the store must record later. True if it is the first one
    /// since the last record.
    pub(super) fn count_denial(&self, query: &Query<'_>) -> bool {
        let (mut shard, set) = self.lock(query.name.count);
        let Some(entry) = covering(&mut shard.sets[set], query) else { return false };
        let is_first = entry.units == 0;
        entry.units = entry.units.saturating_add(query.charge.cost());
        is_first
    }

    /// Takes the units of denials that the store has not recorded yet, to record them.
    pub(super) fn take_unrecorded(&self, name: Name) -> u64 {
        let (mut shard, set) = self.lock(name.count);
        let entries =
            shard.sets[set].iter_mut().filter(|entry| entry.fingerprint == name.fingerprint);
        entries.map(|entry| std::mem::take(&mut entry.units)).fold(0, u64::saturating_add)
    }

    /// The store has admitted this charge: denials of it have a longer wait now.
    pub(super) fn admitted(&self, ticket: Ticket, charge: &Charge<'_>) {
        let Name { count, fingerprint } = ticket.name;
        let keeps_own = is_bucket(charge.quota());
        if ticket.has_others {
            let is_own = |entry: &Entry| keeps_own && entry.cost == charge.cost();
            self.forget_if(count, false, |entry| {
                entry.fingerprint == fingerprint && !is_own(entry)
            });
        }
        if let (Some(serial), false) = (ticket.bucket_entry, ticket.counted) {
            let (mut shard, set) = self.lock(count);
            if let Some(entry) = shard.sets[set].iter_mut().find(|entry| entry.serial == serial) {
                entry.count_ask(charge.quota(), charge.cost());
            }
        }
    }

    /// The store has not answered a request that is counted in an entry: that entry proves nothing
    /// any more.
    pub(super) fn unanswered(&self, ticket: Ticket) {
        if let (Some(serial), true) = (ticket.bucket_entry, ticket.counted) {
            self.forget_if(ticket.name.count, false, |entry| entry.serial == serial);
        }
    }

    /// Keeps a denial, unless something has happened since it was asked for that may have made it
    /// wrong.
    pub(super) fn keep(&self, ticket: Ticket, quota: &Quota, denial: Denial) {
        let now = denial.received;
        let (mut shard, set) = self.lock(ticket.name.count);
        if shard.generation != ticket.generation || self.ways == 0 {
            drop(shard);
            return self.unanswered(ticket);
        }
        shard.serial = shard.serial.saturating_add(1);
        let serial = shard.serial;
        let Some(mut entry) = Entry::new(ticket, serial, quota, denial) else { return };
        let set = &mut shard.sets[set];
        let before = set.len();
        let of_it = |other: &Entry| other.fingerprint == entry.fingerprint;
        // Two denials in flight at the same time: of a bucket, the one that holds longer has
        // counted later requests.
        let is_better = |other: &Entry| {
            other.epoch == entry.epoch
                && entry.sent < other.received
                && other.until > entry.until
                && is_bucket(quota)
        };
        if set.iter().any(|other| of_it(other) && other.cost == entry.cost && is_better(other)) {
            return;
        }
        if quota.count_denied() {
            // Denials that were counted during the call.
            let unrecorded =
                set.iter_mut().filter(|other| other.fingerprint == ticket.name.fingerprint);
            entry.units = unrecorded
                .map(|other| std::mem::take(&mut other.units))
                .fold(0, u64::saturating_add);
        }
        let of_it = |other: &Entry| other.fingerprint == entry.fingerprint;
        // The new one covers these, or replaces them.
        set.retain(|other| {
            !(of_it(other) && other.cost >= entry.cost && other.until <= entry.until)
        });
        set.retain(|other| !(of_it(other) && other.cost == entry.cost));
        let costs = set.iter().filter(|other| of_it(other)).count();
        if costs >= COSTS {
            drop_one(set, of_it);
        } else if set.len() >= self.ways {
            make_room(set, now);
        }
        set.push(entry);
        let (after, count) = (set.len(), &self.entries);
        if after > before {
            count.fetch_add(after - before, Ordering::Relaxed);
        } else {
            count.fetch_sub(before - after, Ordering::Relaxed);
        }
    }

    /// Units of this count may have been freed.
    pub(super) fn forget(&self, count: CountId) {
        self.forget_if(count, true, |entry| entry.count == count);
    }

    /// The store is asked by this quota: it may count in another way than a quota that a denial of
    /// the same count went by, and so free what that still counts.
    pub(super) fn forget_other_quotas(&self, name: Name) {
        self.forget_if(name.count, false, |entry| {
            entry.count == name.count && entry.fingerprint != name.fingerprint
        });
    }

    /// Units of any count may have been freed.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.generation += 1;
            let dropped: usize = shard.sets.iter().map(Vec::len).sum();
            // A flood that is over gives its memory back.
            shard.sets.iter_mut().for_each(|set| *set = Vec::new());
            self.entries.fetch_sub(dropped, Ordering::Relaxed);
        }
    }

    fn forget_if(&self, count: CountId, surely: bool, is_wrong: impl Fn(&Entry) -> bool) {
        let (mut shard, set) = self.lock(count);
        let set = &mut shard.sets[set];
        let before = set.len();
        set.retain(|entry| !is_wrong(entry));
        let dropped = before - set.len();
        if surely || dropped > 0 {
            shard.generation += 1;
            self.entries.fetch_sub(dropped, Ordering::Relaxed);
        }
    }

    /// The shard of a count, and its set in there.
    fn lock(&self, count: CountId) -> (MutexGuard<'_, Shard>, usize) {
        let [low, high] =
            halves(u128::from(count.0 ^ self.secret[2]) * u128::from(self.secret[3] | 1));
        let [shard_bits, set_bits] = [low ^ high, (low ^ high).rotate_right(32)];
        let shard = scaled(shard_bits, self.shards.len());
        let shard = self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner);
        let set = scaled(set_bits, shard.sets.len());
        (shard, set)
    }
}

/// The denial that covers a cost: its own, or, of a count with many costs, the longest one of a
/// lower cost.
fn covering<'a>(set: &'a mut [Entry], query: &Query<'_>) -> Option<&'a mut Entry> {
    let cost = query.charge.cost();
    let holds = |entry: &Entry| {
        entry.fingerprint == query.name.fingerprint
            && entry.cost <= cost
            && entry.epoch == query.epoch
            && query.now < entry.until
    };
    let (mut found, mut lower): (Option<usize>, usize) = (None, 0);
    for (at, entry) in set.iter().enumerate().filter(|(_, entry)| holds(entry)) {
        if entry.cost == cost {
            return Some(&mut set[at]);
        }
        lower += 1;
        if found.is_none_or(|best| set[best].until < entry.until) {
            found = Some(at);
        }
    }
    found.filter(|_| lower >= COSTS).map(|at| &mut set[at])
}

/// What is left by now of what the store told. A bucket's level follows from when it will have
/// drained; of other counts nobody knows when which unit leaves, so it stays as told: not more than
/// there is.
fn remaining(quota: &Quota, told: u64, reset_after: u64) -> u64 {
    if !is_bucket(quota) {
        return told;
    }
    let level = (u128::from(reset_after) * u128::from(quota.limit()))
        .div_ceil(u128::from(quota.window_micros()));
    quota.burst().saturating_sub(u64::try_from(level).unwrap_or(u64::MAX)).max(told)
}

/// The first to go is what has expired, then what was of no use lately; of these what expires
/// first.
fn make_room(set: &mut Vec<Entry>, now: u64) {
    if set.iter().any(|entry| entry.until <= now) {
        set.retain(|entry| entry.until > now);
        return;
    }
    if set.iter().all(|entry| entry.used) {
        for entry in set.iter_mut() {
            entry.used = false;
        }
    }
    drop_one(set, |entry| !entry.used);
}

/// Of these entries, drops the one that expires first.
fn drop_one(set: &mut Vec<Entry>, of: impl Fn(&Entry) -> bool) {
    let candidates = set.iter().enumerate().filter(|(_, entry)| of(entry));
    if let Some((at, _)) = candidates.min_by_key(|(_, entry)| entry.until) {
        set.swap_remove(at);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the two halves, each by itself")]
fn halves(product: u128) -> [u64; 2] {
    [product as u64, (product >> 64) as u64]
}

/// A number below `size`, by the upper half of these bits.
fn scaled(bits: u64, size: usize) -> usize {
    usize::try_from(((bits >> 32) * size as u64) >> 32).unwrap_or(0)
}

fn is_bucket(quota: &Quota) -> bool {
    matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket)
}

/// How much of a wait surely passes: clocks that are set by NTP go up to one part in 2,000 faster
/// or slower than each other.
fn surely(wait: u64) -> u64 {
    wait - wait.div_ceil(1_000)
}

fn mul_div_floor(a: u64, b: u64, m: u64) -> u64 {
    u64::try_from(u128::from(a) * u128::from(b) / u128::from(m)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_name_tells_key_policy_and_quota_apart_and_its_count_is_the_one_of_the_news() {
        let quota = |limit| Quota::token_bucket(limit, Duration::from_secs(60)).expect("valid");
        let (one, two, burst) = (quota(1), quota(2), quota(1).with_burst(2).expect("a bucket"));
        let leaky = Quota::leaky_bucket(1, Duration::from_secs(60)).expect("valid");
        let (long, longer) = ("k".repeat(512), "k".repeat(513));
        let table = Table::new(8);
        let mut seen = std::collections::HashSet::new();
        for quota in [&one, &two, &burst, &leaky] {
            for (key, policy) in
                [("ab", "c"), ("a", "bc"), (&long, "c"), (&longer, "c"), (&long, &long)]
            {
                let charge = Charge::new(key, quota).with_policy(policy);
                let name = table.name(&charge);
                assert_eq!(name.count, CountId::of(&charge));
                assert!(seen.insert(name.fingerprint));
            }
        }
    }
}
