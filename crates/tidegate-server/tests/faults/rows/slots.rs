//! The slot of the hottest key moves to another node of the cluster.

use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::fleet::{Fleet, PAIR, WINDOW, usual_streams};
use crate::load::{Load, Stream};
use crate::pulse::Pulse;
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
        let mut streams = usual_streams();
        // One request is charged to keys on two nodes, one of which moves.
        let team = cluster.key_for("team", |node| node.port != home.port);
        streams.push(Stream::path("across", "hot", &team, 20));
        let pulse = Pulse::of(&cluster.primaries());
        let load = Load::start(&fleet, streams);
        wait_under_load(WARM_UP);
        let start = Instant::now();
        let mut moved = 0;
        for (from, to) in [(home, away), (away, home), (home, away)] {
            // Each state lasts for hundreds of requests.
            Cluster::begin_to_move(slot, from, to);
            wait_under_load(Duration::from_millis(300));
            moved += Cluster::move_keys(slot, from, to);
            wait_under_load(Duration::from_millis(500));
            moved += Cluster::move_keys(slot, from, to);
            cluster.end_move(slot, to);
            wait_under_load(SECOND);
        }
        let run = load.finish();

        row.store_was_late(pulse.finish());
        let primaries = cluster.primaries();
        row.check(&run, &fleet, 1, &primaries);
        row.check_store_decides(&run, &fleet, start, Instant::now());
        row.check_ledger(&run, fleet.charged("hot"), None);
        let across = run.most_admitted_ever("across", WINDOW);
        row.require_always(across <= PAIR, || {
            format!("{across} allowed across slots, the limit is {PAIR}")
        });
        row.figure("keys moved", moved);
        row.require_always(moved >= 9, || format!("only {moved} keys were there to move"));
    });
}
