//! [`Blocks`]: the keys that have exceeded a limit with `block_for`.

use std::collections::BTreeMap;

use spin::mutex::{SpinMutex, SpinMutexGuard};

use super::SHARDS;
use super::capacity::{Capacity, Lack, RoomReservation};
use super::context::ChargeContext;
use super::table::Table;
use crate::action::Action;
use crate::algorithm::{Block, RawDecision};
use crate::key::Fingerprint;

/// Minimum interval between two sweeps of a shard, which read all of its blocks. Microseconds.
const SWEEP_INTERVAL: u64 = 1_000_000;

/// The blocks of a store, in the same shards as the counts. They are apart from them, because
/// decisions without `block_for` do not need them. Each takes the room of a key.
///
/// The lock of a shard's blocks is only taken while that of its counts is held, so that it is
/// always free.
#[derive(Debug)]
pub(super) struct Blocks(Box<[SpinMutex<BlockMap>]>);

/// The blocks of one shard.
#[derive(Debug, Default)]
pub(super) struct BlockMap {
    blocks: BTreeMap<Fingerprint, Block>,
    /// Time of the last sweep.
    swept_at: u64,
}

/// The block of a charge's key.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockOfCharge {
    /// Time until its end; 0 without a block in force.
    pub(super) rest: u64,
    /// Whether the next block of the key takes the room of a key.
    pub(super) is_new: bool,
}

impl Blocks {
    pub(super) fn new() -> Self {
        Self(std::iter::repeat_with(SpinMutex::default).take(SHARDS).collect())
    }

    /// Returns the blocks of a shard. The caller holds the lock of the shard.
    pub(super) fn of_shard(&self, index: usize) -> SpinMutexGuard<'_, BlockMap> {
        self.0[index].lock()
    }

    /// Returns the blocks of the shard of a key. The caller holds the lock of the shard.
    pub(super) fn of_key(&self, fingerprint: Fingerprint) -> SpinMutexGuard<'_, BlockMap> {
        self.of_shard(fingerprint.shard_index(SHARDS))
    }
}

impl BlockMap {
    pub(super) fn get(&self, fingerprint: Fingerprint) -> Option<&Block> {
        self.blocks.get(&fingerprint)
    }

    /// Sets the last block of a key. The caller has counted its room if it is new.
    pub(super) fn set(&mut self, fingerprint: Fingerprint, block: Block) {
        self.blocks.insert(fingerprint, block);
    }

    pub(super) fn remove(&mut self, fingerprint: Fingerprint, capacity: &Capacity) {
        if self.blocks.remove(&fingerprint).is_some() {
            capacity.keys.release(fingerprint.policy_class(), 1);
        }
    }

    /// Removes expired blocks, and in a full store all that have ended. Returns whether there were
    /// any.
    pub(super) fn sweep(&mut self, now: u64, is_full: bool, capacity: &Capacity) -> bool {
        if self.blocks.is_empty() || now.abs_diff(self.swept_at) < SWEEP_INTERVAL {
            return false;
        }
        self.swept_at = now;
        let before = self.blocks.len();
        self.blocks.retain(|fingerprint, block| {
            let is_kept = block.expires_at() > now && !(is_full && block.rest(now) == 0);
            if !is_kept {
                capacity.keys.release(fingerprint.policy_class(), 1);
            }
            is_kept
        });
        self.blocks.len() < before
    }
}

impl ChargeContext<'_> {
    /// Returns the block of the key, if the quota has blocks.
    pub(super) fn block(&self) -> BlockOfCharge {
        if !self.charge.quota().has_blocks() {
            return BlockOfCharge { rest: 0, is_new: false };
        }
        let blocks = self.store.blocks.of_key(self.fingerprint);
        let block = blocks.get(self.fingerprint).map(|block| {
            block.after_step_back(self.now).unwrap_or_else(|| block.clone()).rest(self.now)
        });
        BlockOfCharge { rest: block.unwrap_or(0), is_new: block.is_none() }
    }

    /// Applies the action to a key whose quota may have blocks. Without `starts`, or without room
    /// for it, no block starts.
    pub(super) fn apply_with_block(
        self,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
        starts: bool,
    ) -> Result<RawDecision, Lack> {
        let Self { store, fingerprint, now, action, .. } = self;
        if !self.charge.quota().has_blocks() {
            return self.apply(table, reservation);
        }
        let lengths = self.charge.quota().block_for();
        let mut blocks = store.blocks.of_key(fingerprint);
        match action {
            Action::Reset => blocks.remove(fingerprint, &store.capacity),
            Action::Acquire | Action::Peek => {}
            Action::Refund
            | Action::ChargeUpTo
            | Action::Report
            | Action::Commit
            | Action::Release
            | Action::Renew => {
                return self.apply(table, reservation);
            }
        }
        let stored = blocks.get(fingerprint);
        let after_step_back = stored.and_then(|block| block.after_step_back(now));
        let previous = after_step_back.as_ref().or(stored);
        let rest = previous.map_or(0, |block| block.rest(now));
        if rest > 0 {
            let unspent = Self { all_fit: false, ..self };
            let decision = unspent.apply(table, reservation)?.blocked(rest);
            if let Some(block) = after_step_back.filter(|_| action == Action::Acquire) {
                blocks.set(fingerprint, block);
            }
            return Ok(decision);
        }
        let decision = self.apply(table, reservation)?;
        if decision.allowed || !starts {
            return Ok(decision);
        }
        let block = Block::start(previous, lengths, now);
        let decision = decision.blocked(block.rest(now));
        if stored.is_none() {
            reservation.use_key(fingerprint.policy_class());
        }
        blocks.set(fingerprint, block);
        Ok(decision)
    }
}
