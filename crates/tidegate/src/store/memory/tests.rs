//! Floods of keys, and stores that are full.

use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::clock::ManualClock;
use crate::quota::Quota;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);

fn acquire(store: &MemoryStore, charge: &Charge<'_>) -> Result<bool, StoreError> {
    store.decide_now(Action::Acquire, charge).map(|decision| decision.allowed)
}

/// Returns this many policy names of different classes.
fn policies(store: &MemoryStore, count: usize) -> Vec<String> {
    let quota = Quota::fixed_window(1, HOUR).expect("valid");
    let mut classes = Vec::new();
    let is_of_new_class = |name: &String| {
        let charge = Charge::new("k", &quota).with_policy(name);
        let class = store.fingerprint(&charge).policy_class();
        let is_new = !classes.contains(&class);
        classes.push(class);
        is_new
    };
    (0..).map(|number| format!("policy-{number}")).filter(is_of_new_class).take(count).collect()
}

/// A step of the flood simulator.
#[derive(Debug, Clone)]
enum Step {
    /// New keys of a policy, each with requests of these costs.
    Flood {
        policy: usize,
        keys: usize,
        costs: Vec<u64>,
    },
    /// Requests of one of the clients that are checked.
    Client {
        policy: usize,
        client: usize,
        cost: u64,
        requests: usize,
    },
    Wait {
        millis: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let cost = || prop_oneof![3 => Just(1_u64), 2 => 1..8_u64];
    prop_oneof![
        3 => (0..2_usize, 1..400_usize, prop::collection::vec(cost(), 1..4))
            .prop_map(|(policy, keys, costs)| Step::Flood { policy, keys, costs }),
        6 => (0..2_usize, 0..3_usize, cost(), 1..30_usize)
            .prop_map(|(policy, client, cost, requests)| {
                Step::Client { policy, client, cost, requests }
            }),
        2 => prop_oneof![0..1_000_u64, 0..90_000_u64]
            .prop_map(|millis| Step::Wait { millis }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A client that is denied stays denied until its `retry_after`, whatever floods the store.
    #[test]
    fn a_flood_never_frees_a_client_at_its_limit(
        algorithms in [0..5_usize, 0..5_usize],
        limits in [1..20_u64, 1..20_u64],
        max_keys in 20..400_usize,
        max_log_entries in 100..4_000_usize,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let clock = ManualClock::new();
        let store = MemoryStore::builder()
            .clock(clock.clone())
            .max_keys(max_keys)
            .max_log_bytes(max_log_entries * LOG_ENTRY_BYTES)
            .build();
        let quotas = [(0, MINUTE), (1, DAY)].map(|(at, window)| {
            Quota::new(Algorithm::RATES[algorithms[at]], limits[at], window).expect("valid")
        });
        // The least cost that is denied, and until when.
        let mut denied: HashMap<(usize, usize), (u64, u64)> = HashMap::new();
        let mut number = 0;
        for step in steps {
            match step {
                Step::Wait { millis } => clock.advance(Duration::from_millis(millis)),
                Step::Flood { policy, keys, costs } => {
                    for _ in 0..keys {
                        number += 1;
                        let key = format!("flood-{number}");
                        for cost in &costs {
                            clock.advance(Duration::from_micros(1));
                            let quota = &quotas[policy];
                            let charge = Charge::new(&key, quota).with_cost(*cost);
                            let _ = store.acquire_now(&charge);
                        }
                    }
                }
                Step::Client { policy, client, cost, requests } => {
                    let (quota, key) = (&quotas[policy], format!("client-{client}"));
                    let charge = Charge::new(&key, quota).with_cost(cost.min(quota.burst()));
                    for _ in 0..requests {
                        clock.advance(Duration::from_micros(1));
                        let now = clock.now().as_micros();
                        let Ok(decision) = store.acquire_now(&charge) else { continue };
                        let until = denied.get(&(policy, client)).copied();
                        if decision.allowed {
                            let is_freed = until
                                .is_some_and(|(cost, until)| charge.cost() >= cost && now < until);
                            prop_assert!(!is_freed, "{quota:?}: {now} before {until:?}");
                            denied.remove(&(policy, client));
                        } else {
                            let until = now + crate::clock::micros(decision.retry_after);
                            denied.insert((policy, client), (charge.cost(), until));
                        }
                    }
                }
            }
            prop_assert!(store.keys() <= max_keys);
            prop_assert!(store.log_bytes() <= max_log_entries * LOG_ENTRY_BYTES);
            check_capacity(&store);
        }
    }
}

/// Checks that the room that is taken is that of the stored keys and logs.
fn check_capacity(store: &MemoryStore) {
    let keys: usize = store.shards.iter().map(|shard| shard.lock().len()).sum();
    let entries: usize = store.shards.iter().map(|shard| shard.lock().logs.allocated()).sum();
    let Capacity { keys: key_room, log_entries: log_room, .. } = &store.capacity;
    assert_eq!((key_room.taken(), log_room.taken()), (keys, entries));
    assert_eq!((key_room.taken_by_all(), log_room.taken_by_all()), (keys, entries));
}

/// Costs above 1 leave a rest, and the level of a bucket is a fraction below its burst.
#[test]
fn client_at_its_limit_gets_nothing_after_a_flood() {
    for algorithm in Algorithm::RATES {
        for cost in [1, 3, 7] {
            let store = MemoryStore::builder().max_keys(300).build();
            let quota = Quota::new(algorithm, 50, HOUR).expect("valid");
            let charge = Charge::new("client", &quota).with_cost(cost);
            let admitted =
                || (0..60).filter(|_| acquire(&store, &charge).expect("decided")).count() as u64;
            assert_eq!(admitted(), 50 / cost, "{algorithm}");
            for round in 0..3 {
                for number in 0..400 {
                    let key = format!("flood-{round}-{number}");
                    let _ = acquire(&store, &Charge::new(&key, &quota)).expect("room is made");
                }
                assert_eq!(admitted(), 0, "{algorithm}, cost {cost}, round {round}");
            }
            check_capacity(&store);
        }
    }
}

#[test]
fn flood_on_one_policy_leaves_the_counts_of_another() {
    for algorithm in Algorithm::RATES {
        for flood_limit in [1, 2, 5] {
            let clock = ManualClock::new();
            let store = MemoryStore::builder().clock(clock.clone()).max_keys(1_000).build();
            let names = policies(&store, 2);
            let quota = Quota::new(algorithm, 10, HOUR).expect("valid");
            let clients: Vec<String> = (0..200).map(|number| format!("client-{number}")).collect();
            let charge = |key| Charge::new(key, &quota).with_policy(&names[0]);
            for (number, client) in clients.iter().enumerate() {
                for _ in 0..=number % 9 {
                    assert!(acquire(&store, &charge(client)).expect("room"));
                }
            }
            clock.advance(Duration::from_millis(1));
            let flooded = Quota::new(algorithm, flood_limit, DAY).expect("valid");
            for number in 0..10_000 {
                let key = format!("flood-{number}");
                let charge = Charge::new(&key, &flooded).with_policy(&names[1]);
                let decided = acquire(&store, &charge);
                assert!(flood_limit == 1 || decided == Ok(true), "{number} has room: {decided:?}");
            }
            for (number, client) in clients.iter().enumerate() {
                let decision = store.decide_now(Action::Peek, &charge(client)).expect("decided");
                // A peek includes its own unit.
                assert_eq!(decision.remaining, 8 - number as u64 % 9, "{algorithm}, {client}");
            }
            check_capacity(&store);
        }
    }
}

/// The flood has a long window, so its keys expire long after those of the clients.
#[test]
fn clients_are_limited_after_a_flood_of_a_longer_window() {
    for algorithm in Algorithm::RATES {
        // Keys of the flood within their limit make room; those at their limit leave the rest.
        for (flood_limit, clients) in [(2, 300), (1, 50)] {
            let clock = ManualClock::new();
            let store = MemoryStore::builder().clock(clock.clone()).max_keys(1_000).build();
            let names = policies(&store, 2);
            let day = Quota::fixed_window(flood_limit, DAY).expect("valid");
            for number in 0..1_100 {
                let key = format!("invented-{number}");
                let _ = acquire(&store, &Charge::new(&key, &day).with_policy(&names[0]));
            }
            let taken = store.keys();
            assert!((930..=945).contains(&taken), "one policy takes 16/17 of 1,000: {taken}");
            clock.advance(10 * MINUTE);
            let quota = Quota::new(algorithm, 10, HOUR).expect("valid");
            let mut admitted = vec![0; clients];
            for _ in 0..30 {
                for (number, admitted) in admitted.iter_mut().enumerate() {
                    clock.advance(Duration::from_micros(1));
                    let key = format!("client-{number}");
                    let charge = Charge::new(&key, &quota).with_policy(&names[1]);
                    *admitted += u32::from(acquire(&store, &charge).expect("room"));
                }
            }
            assert!(admitted.iter().all(|admitted| *admitted == 10), "{algorithm}: {admitted:?}");
        }
    }
}

#[test]
fn new_key_in_a_store_of_exhausted_keys_is_rejected_after_a_bounded_scan() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(clock.clone()).max_keys(20_000).build();
    let quota = Quota::fixed_window(1, DAY).expect("valid");
    let new = |number: usize| acquire(&store, &Charge::new(&format!("user-{number}"), &quota));
    let room = (0..30_000).take_while(|number| new(*number).is_ok()).count();
    assert!((18_800..=18_850).contains(&room), "{room} keys of one policy in 20,000");
    let cursor = || store.capacity.eviction_cursor.load(Ordering::Relaxed);
    let before = cursor();
    for number in room..room + 100 {
        assert_eq!(new(number), Err(StoreError::Full { cap: 20_000 }));
    }
    let scanned = (cursor() - before) / 100;
    assert!(scanned < 20, "{scanned} of {SHARDS} shards per rejected key, 64 slots of each");
    assert_eq!(store.evicted_keys(), 0);
    clock.advance(DAY);
    assert!((room..room + 10_000).all(|number| new(number) == Ok(true)), "all have expired");
    check_capacity(&store);
}

#[test]
fn long_log_is_enforced_beside_many_short_ones() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(clock.clone()).max_keys(100_000).build();
    let (all, user) = (Quota::sliding_log(20_000, HOUR), Quota::sliding_log(5, HOUR));
    let (all, user) = (all.expect("valid"), user.expect("valid"));
    let mut admitted = 0;
    for number in 0..30_000 {
        clock.advance(Duration::from_micros(1));
        admitted += u64::from(acquire(&store, &Charge::new("all", &all)).expect("room"));
        let key = format!("user-{}", number % 300);
        let _ = acquire(&store, &Charge::new(&key, &user)).expect("room");
    }
    assert_eq!((admitted, store.keys(), store.evicted_keys()), (20_000, 301, 0));
    assert!(store.log_bytes() < 17 * 20_000 + 300 * 128, "{}", store.log_bytes());
}

/// A full log leaves no room for others, but is itself neither evicted nor exceeded.
#[test]
fn log_bytes_have_a_maximum_and_no_log_is_evicted_for_its_size() {
    let clock = ManualClock::new();
    let store =
        MemoryStore::builder().clock(clock.clone()).max_log_bytes(1_000 * LOG_ENTRY_BYTES).build();
    let names = policies(&store, 2);
    let (long, short) = (Quota::sliding_log(5_000, HOUR), Quota::sliding_log(5, HOUR));
    let (long, short) = (long.expect("valid"), short.expect("valid"));
    let long = Charge::new("all", &long).with_policy(&names[0]);
    let used = || {
        let decision = store.decide_now(Action::Peek, &long).expect("decided");
        long.quota().limit() - decision.remaining - 1
    };
    let (mut admitted, mut full) = (0, 0);
    for number in 0..5_000_u64 {
        clock.advance(Duration::from_micros(1));
        match acquire(&store, &long) {
            Ok(allowed) => admitted += u64::from(allowed),
            Err(error) => {
                full += 1;
                assert_eq!(error, StoreError::Full { cap: store.max_keys() });
            }
        }
        assert_eq!(used(), admitted, "nothing is forgotten");
        // Short logs come and go in their part of the room.
        let key = format!("user-{number}");
        let charge = Charge::new(&key, &short).with_policy(&names[1]);
        assert_eq!(acquire(&store, &charge), Ok(true));
        assert!(store.log_bytes() <= 16_000, "{} bytes", store.log_bytes());
    }
    assert!((400..1_000).contains(&admitted), "{admitted} of 1,000 entries");
    assert_eq!(full, 5_000 - admitted);
    check_capacity(&store);
    clock.advance(HOUR);
    assert_eq!(acquire(&store, &long), Ok(true), "its entries have left the window");
}

#[test]
fn long_log_evicts_no_logs_of_a_policy_that_takes_less() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(clock.clone()).max_log_bytes(16_000).build();
    let names = policies(&store, 2);
    let short = Quota::sliding_log(10, HOUR).expect("valid");
    let long = Quota::sliding_log(900, HOUR).expect("valid");
    let admitted = |name: &str, key: &str, quota: &Quota, requests: usize| {
        let charge = Charge::new(key, quota).with_policy(name);
        let is_admitted = |_: &usize| {
            clock.advance(Duration::from_micros(1));
            acquire(&store, &charge).unwrap_or(false)
        };
        (0..requests).filter(is_admitted).count()
    };
    for user in 0..60 {
        assert_eq!(admitted(&names[0], &format!("user-{user}"), &short, 5), 5);
    }
    let taken = admitted(&names[1], "all", &long, 2_000);
    assert!((500..=900).contains(&taken), "{taken}");
    for user in 0..60 {
        let key = format!("user-{user}");
        let charge = Charge::new(&key, &short).with_policy(&names[0]);
        let left = store.decide_now(Action::Peek, &charge).expect("decided").remaining;
        assert_eq!(left, 4, "user {user} has used 5 of 10");
    }
}

