//! Another server becomes the primary: by Sentinels, in a cluster, or by hand.

use std::time::Instant;

use crate::cluster::Cluster;
use crate::fleet::{Fleet, default_streams};
use crate::load::{Load, Stream};
use crate::monitor::Monitor;
use crate::row::{Row, SECOND, WARM_UP, row, wait_under_load};
use crate::sentinel::SentinelDeployment;
use crate::servers::{Launch, Server};

#[test]
fn sentinels_promote_the_replica_of_a_stopped_primary() {
    row("Sentinel failover", |row| {
        let watched = SentinelDeployment::start(Launch::new(), 3);
        let fleet = Fleet::start(&watched.store());
        let load = Load::start(&fleet, default_streams());
        let monitor = Monitor::of(&watched.primary);
        wait_under_load(WARM_UP);
        watched.primary.signal("STOP");
        let promoted = watched.promotion();
        wait_under_load(2 * SECOND);
        // The old primary resumes and still believes to be the primary.
        let awake = Instant::now();
        watched.primary.signal("CONT");
        wait_under_load(3 * SECOND);
        let run = load.finish();

        row.check(&run, &fleet, 2, &[&watched.replica]);
        row.within("following", run.recovered_after(promoted, |_| true), SECOND);
        row.check_store_decides(&run, &fleet, promoted + 2 * SECOND, Instant::now());
        row.check_old_primary(&monitor, awake);
    });
}

#[test]
fn cluster_promotes_the_replica_of_a_stopped_primary() {
    row("Cluster failover", |row| {
        let cluster = Cluster::start();
        let fleet = Fleet::start(&cluster.store());
        let stopped = cluster.owner("{hot}");
        let replica = cluster.replica_of(stopped);
        let hit = |node: &Server| node.port == stopped.port;
        // Keys on other nodes must not be affected.
        let mut streams: Vec<Stream> =
            default_streams().into_iter().filter(|stream| stream.name != "quiet").collect();
        let (near, far) = (cluster.key_for("near", hit), cluster.key_for("far", |node| !hit(node)));
        streams.extend([Stream::policy("quiet", &near, 20), Stream::policy("quiet", &far, 40)]);
        let elsewhere: Vec<String> = streams
            .iter()
            .map(|stream| stream.key.clone())
            .filter(|key| !hit(cluster.owner(&format!("{{{key}}}"))))
            .collect();
        let load = Load::start(&fleet, streams);
        let monitor = Monitor::of(stopped);
        wait_under_load(WARM_UP);
        stopped.signal("STOP");
        let gone = Instant::now();
        let promoted = replica.wait_until("the replica is promoted", Server::is_primary);
        wait_under_load(2 * SECOND);
        let awake = Instant::now();
        stopped.signal("CONT");
        wait_under_load(3 * SECOND);
        let run = load.finish();

        let primaries = cluster.primaries();
        row.check(&run, &fleet, 2, &primaries);
        row.figure("promotion", format_args!("{} ms", (promoted - gone).as_millis()));
        let here = |stream: &Stream| !elsewhere.contains(&stream.key);
        row.within("following", run.recovered_after(promoted, here), SECOND);
        row.check_store_decides(&run, &fleet, promoted + 2 * SECOND, Instant::now());
        let fallen = run.sent_between(gone, promoted).filter(|record| !record.by_store());
        let fallen = fallen.filter(|record| !here(run.stream(record))).count();
        row.require(fallen == 0, || {
            format!("{fallen} decisions without the store for keys of live nodes")
        });
        row.check_old_primary(&monitor, awake);
    });
}

#[test]
fn live_connection_turns_read_only() {
    row("READONLY on a live connection", |row| {
        turn_read_only(row, SentinelDeployment::fail_over_and_demote);
    });
}

#[test]
fn live_connection_turns_read_only_by_hand() {
    row("READONLY, roles swapped by hand", |row| {
        turn_read_only(row, SentinelDeployment::swap_by_hand);
    });
}

fn turn_read_only(row: &mut Row, swap: impl Fn(&SentinelDeployment) -> Instant) {
    let watched = SentinelDeployment::start(Launch::new(), 3);
    let fleet = Fleet::start(&watched.store());
    let load = Load::start(&fleet, default_streams());
    let monitor = Monitor::of(&watched.primary);
    wait_under_load(WARM_UP);
    let swapped = swap(&watched);
    wait_under_load(4 * SECOND);
    let run = load.finish();

    row.check(&run, &fleet, 2, &[&watched.replica]);
    row.within("rediscovered", run.recovered_after(swapped, |_| true), SECOND);
    row.check_store_decides(&run, &fleet, swapped + 2 * SECOND, Instant::now());
    let calls = monitor.calls_after(swapped + SECOND);
    row.require(calls == 0, || format!("{calls} calls to the old primary after a second"));
}

#[test]
fn single_server_is_read_only_for_a_while() {
    row("READONLY, a single server", |row| {
        let (redis, other) = (Server::start(), Server::start());
        let fleet = Fleet::start(&redis.store());
        let load = Load::start(&fleet, default_streams());
        wait_under_load(WARM_UP);
        let gone = Instant::now();
        let () = redis.query(&["REPLICAOF", "127.0.0.1", &other.port.to_string()]);
        wait_under_load(4 * SECOND);
        let back = Instant::now();
        let () = redis.query(&["REPLICAOF", "NO", "ONE"]);
        wait_under_load(4 * SECOND);
        let run = load.finish();

        // The replica copies an empty primary, so the counts are lost.
        row.check(&run, &fleet, 3, &[&redis]);
        row.check_outage(&run, gone, back);
        row.within("back", run.recovered_after(back, |_| true), SECOND);
        row.check_store_decides(&run, &fleet, back + 2 * SECOND, Instant::now());
    });
}
