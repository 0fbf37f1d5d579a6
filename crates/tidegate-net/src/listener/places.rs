//! Places of a listener's connections. When all are taken, a new connection gets that of the
//! connection that has been idle for longest.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::closed::{CloseReason, ClosedConnections};
use super::connection::Connection;

/// Places beyond the maximum for connections that are being closed for a new one.
const SPARE_PLACES: usize = 1_024;
/// Mark of a place that is free, or whose connection is busy.
const BUSY: u64 = 0;
/// Network of connections that are not limited per address.
const NO_NETWORK: u64 = 0;

/// Places of one listener.
pub(super) struct Places {
    max: usize,
    max_per_address: usize,
    start: Instant,
    /// Time since which each connection is idle, in milliseconds after `start`, from 1. They are
    /// next to each other, so that a search is fast.
    idle_since: Box<[AtomicU64]>,
    table: Mutex<Table>,
    closed: Arc<ClosedConnections>,
}

struct Table {
    free: Vec<usize>,
    entries: Vec<Entry>,
    /// Identifier of the network of each connection.
    network_of: Vec<u64>,
    /// Connections without those that are being closed for a new one.
    connections: usize,
    networks: HashMap<String, Network>,
    next_network: u64,
}

/// Address, or network of IPv6 addresses, with connections.
struct Network {
    id: u64,
    connections: usize,
}

#[derive(Default)]
struct Entry {
    /// `None` if the place is free, or if its connection is being closed for a new one.
    connection: Option<Arc<Connection>>,
    network: Option<String>,
}

/// Place of a connection, which is free again on drop.
pub(super) struct Place {
    places: Arc<Places>,
    index: usize,
}

/// Reference of a connection to its place.
pub(super) struct PlaceMark {
    places: Arc<Places>,
    index: usize,
}

impl Places {
    pub(super) fn new(
        max: usize,
        max_per_address: usize,
        closed: Arc<ClosedConnections>,
    ) -> Arc<Self> {
        let size = max + SPARE_PLACES;
        Arc::new(Self {
            max,
            max_per_address,
            start: Instant::now(),
            idle_since: (0..size).map(|_| AtomicU64::new(BUSY)).collect(),
            table: Mutex::new(Table {
                free: (0..size).rev().collect(),
                entries: std::iter::repeat_with(Entry::default).take(size).collect(),
                network_of: vec![NO_NETWORK; size],
                connections: 0,
                networks: HashMap::new(),
                next_network: NO_NETWORK + 1,
            }),
            closed,
        })
    }

    /// Takes a place for a connection from a network. Without one, the connection is not limited
    /// per address.
    pub(super) fn take(
        self: &Arc<Self>,
        network: Option<String>,
    ) -> Result<(Place, Arc<Connection>), CloseReason> {
        let mut table = self.table();
        self.make_room_in(&mut table, network.as_ref())?;
        if table.connections >= self.max {
            self.evict(&mut table, None).ok_or(CloseReason::Full)?;
        }
        let index = table.free.pop().ok_or(CloseReason::Full)?;
        let connection = Arc::new(Connection::new(PlaceMark { places: Arc::clone(self), index }));
        let id = network.as_ref().map_or(NO_NETWORK, |name| table.enter(name));
        table.network_of[index] = id;
        table.entries[index] = Entry { connection: Some(Arc::clone(&connection)), network };
        table.connections += 1;
        self.mark(index, Some(Instant::now()));
        Ok((Place { places: Arc::clone(self), index }, connection))
    }

    /// Closes an idle connection of the network if it has as many as are allowed.
    fn make_room_in(&self, table: &mut Table, network: Option<&String>) -> Result<(), CloseReason> {
        let known = network.and_then(|name| table.networks.get(name));
        let full = known.filter(|network| network.connections >= self.max_per_address);
        let Some(id) = full.map(|network| network.id) else { return Ok(()) };
        self.evict(table, Some(id)).ok_or(CloseReason::FullForAddress)
    }

    /// Closes the connection that has been idle for longest, if any.
    pub(super) fn evict_idle(&self) {
        self.evict(&mut self.table(), None);
    }

    fn evict(&self, table: &mut Table, network: Option<u64>) -> Option<()> {
        let is_candidate =
            |index: usize| network.is_none_or(|network| table.network_of[index] == network);
        let marks = self.idle_since.iter().map(|mark| mark.load(Ordering::Relaxed)).enumerate();
        let idle = marks.filter(|(index, mark)| *mark != BUSY && is_candidate(*index));
        let (index, _) = idle.min_by_key(|(_, mark)| *mark)?;
        let entry = std::mem::take(&mut table.entries[index]);
        table.leave(entry.network);
        if let Some(connection) = entry.connection {
            connection.close(CloseReason::Evicted);
        }
        // After that, the connection no longer marks its place.
        self.mark(index, None);
        Some(())
    }

    fn mark(&self, index: usize, idle_since: Option<Instant>) {
        let millis = |since: Instant| since.duration_since(self.start).as_millis();
        let mark = idle_since
            .map_or(BUSY, |since| 1 + u64::try_from(millis(since)).unwrap_or(u64::MAX - 1));
        self.idle_since[index].store(mark, Ordering::Relaxed);
    }

