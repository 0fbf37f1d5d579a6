//! The slot of the hottest key moves to another node of the cluster.

use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::fleet::{Fleet, PAIR_LIMIT, WINDOW, default_streams};
use crate::load::{Load, Stream};
use crate::ping::PingMonitor;
use crate::row::{SECOND, WARM_UP, row, wait_under_load};

#[test]
fn hot_slot_moves_under_load() {
    row("slot migration of the hot key", |row| {
        let cluster = Cluster::start();
        let fleet = Fleet::start(&cluster.store());
        let (home, slot) = (cluster.owner("{hot}"), cluster.slot("{hot}"));
        let away = *cluster
            .primaries()
            .iter()
            .find(|node| node.port != home.port)
            .expect("three primaries");
        let mut streams = default_streams();
        // One request is charged to keys on two nodes, one of which moves.
        let team = cluster.key_for("team", |node| node.port != home.port);
        streams.push(Stream::path("across", "hot", &team, 20));
        let ping_monitor = PingMonitor::of(&cluster.primaries());
        let load = Load::start(&fleet, streams);
        wait_under_load(WARM_UP);
        let start = Instant::now();
        let mut moved = 0;
        for (from, to) in [(home, away), (away, home), (home, away)] {
            // Each state lasts for hundreds of requests.
            Cluster::start_migration(slot, from, to);
            wait_under_load(Duration::from_millis(300));
            moved += Cluster::move_keys(slot, from, to);
            wait_under_load(Duration::from_millis(500));
            moved += Cluster::move_keys(slot, from, to);
            cluster.finish_migration(slot, to);
            wait_under_load(SECOND);
        }
        let run = load.finish();

        row.record_store_delay(ping_monitor.finish());
        let primaries = cluster.primaries();
        row.check(&run, &fleet, 1, &primaries);
        row.check_store_decides(&run, &fleet, start, Instant::now());
        row.check_ledger(&run, fleet.charged("hot"), None);
        let across = run.max_allowed_overall("across", WINDOW);
        row.require_always(across <= PAIR_LIMIT, || {
            format!("{across} allowed across slots, the limit is {PAIR_LIMIT}")
        });
        row.figure("keys moved", moved);
        row.require_always(moved >= 9, || format!("only {moved} keys were there to move"));
    });
}
