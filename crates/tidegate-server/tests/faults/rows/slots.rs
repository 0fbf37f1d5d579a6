//! A slot of the cluster moves to another node, with the hottest key in it.

use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::fleet::{Fleet, PAIR, WINDOW, usual_streams};
use crate::load::{Load, Stream};
use crate::pulse::Pulse;
use crate::row::{SECOND, WARM_UP, let_pass, row};

#[test]
fn the_hot_slot_moves_under_load() {
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
        // One request charged to keys on two nodes, one of which moves.
        let team = cluster.key_for("team", |node| node.port != home.port);
        streams.push(Stream::path("across", "hot", &team, 20));
        let pulse = Pulse::of(&cluster.primaries());
        let load = Load::start(&fleet, streams);
        let_pass(WARM_UP);
        let start = Instant::now();
        let mut moved = 0;
        for (from, to) in [(home, away), (away, home), (home, away)] {
            // Each state lasts long enough to be met by hundreds of requests.
            Cluster::begin_to_move(slot, from, to);
            let_pass(Duration::from_millis(300));
            moved += Cluster::move_keys(slot, from, to);
            let_pass(Duration::from_millis(500));
            moved += Cluster::move_keys(slot, from, to);
            cluster.end_move(slot, to);
            let_pass(SECOND);
        }
        let run = load.finish();

        row.store_was_late(pulse.finish());
        let primaries = cluster.primaries();
        row.check(&run, &fleet, 1, &primaries);
        row.check_store_decides(&run, &fleet, start, Instant::now());
        row.check_ledger(&run, fleet.charged("hot"), None);
        let across = run.most_admitted_ever("across", WINDOW);
        row.insist(across <= PAIR, || {
            format!("{across} admitted across slots, and {PAIR} is the limit")
        });
        row.figure("keys moved", moved);
        row.insist(moved >= 9, || format!("only {moved} keys were there to move"));
    });
}
