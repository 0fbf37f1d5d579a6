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
    /// Number of entries of all logs.
    entries: usize,
}

impl Logs {
    /// Drops the log of a removed key.
    pub(super) fn remove(&mut self, state: PackedState) {
        if state.is_of(CounterKind::Log)
            && let Some(slab) = &mut self.0
        {
            let removed = std::mem::take(&mut slab.logs[state.log_index() as usize]);
            slab.entries -= removed.entry_count();
            slab.free.push(state.log_index());
            if slab.free.len() == slab.logs.len() {
                self.0 = None;
            }
        }
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
        let log = std::mem::take(&mut slab.logs[index as usize]);
        slab.entries -= log.entry_count();
        log
    }

    pub(super) fn put(&mut self, index: u32, log: SlidingLog) {
        if let Some(slab) = &mut self.0 {
            slab.entries += log.entry_count();
            slab.logs[index as usize] = log;
        }
    }

    /// Returns the number of entries of all logs, 16 bytes each.
    #[inline]
    pub(super) fn entry_count(&self) -> usize {
        self.0.as_ref().map_or(0, |slab| slab.entries)
    }
}