    pub(super) fn count_closed(&self, reason: CloseReason) {
        tracing::debug!(reason = reason.label(), "connection closed");
        self.closed.count(reason);
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Counts a connection from a network and returns the network's identifier.
    fn enter(&mut self, name: &str) -> u64 {
        if let Some(network) = self.networks.get_mut(name) {
            network.connections += 1;
            return network.id;
        }
        let id = self.next_network;
        self.next_network += 1;
        self.networks.insert(name.to_owned(), Network { id, connections: 1 });
        id
    }

    fn leave(&mut self, name: Option<String>) {
        self.connections -= 1;
        let Some(name) = name else { return };
        if let Some(network) = self.networks.get_mut(&name) {
            network.connections -= 1;
            if network.connections == 0 {
                self.networks.remove(&name);
            }
        }
    }
}

impl PlaceMark {
    /// Records since when the connection is idle; `None` if it is busy.
    pub(super) fn set_idle(&self, since: Option<Instant>) {
        self.places.mark(self.index, since);
    }
}

impl Place {
    /// Counts the connection for a network, which was not known when the place was taken.
    pub(super) fn enter(&self, network: Option<String>) -> Result<(), CloseReason> {
        let mut table = self.places.table();
        if table.entries[self.index].connection.is_none() {
            return Err(CloseReason::Evicted);
        }
        self.places.make_room_in(&mut table, network.as_ref())?;
        let id = network.as_ref().map_or(NO_NETWORK, |name| table.enter(name));
        table.network_of[self.index] = id;
        table.entries[self.index].network = network;
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = self.places.table();
        let entry = std::mem::take(&mut table.entries[self.index]);
        if let Some(connection) = entry.connection {
            table.leave(entry.network);
            drop(connection);
        }
        self.places.mark(self.index, None);
        table.free.push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn take(
        places: &Arc<Places>,
        network: Option<&str>,
    ) -> Result<(Place, Arc<Connection>), CloseReason> {
        // Each connection is idle for longer than the next.
        tokio::time::advance(Duration::from_millis(1)).await;
        places.take(network.map(str::to_owned))
    }

    fn busy(connection: &Connection) {
        connection.start_http2();
        // The head of a request.
        connection.receive(&[0, 0, 0, 1, 5, 0, 0, 0, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connection_makes_room_for_a_new_one() {
        let places = Places::new(3, 2, Arc::default());
        let first = take(&places, Some("a")).await.expect("a place");
        let second = take(&places, Some("a")).await.expect("a place");
        let third = take(&places, Some("b")).await.expect("a place");
        busy(&first.1);
        // The address has two.
        let fourth = take(&places, Some("a")).await.expect("the place of the second");
        assert_eq!(second.1.closing(), Some(CloseReason::Evicted));
        // All have three.
        let fifth = take(&places, Some("c")).await.expect("the place of the third");
        assert_eq!(third.1.closing(), Some(CloseReason::Evicted));
        busy(&fourth.1);
        assert_eq!(take(&places, Some("a")).await.err(), Some(CloseReason::FullForAddress));
        busy(&fifth.1);
        assert_eq!(take(&places, None).await.err(), Some(CloseReason::Full));
        // A closed connection no longer marks its place as idle.
        second.1.start_http2();
        assert_eq!(take(&places, None).await.err(), Some(CloseReason::Full));
        drop((second, third));
        assert_eq!(take(&places, None).await.err(), Some(CloseReason::Full));
        drop(fourth);
        take(&places, Some("a")).await.expect("the free place");
        drop((first, fifth));
        let table = places.table();
        assert_eq!((table.connections, table.networks.len()), (0, 0));
        assert_eq!(table.free.len(), 3 + SPARE_PLACES);
    }

    #[tokio::test(start_paused = true)]
    async fn network_of_a_place_can_be_named_later() {
        let places = Places::new(4, 1, Arc::default());
        let first = take(&places, None).await.expect("a place");
        let second = take(&places, None).await.expect("a place");
        assert_eq!(first.0.enter(Some("a".to_owned())), Ok(()));
        // The first connection is idle, and the address has one place.
        assert_eq!(second.0.enter(Some("a".to_owned())), Ok(()));
        assert_eq!(first.1.closing(), Some(CloseReason::Evicted));
        assert_eq!(first.0.enter(Some("b".to_owned())), Err(CloseReason::Evicted));
        busy(&second.1);
        let third = take(&places, None).await.expect("a place");
        assert_eq!(third.0.enter(Some("a".to_owned())), Err(CloseReason::FullForAddress));
        assert_eq!(third.0.enter(Some("b".to_owned())), Ok(()));
        drop((first, second, third));
        let table = places.table();
        assert_eq!((table.connections, table.networks.len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_do_not_close_are_bounded() {
        let places = Places::new(1, 1, Arc::default());
        let mut slow = Vec::new();
        for _ in 0..=SPARE_PLACES {
            slow.push(take(&places, None).await.expect("a place"));
        }
        assert_eq!(take(&places, None).await.err(), Some(CloseReason::Full));
        drop(slow);
        take(&places, None).await.expect("a place");
    }
}
