//! The store loses the scripts.

use std::time::Instant;

use crate::fleet::{Fleet, default_streams};
use crate::load::Load;
use crate::ping::PingMonitor;
use crate::row::{SECOND, WARM_UP, row, wait_under_load};
use crate::servers::{Server, command};

#[test]
fn scripts_flushed_every_100_ms() {
    row("SCRIPT FLUSH every 100 ms", |row| {
        let redis = Server::start();
        let fleet = Fleet::start(&redis.store());
        let ping_monitor = PingMonitor::of(&[&redis]);
        let load = Load::start(&fleet, default_streams());
        wait_under_load(WARM_UP);
        let (mut connection, start) = (redis.connection(), Instant::now());
        let errors_before = fleet.metric("tidegate_store_errors_total");
        for turn in 0..50 {
            let () = command(&mut connection, &["SCRIPT", "FLUSH"]);
            wait_under_load((start + turn * SECOND / 10).saturating_duration_since(Instant::now()));
        }
        wait_under_load(SECOND);
        let run = load.finish();

        row.record_store_delay(ping_monitor.finish());
        row.check(&run, &fleet, 1, &[&redis]);
        row.check_store_decides(&run, &fleet, start, Instant::now());
        row.check_ledger(&run, fleet.charged("hot"), None);
        let errors = fleet.metric("tidegate_store_errors_total");
        row.require(errors == errors_before, || {
            format!("errors of the store: {errors_before:?}, then {errors:?}")
        });
    });
}
