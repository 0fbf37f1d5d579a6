//! Slots of a cluster: the slot of a key (CRC16 of its hash tag), the [`SlotMap`] of owners, and
//! [`SlotMoves`], those with a new owner, for the log. While a cluster is resharded, slots move one
//! by one, so that they are collected and logged together.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::charge::Charge;
use crate::key::redis_key;
use crate::store::redis::client::NodeClient;

/// Number of slots of a cluster.
pub(crate) const SLOTS: usize = 16_384;

/// Returns the slot of a Redis key.
pub(crate) fn slot_of(redis_key: &str) -> u16 {
    crc16(hash_tag(redis_key).bytes()) % 16_384
}

/// Returns the slot of the count of a charge, which is that of all counts of its key.
pub(crate) fn slot_of_charge(charge: &Charge<'_>) -> u16 {
    slot_of_user_key(charge.key())
}

/// Returns the slot of a user's key. Formats the Redis key only if it has escapes.
fn slot_of_user_key(key: &str) -> u16 {
    if key.bytes().any(|byte| b"%{}".contains(&byte)) {
        return slot_of(&redis_key("", key, ""));
    }
    crc16(key.bytes()) % 16_384
}

/// Returns the text between the first `{` and the next `}`, or the whole key if it is empty.
fn hash_tag(key: &str) -> &str {
    let tag =
        key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or("", |(tag, _)| tag);
    if tag.is_empty() { key } else { tag }
}

fn crc16(bytes: impl Iterator<Item = u8>) -> u16 {
    bytes.fold(0, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) ^ u16::from(byte))])
}

static TABLE: [u16; 256] = table();

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        #[expect(clippy::cast_possible_truncation, reason = "below 256")]
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
}

/// Owner of each slot.
#[derive(Clone)]
pub(crate) struct SlotMap {
    nodes: Vec<Arc<NodeClient>>,
    /// Index into `nodes` for each slot, or `UNASSIGNED`.
    owners: Box<[u16]>,
    /// Number of changes of the owner, for each slot.
    changes: Box<[u32]>,
}

const UNASSIGNED: u16 = u16::MAX;

impl SlotMap {
    /// Creates a map from ranges: first slot, last slot, owner.
    pub(crate) fn new(ranges: impl IntoIterator<Item = (u16, u16, Arc<NodeClient>)>) -> Self {
        let (owners, changes) = (vec![UNASSIGNED; SLOTS].into(), vec![0; SLOTS].into());
        let mut map = Self { nodes: Vec::new(), owners, changes };
        for (first, last, owner) in ranges {
            let owner = map.index_of(&owner);
            if let Some(slots) = map.owners.get_mut(usize::from(first)..=usize::from(last)) {
                slots.fill(owner);
            }
        }
        map
    }

    pub(crate) fn owner(&self, slot: u16) -> Option<&Arc<NodeClient>> {
        self.nodes.get(usize::from(*self.owners.get(usize::from(slot))?))
    }

    pub(crate) fn changes_of(&self, slot: u16) -> u32 {
        self.changes.get(usize::from(slot)).copied().unwrap_or(0)
    }

    /// Continues the change counts of an earlier map. Returns the slots that have a new owner.
    pub(crate) fn continue_from(&mut self, before: &Self) -> Vec<u16> {
        let is_moved = |slot: &u16| match (self.owner(*slot), before.owner(*slot)) {
            (Some(one), Some(another)) => !Arc::ptr_eq(one, another),
            (one, another) => one.is_some() || another.is_some(),
        };
        let moved: Vec<u16> = (0..).take(self.owners.len()).filter(is_moved).collect();
        self.changes.clone_from(&before.changes);
        for slot in &moved {
            let changes = &mut self.changes[usize::from(*slot)];
            *changes = changes.wrapping_add(1);
        }
        moved
    }

    pub(crate) fn nodes(&self) -> &[Arc<NodeClient>] {
        &self.nodes
    }

    /// Returns the nodes, each with the number of its slots.
    pub(crate) fn nodes_with_slots(&self) -> Vec<(Arc<NodeClient>, u16)> {
        let mut nodes: Vec<_> = self.nodes.iter().map(|node| (Arc::clone(node), 0)).collect();
        for owner in &self.owners {
            if let Some((_, slots)) = nodes.get_mut(usize::from(*owner)) {
                *slots += 1;
            }
        }
        nodes
    }

    /// Returns the map with a new owner of one slot; `None` if that node owns it already.
    pub(crate) fn with_owner(&self, slot: u16, node: &Arc<NodeClient>) -> Option<Self> {
        if self.owner(slot).is_some_and(|owner| Arc::ptr_eq(owner, node)) {
            return None;
        }
        let mut map = self.clone();
        *map.owners.get_mut(usize::from(slot))? = map.index_of(node);
        Some(map)
    }

