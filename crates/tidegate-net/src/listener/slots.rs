//! Connection slots of a listener. When all are taken, a new connection gets that of the connection
//! that has been idle for longest.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::closed::CloseReason;
use super::connection::Connection;

/// Slots beyond the maximum for connections that are being closed for a new one.
const SPARE_SLOTS: usize = 1_024;
/// Mark of a slot that is free, or whose connection is busy.
const BUSY: u64 = 0;

/// Connection slots of one listener.
pub(super) struct ConnectionSlots {
    max: usize,
    max_per_address: usize,
    start: Instant,
    /// Time since which each connection is idle, in milliseconds after `start`, from 1. They are
    /// next to each other, so that a search is fast.
    idle_since: Box<[AtomicU64]>,
    table: Mutex<SlotTable>,
}

struct SlotTable {
    free: Vec<usize>,
    entries: Vec<SlotEntry>,
    /// Connections without those that are being closed for a new one.
    connections: usize,
    /// Slots of each address, or network of IPv6 addresses, with connections.
    networks: HashMap<String, BTreeSet<usize>>,
}

#[derive(Default)]
struct SlotEntry {
    /// `None` if the slot is free, or if its connection is being closed for a new one.
    connection: Option<Arc<Connection>>,
    network: Option<String>,
}

/// Accepted connection, whose slot is free again on drop.
pub struct Accepted {
    pub(super) connection: Arc<Connection>,
    /// Whether it is a connection of a Unix socket.
    pub(super) is_unix: bool,
}

impl ConnectionSlots {
    pub(super) fn new(max: usize, max_per_address: usize) -> Arc<Self> {
        let size = max + SPARE_SLOTS;
        Arc::new(Self {
            max,
            max_per_address,
            start: Instant::now(),
            idle_since: (0..size).map(|_| AtomicU64::new(BUSY)).collect(),
            table: Mutex::new(SlotTable {
                free: (0..size).rev().collect(),
                entries: std::iter::repeat_with(SlotEntry::default).take(size).collect(),
                connections: 0,
                networks: HashMap::new(),
            }),
        })
    }

    /// Takes a slot for a connection from a network. Without one, the connection is not limited per
    /// address.
    pub(super) fn take(self: &Arc<Self>, network: Option<String>) -> Result<Accepted, CloseReason> {
        let mut table = self.table();
        self.make_room_in(&mut table, network.as_ref())?;
        if table.connections >= self.max {
            let idle = self.longest_idle(0..self.idle_since.len()).ok_or(CloseReason::Full)?;
            self.evict(&mut table, idle);
        }
        let index = table.free.pop().ok_or(CloseReason::Full)?;
        let connection = Arc::new(Connection::new(Arc::clone(self), index));
        table.entries[index].connection = Some(Arc::clone(&connection));
        table.connections += 1;
        table.enter(index, network);
        self.mark(index, Some(Instant::now()));
        Ok(Accepted { connection, is_unix: false })
    }

    /// Closes an idle connection of the network if it has as many as are allowed.
    fn make_room_in(
        &self,
        table: &mut SlotTable,
        network: Option<&String>,
    ) -> Result<(), CloseReason> {
        let slots = network.and_then(|name| table.networks.get(name));
        let Some(slots) = slots.filter(|slots| slots.len() >= self.max_per_address) else {
            return Ok(());
        };
        let idle = self.longest_idle(slots.iter().copied()).ok_or(CloseReason::FullForAddress)?;
        self.evict(table, idle);
        Ok(())
    }

    /// Closes the connection that has been idle for longest, if any.
    pub(super) fn evict_idle(&self) {
        let mut table = self.table();
        if let Some(idle) = self.longest_idle(0..self.idle_since.len()) {
            self.evict(&mut table, idle);
        }
    }

    fn longest_idle(&self, slots: impl Iterator<Item = usize>) -> Option<usize> {
        let marks = slots.map(|index| (self.idle_since[index].load(Ordering::Relaxed), index));
        marks.filter(|(mark, _)| *mark != BUSY).min().map(|(_, index)| index)
    }

    fn evict(&self, table: &mut SlotTable, index: usize) {
        if let Some(connection) = table.remove(index) {
            connection.close(CloseReason::Evicted);
        }
        // After that, the connection no longer marks its slot.
        self.mark(index, None);
    }

    /// Records since when the connection of a slot is idle; `None` if it is busy.
    pub(super) fn mark(&self, index: usize, idle_since: Option<Instant>) {
        let millis = |since: Instant| since.duration_since(self.start).as_millis();
        let mark = idle_since
            .map_or(BUSY, |since| 1 + u64::try_from(millis(since)).unwrap_or(u64::MAX - 1));
        self.idle_since[index].store(mark, Ordering::Relaxed);
    }