#[test]
fn exhausted_logs_keep_the_maximum_of_their_bytes() {
    // Every log is at its limit, or one below it.
    for limit in [10, 11] {
        let clock = ManualClock::new();
        let store = MemoryStore::builder().clock(clock.clone()).max_log_bytes(100_000).build();
        let quota = Quota::sliding_log(limit, DAY).expect("valid");
        let (mut rejected, mut exhausted) = (0, Vec::new());
        for number in 0..2_000 {
            let key = format!("user-{number}");
            let before = rejected;
            for _ in 0..10 {
                clock.advance(Duration::from_micros(1));
                let decided = acquire(&store, &Charge::new(&key, &quota));
                assert!(limit == 10 || decided == Ok(true), "{number}: {decided:?}");
                rejected += usize::from(decided.is_err());
            }
            if limit == 10 && rejected == before {
                exhausted.push(key);
            }
            assert!(store.log_bytes() <= 100_000, "{} bytes", store.log_bytes());
        }
        assert_eq!(rejected > 0, limit == 10);
        assert!(limit == 10 || store.evicted_keys() > 0);
        // A log that has reached its limit is still there.
        for key in &exhausted {
            assert_eq!(acquire(&store, &Charge::new(key, &quota)), Ok(false), "{key}");
        }
        assert_eq!(exhausted.is_empty(), limit == 11);
        check_capacity(&store);
    }
}