    fn index_of(&mut self, node: &Arc<NodeClient>) -> u16 {
        let existing = self.nodes.iter().position(|other| Arc::ptr_eq(other, node));
        let index = existing.unwrap_or_else(|| {
            self.nodes.push(Arc::clone(node));
            self.nodes.len() - 1
        });
        u16::try_from(index).unwrap_or(UNASSIGNED)
    }
}

/// Slots that have moved since the last log line.
#[derive(Default)]
pub(crate) struct SlotMoves {
    /// Slots by their old and new owner.
    pending: BTreeMap<(String, String), Vec<u16>>,
    logged_at: Option<Instant>,
}

/// Minimum time between two logs.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of ranges in one log line.
const MAX_RANGES: usize = 8;

impl SlotMoves {
    /// Adds a slot. An owner is `None` if no node serves the slot.
    pub(crate) fn add(&mut self, slot: u16, from: Option<String>, to: Option<String>) {
        let name = |owner: Option<String>| owner.unwrap_or_else(|| "no node".to_owned());
        self.pending.entry((name(from), name(to))).or_default().push(slot);
    }

    /// Takes the slots that have moved, unless some were just taken. The caller logs them without
    /// its lock, because a log line may block.
    pub(crate) fn take_due(&mut self, now: Instant) -> BTreeMap<(String, String), Vec<u16>> {
        let is_recent = |at: Instant| now.duration_since(at) < LOG_INTERVAL;
        if self.pending.is_empty() || self.logged_at.is_some_and(is_recent) {
            return BTreeMap::new();
        }
        self.logged_at = Some(now);
        std::mem::take(&mut self.pending)
    }
}

/// Logs slots that have moved.
pub(crate) fn log(moves: BTreeMap<(String, String), Vec<u16>>) {
    for ((from, to), mut slots) in moves {
        let (count, slots) = (slots.len(), ranges(&mut slots));
        tracing::info!(from, to, count, slots, "slots have a new owner");
    }
}

/// Returns slots as text, such as `7 100-199`.
fn ranges(slots: &mut Vec<u16>) -> String {
    slots.sort_unstable();
    slots.dedup();
    let mut text = String::new();
    let runs = slots.chunk_by(|one, next| one + 1 == *next);
    for (index, run) in runs.enumerate() {
        let (first, last) = (run[0], run[run.len() - 1]);
        let space = if index == 0 { "" } else { " " };
        let _ = match index {
            MAX_RANGES => write!(text, " …"),
            _ if first == last => write!(text, "{space}{first}"),
            _ => write!(text, "{space}{first}-{last}"),
        };
        if index == MAX_RANGES {
            break;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_match_redis() {
        // The check value of CRC16/XMODEM, and results of CLUSTER KEYSLOT.
        assert_eq!(crc16(b"123456789".iter().copied()), 0x31C3);
        assert_eq!(slot_of("foo"), 12_182);
        assert_eq!(slot_of("rate_limit:{foo}:per-user"), 12_182);
        assert_eq!(slot_of("foo{}{bar}"), crc16("foo{}{bar}".bytes()) % 16_384);
        assert_eq!(slot_of("foo{bar}{zap}"), slot_of("bar"));
        for key in ["foo", "user:42", "{foo}", "}{", "100%", "élan"] {
            assert_eq!(
                slot_of_user_key(key),
                slot_of(&redis_key("rate_limit", key, "per-user")),
                "{key}"
            );
        }
    }

    #[test]
    fn slots_that_move_one_by_one_are_logged_together() {
        let (mut moves, start) = (SlotMoves::default(), Instant::now());
        let (a, b) = (|| Some("a".to_owned()), || Some("b".to_owned()));
        moves.add(7, a(), b());
        let first = moves.take_due(start);
        assert_eq!(first[&("a".to_owned(), "b".to_owned())], [7], "at once");
        for slot in [102, 100, 101, 100, 9] {
            moves.add(slot, a(), b());
        }
        moves.add(5, b(), None);
        assert!(moves.take_due(start + LOG_INTERVAL / 2).is_empty(), "too soon");
        let mut later = moves.take_due(start + LOG_INTERVAL);
        let mut slots = later.remove(&("a".to_owned(), "b".to_owned())).expect("moved");
        assert_eq!(ranges(&mut slots), "9 100-102");
        assert_eq!(later[&("b".to_owned(), "no node".to_owned())], [5]);
        assert!(moves.take_due(start + 9 * LOG_INTERVAL).is_empty(), "nothing has moved");
    }

    #[test]
    fn a_log_line_has_a_maximum_length() {
        let mut slots: Vec<u16> = (0..100).map(|number| 2 * number).collect();
        assert_eq!(ranges(&mut slots), "0 2 4 6 8 10 12 14 …");
    }
}
