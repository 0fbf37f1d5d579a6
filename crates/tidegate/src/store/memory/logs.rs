//! [`Logs`]: the sliding logs of one shard, which do not fit into a [`PackedState`].

use super::state::{CounterKind, PackedState};
use crate::algorithm::SlidingLog;

/// The logs of many keys, each at a stable index. Allocates nothing while it is empty.
#[derive(Debug, Default)]
pub(super) struct Logs(Option<Box<LogSlab>>);

#[derive(Debug, Default)]
struct LogSlab {
    logs: Vec<SlidingLog>,
    free: Vec<u32>,
}

impl Logs {
    /// Drops the log of a removed key, if it has one. Returns the number of entries that its memory
    /// had room for.
    pub(super) fn remove(&mut self, state: PackedState) -> usize {
        let Some(slab) = self.0.as_mut().filter(|_| state.is_of(CounterKind::Log)) else {
            return 0;
        };
        let removed = std::mem::take(&mut slab.logs[state.log_index() as usize]);
        slab.free.push(state.log_index());
        if slab.free.len() == slab.logs.len() {
            self.0 = None;
        }
        removed.capacity()
    }

    /// Returns the number of entries that the memory of a key's log has room for, if it has one.
    pub(super) fn capacity_of(&self, state: PackedState) -> usize {
        let slab = self.0.as_ref().filter(|_| state.is_of(CounterKind::Log));
        slab.map_or(0, |slab| slab.logs[state.log_index() as usize].capacity())
    }

    /// Returns whether most of the slab is free, so that [compacting](Self::move_to) it pays off.
    pub(super) fn is_sparse(&self) -> bool {
        self.0.as_ref().is_some_and(|slab| slab.free.len() > slab.logs.len() / 2 + 8)
    }

    /// Moves the log of this state to another slab. Returns the updated state.
    pub(super) fn move_to(&mut self, target: &mut Logs, state: PackedState) -> PackedState {
        if !state.is_of(CounterKind::Log) {
            return state;
        }
        let index = target.allocate();
        target.put(index, self.take(state.log_index()));
        state.with_log_index(index)
    }

    /// Returns the number of entries that the memory of all logs has room for.
    #[cfg(test)]
    pub(super) fn allocated(&self) -> usize {
        self.0.iter().flat_map(|slab| &slab.logs).map(SlidingLog::capacity).sum()
    }

    pub(super) fn allocate(&mut self) -> u32 {
        let slab = self.0.get_or_insert_default();
        slab.free.pop().unwrap_or_else(|| {
            slab.logs.push(SlidingLog::default());
            // A shard never has room for 2^32 keys.
            u32::try_from(slab.logs.len() - 1).unwrap_or(u32::MAX)
        })
    }

    pub(super) fn take(&mut self, index: u32) -> SlidingLog {
        let Some(slab) = &mut self.0 else { return SlidingLog::default() };
        std::mem::take(&mut slab.logs[index as usize])
    }

    pub(super) fn put(&mut self, index: u32, log: SlidingLog) {
        if let Some(slab) = &mut self.0 {
            slab.logs[index as usize] = log;
        }
    }
}