#[test]
fn group_of_charges_without_room_for_a_log_spends_nothing() {
    let clock = ManualClock::new();
    let store =
        MemoryStore::builder().clock(clock.clone()).max_log_bytes(40 * LOG_ENTRY_BYTES).build();
    let (log, window) = (Quota::sliding_log(1_000, HOUR), Quota::fixed_window(1_000, HOUR));
    let (log, window) = (log.expect("valid"), window.expect("valid"));
    let charges = [Charge::new("k", &window), Charge::new("k", &log)];
    let mut admitted = 0;
    for _ in 0..100 {
        clock.advance(Duration::from_micros(1));
        admitted += u64::from(store.decide_all_now(Action::Acquire, &charges).is_ok());
    }
    assert!((20..=40).contains(&admitted), "{admitted} of 40 entries");
    for charge in &charges {
        let decision = store.decide_now(Action::Peek, charge).expect("decided");
        assert_eq!(decision.remaining, 1_000 - admitted - 1);
    }
    check_capacity(&store);
}

#[test]
fn group_of_charges_forgets_other_logs_only_if_that_makes_enough_room() {
    let clock = ManualClock::new();
    let store =
        MemoryStore::builder().clock(clock.clone()).max_log_bytes(40 * LOG_ENTRY_BYTES).build();
    let names = policies(&store, 3);
    let (small, large) = (Quota::sliding_log(4, HOUR), Quota::sliding_log(100, HOUR));
    let (small, large) = (small.expect("valid"), large.expect("valid"));
    let keys: Vec<String> = (0..8).map(|number| format!("user-{number}")).collect();
    let group = |policy: usize, quota, count| -> Vec<Charge<'_>> {
        let charge = |key| Charge::new(key, quota).with_policy(&names[policy]);
        keys.iter().take(count).map(|key| charge(key)).collect()
    };
    // 20 entries of logs at their limit, and 16 of others.
    for charges in [group(0, &small, 5), group(1, &large, 4)] {
        for charge in &charges {
            for _ in 0..4 {
                clock.advance(Duration::from_micros(1));
                assert_eq!(acquire(&store, charge), Ok(true));
            }
        }
    }
    let acquire_all = |count| store.decide_all_now(Action::Acquire, &group(2, &large, count));
    assert_eq!(acquire_all(8).map(drop), Err(StoreError::Full { cap: store.max_keys() }));
    assert_eq!(store.evicted_keys(), 0, "32 entries");
    assert!(acquire_all(3).is_ok());
    assert!((1..=3).contains(&store.evicted_keys()), "12 entries");
    check_capacity(&store);
}