    fn table(&self) -> MutexGuard<'_, SlotTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SlotTable {
    /// Counts the connection of a slot for its network.
    fn enter(&mut self, index: usize, network: Option<String>) {
        if let Some(name) = &network {
            self.networks.entry(name.clone()).or_default().insert(index);
        }
        self.entries[index].network = network;
    }

    /// Removes the connection of a slot, if it has one.
    fn remove(&mut self, index: usize) -> Option<Arc<Connection>> {
        let SlotEntry { connection, network } = std::mem::take(&mut self.entries[index]);
        let connection = connection?;
        self.connections -= 1;
        if let Some(name) = network
            && let Some(slots) = self.networks.get_mut(&name)
        {
            slots.remove(&index);
            if slots.is_empty() {
                self.networks.remove(&name);
            }
        }
        Some(connection)
    }
}

impl Accepted {
    /// Counts the connection for a network, which was not known when the slot was taken.
    pub(super) fn enter(&self, network: Option<String>) -> Result<(), CloseReason> {
        let Connection { slots, slot, .. } = &*self.connection;
        let mut table = slots.table();
        if table.entries[*slot].connection.is_none() {
            return Err(CloseReason::Evicted);
        }
        slots.make_room_in(&mut table, network.as_ref())?;
        table.enter(*slot, network);
        Ok(())
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        let Connection { slots, slot, .. } = &*self.connection;
        let mut table = slots.table();
        table.remove(*slot);
        slots.mark(*slot, None);
        table.free.push(*slot);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn take(
        slots: &Arc<ConnectionSlots>,
        network: Option<&str>,
    ) -> Result<Accepted, CloseReason> {
        // Each connection is idle for longer than the next.
        tokio::time::advance(Duration::from_millis(1)).await;
        slots.take(network.map(str::to_owned))
    }

    fn busy(connection: &Connection) {
        connection.start_http2();
        // The head of a request.
        connection.receive(&[0, 0, 0, 1, 5, 0, 0, 0, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connection_makes_room_for_a_new_one() {
        let slots = ConnectionSlots::new(3, 2);
        let first = take(&slots, Some("a")).await.expect("a slot");
        let second = take(&slots, Some("a")).await.expect("a slot");
        let third = take(&slots, Some("b")).await.expect("a slot");
        busy(&first.connection);
        // The address has two.
        let fourth = take(&slots, Some("a")).await.expect("the slot of the second");
        assert_eq!(second.connection.closing(), Some(CloseReason::Evicted));
        // All have three.
        let fifth = take(&slots, Some("c")).await.expect("the slot of the third");
        assert_eq!(third.connection.closing(), Some(CloseReason::Evicted));
        busy(&fourth.connection);
        assert_eq!(take(&slots, Some("a")).await.err(), Some(CloseReason::FullForAddress));
        busy(&fifth.connection);
        assert_eq!(take(&slots, None).await.err(), Some(CloseReason::Full));
        // A closed connection no longer marks its slot as idle.
        second.connection.start_http2();
        assert_eq!(take(&slots, None).await.err(), Some(CloseReason::Full));
        drop((second, third));
        assert_eq!(take(&slots, None).await.err(), Some(CloseReason::Full));
        drop(fourth);
        take(&slots, Some("a")).await.expect("the free slot");
        drop((first, fifth));
        let table = slots.table();
        assert_eq!((table.connections, table.networks.len()), (0, 0));
        assert_eq!(table.free.len(), 3 + SPARE_SLOTS);
    }

    #[tokio::test(start_paused = true)]
    async fn network_of_a_slot_can_be_named_later() {
        let slots = ConnectionSlots::new(4, 1);
        let first = take(&slots, None).await.expect("a slot");
        let second = take(&slots, None).await.expect("a slot");
        assert_eq!(first.enter(Some("a".to_owned())), Ok(()));
        // The first connection is idle, and the address has one slot.
        assert_eq!(second.enter(Some("a".to_owned())), Ok(()));
        assert_eq!(first.connection.closing(), Some(CloseReason::Evicted));
        assert_eq!(first.enter(Some("b".to_owned())), Err(CloseReason::Evicted));
        busy(&second.connection);
        let third = take(&slots, None).await.expect("a slot");
        assert_eq!(third.enter(Some("a".to_owned())), Err(CloseReason::FullForAddress));
        assert_eq!(third.enter(Some("b".to_owned())), Ok(()));
        drop((first, second, third));
        let table = slots.table();
        assert_eq!((table.connections, table.networks.len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_do_not_close_are_bounded() {
        let slots = ConnectionSlots::new(1, 1);
        let mut slow = Vec::new();
        for _ in 0..=SPARE_SLOTS {
            slow.push(take(&slots, None).await.expect("a slot"));
        }
        assert_eq!(take(&slots, None).await.err(), Some(CloseReason::Full));
        drop(slow);
        take(&slots, None).await.expect("a slot");
    }
}
