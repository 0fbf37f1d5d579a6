//! Network faults between a service and its store: lost packets, dead connections, high latency.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::check::{Run, Sample};
use crate::fleet::{Fleet, default_streams};
use crate::load::Load;
use crate::namespace::NetworkNamespace;
use crate::ping::PingMonitor;
use crate::proxy::Proxy;
use crate::row::{MAX_LOCAL_LATENCY, SECOND, WARM_UP, row, wait_under_load};
use crate::servers::{Launch, Server};

#[test]
fn packets_dropped_in_a_network_namespace() {
    row("black hole, in a namespace", |row| {
        let namespace = NetworkNamespace::new();
        let redis = Launch::new().inside(&namespace).start();
        let fleet = Fleet::start(&redis.store());
        let load = Load::start(&fleet, default_streams());
        wait_under_load(WARM_UP);
        let before = script_callers(&redis);
        namespace.drop_packets();
        let cut = Instant::now();
        wait_under_load(6 * SECOND);
        let healed = Instant::now();
        namespace.deliver_packets();
        wait_under_load(4 * SECOND);
        let run = load.finish();

        row.check(&run, &fleet, 2, &[&redis]);
        row.check_outage(&run, cut, healed);
        // The old connections would recover as well, but later: after six seconds TCP retransmits
        // only every six seconds or so.
        row.within("back", run.recovered_after(healed, |_| true), 2 * SECOND);
        let replaced = script_callers(&redis).difference(&before).count();
        row.figure("new connections", replaced);
        row.require(replaced >= 3, || format!("{replaced} new connections of three instances"));
    });
}

#[test]
fn dead_connections_are_replaced() {
    row("black hole, old connections only", |row| {
        let redis = Server::start();
        let proxy = Proxy::to(redis.port);
        let fleet = Fleet::start(&proxy.store());
        let load = Load::start(&fleet, default_streams());
        wait_under_load(WARM_UP);
        let before = proxy.connections();
        proxy.drop_existing_connections_silently();
        let cut = Instant::now();
        wait_under_load(5 * SECOND);
        let run = load.finish();

        row.record_store_delay(proxy.max_delay());
        row.check(&run, &fleet, 2, &[&redis]);
        row.within("replaced", run.recovered_after(cut, |_| true), 2 * SECOND);
        row.figure("new connections", proxy.connections() - before);
        row.check_store_decides(&run, &fleet, cut + 3 * SECOND, Instant::now());
    });
}

#[test]
fn latency_of_50_ms() {
    row("latency +50 ms", |row| {
        let redis = Server::start();
        let proxy = Proxy::to(redis.port);
        let fleet = Fleet::start(&proxy.store());
        let ping_monitor = PingMonitor::of(&[&redis]);
        let load = Load::start(&fleet, default_streams());
        wait_under_load(WARM_UP);
        let (slow, latency) = (Instant::now(), Duration::from_millis(50));
        proxy.set_latency(latency);
        let delay = proxy.round_trip();
        wait_under_load(5 * SECOND);
        let run = load.finish();

        row.record_store_delay(ping_monitor.finish().max(proxy.max_delay()));
        row.check(&run, &fleet, 1, &[&redis]);
        row.check_store_decides(&run, &fleet, slow, Instant::now());
        row.check_ledger(&run, fleet.charged("hot"), None);
        row.require_always(delay >= latency, || format!("the proxy adds only {delay:?}"));
    });
}

#[test]
fn latency_of_300_ms() {
    row("latency +300 ms", |row| {
        let redis = Server::start();
        let proxy = Proxy::to(redis.port);
        let fleet = Fleet::start(&proxy.store());
        let load = Load::start(&fleet, default_streams());
        wait_under_load(WARM_UP);
        let slow = Instant::now();
        proxy.set_latency(Duration::from_millis(300));
        wait_under_load(2 * SECOND);
        let bytes = proxy.bytes();
        wait_under_load(4 * SECOND);
        let bytes = proxy.bytes() - bytes;
        let fast = Instant::now();
        proxy.set_latency(Duration::ZERO);
        wait_under_load(4 * SECOND);
        let run = load.finish();

        row.check(&run, &fleet, 2, &[&redis]);
        row.within("p99 after 1 s", Some(run.p99(slow + SECOND, fast)), MAX_LOCAL_LATENCY);
        row.check_failure_modes(&run, slow + SECOND, fast);
        let during = run.samples.iter().filter(|sample| (slow + SECOND..fast).contains(&sample.at));
        let closed = during.filter(|sample| !sample.breaker_is_open()).count();
        row.require(closed == 0, || {
            format!("the breaker was seen closed {closed} times while the store was slow")
        });
        for instance in 0..3 {
            let changes = changes_of_the_breaker(&run, instance);
            row.require(changes == 2, || {
                format!("the breaker of instance {instance} changed {changes} times: it flaps")
            });
        }
        row.within("back", run.recovered_after(fast, |_| true), 2 * SECOND);
        row.figure("traffic", format_args!("{} B/s", bytes / 4));
    });
}

/// Returns the connections whose last command was a script call.
fn script_callers(redis: &Server) -> BTreeSet<String> {
    let list: String = redis.query(&["CLIENT", "LIST"]);
    let callers = list.lines().filter(|line| line.contains(" cmd=eval"));
    callers.filter_map(|line| line.split(' ').next().map(str::to_owned)).collect()
}

fn changes_of_the_breaker(run: &Run, instance: usize) -> usize {
    let own = run.samples.iter().filter(|sample| sample.instance == instance);
    let states: Vec<bool> = own.map(Sample::breaker_is_open).collect();
    states.windows(2).filter(|pair| pair[0] != pair[1]).count()
}