#[test]
fn room_is_counted_for_all_actions() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let quotas: Vec<Quota> = Algorithm::RATES
        .iter()
        .map(|algorithm| Quota::new(*algorithm, 40, MINUTE).expect("valid"))
        .collect();
    let actions = [Action::Acquire, Action::Report, Action::ChargeUpTo, Action::Refund];
    for round in 0..2_000_usize {
        clock.advance(Duration::from_millis(round as u64 % 700));
        // One policy name, so that the algorithm of a key changes.
        let key = format!("k{}", round % 7);
        let quota = &quotas[round / 50 % quotas.len()];
        let charge = Charge::new(&key, quota).with_policy("p").with_cost(1 + round as u64 % 3);
        let action = if round % 97 == 0 { Action::Reset } else { actions[round / 3 % 4] };
        let _ = store.decide_now(action, &charge).expect("decided");
        check_capacity(&store);
    }
    clock.advance(10 * MINUTE);
    for round in 0..200_000 {
        let charge = Charge::new("last", &quotas[2]);
        let _ = store.decide_now(Action::Acquire, &charge).expect("decided");
        assert!(round % 10_000 > 0 || store.keys() <= 8);
    }
    check_capacity(&store);
}

/// Eight bits of a hash are the same for these windows.
#[test]
fn fraction_of_a_changed_window_is_rounded_up() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let before = Quota::token_bucket(10, Duration::from_secs(18)).expect("valid");
    let after = Quota::token_bucket(10, DAY).expect("valid");
    let charge = |quota| Charge::new("k", quota).with_policy("p");
    assert_eq!(acquire(&store, &charge(&before).with_cost(9)), Ok(true));
    clock.advance(Duration::from_millis(900));
    assert_eq!(acquire(&store, &charge(&before)), Ok(true), "9.5 units are in use");
    clock.advance(Duration::from_secs(1));
    assert_eq!(acquire(&store, &charge(&after)), Ok(false), "a day has 10 units, not 86,400");
}

#[test]
fn report_that_records_nothing_has_a_wait_after_a_change_of_the_algorithm() {
    let store = MemoryStore::builder().clock(ManualClock::new()).build();
    let max = Quota::MAX_LIMIT;
    let before = Quota::fixed_window(max, HOUR).expect("valid");
    let after = Quota::token_bucket(max, HOUR).expect("valid");
    let report = |quota, cost| {
        let charge = Charge::new("k", quota).with_policy("p").with_cost(cost);
        store.decide_now(Action::Report, &charge).expect("decided")
    };
    assert!(report(&before, max).allowed);
    for cost in [1, max, 2 * max] {
        let decision = report(&after, cost);
        assert!(!decision.allowed && decision.retry_after > Duration::ZERO, "{decision:?}");
    }
}
