use super::*;

fn load(kind: LoadKind) -> GeneratedLoad {
    GeneratedLoad {
        kind,
        rate: 100.0,
        keys: 50,
        zipf: 1.0,
        duration: Duration::from_secs(60),
        seed: 1,
        period: Duration::from_secs(10),
        attributes: vec![("path".to_owned(), "/api/items".to_owned())],
    }
}

/// Returns the time since the start and the address of each request.
fn requests(load: &GeneratedLoad) -> Vec<(u64, String)> {
    let mut requests = Vec::new();
    let collected = load.for_each(|request, _| {
        let address = request.address().expect("an address").into_owned();
        requests.push((request.time() - START, address));
        Ok(())
    });
    collected.expect("valid");
    requests
}

const KINDS: [LoadKind; 6] = [
    LoadKind::Steady,
    LoadKind::Burst,
    LoadKind::Boundary,
    LoadKind::Poisson,
    LoadKind::Diurnal,
    LoadKind::Attack,
];

#[test]
fn loads_have_their_rate_and_are_sorted() {
    for kind in KINDS {
        let requests = requests(&load(kind));
        let expected = if kind == LoadKind::Attack { 6_000 + 20_000 } else { 6_000 };
        let difference = requests.len().abs_diff(expected);
        assert!(difference < expected / 20, "{kind:?}: {}", requests.len());
        assert!(requests.is_sorted_by_key(|(time, _)| *time), "{kind:?}");
        assert!(requests.iter().all(|(time, _)| *time < 60_000_000), "{kind:?}");
    }
}

#[test]
fn same_seed_gives_the_same_requests_and_another_seed_others() {
    for kind in KINDS {
        let first = load(kind);
        assert_eq!(requests(&first), requests(&first), "{kind:?}");
        let other = GeneratedLoad { seed: 2, ..first.clone() };
        assert_ne!(requests(&other), requests(&first), "{kind:?}");
    }
}

#[test]
fn bursts_are_at_the_start_of_a_period_and_boundaries_between_two() {
    let phase = |time: u64, period: u64| time % period;
    let burst = requests(&load(LoadKind::Burst));
    assert!(burst.iter().all(|(time, _)| phase(*time, 10_000_000) < 100_001));
    let boundary = requests(&load(LoadKind::Boundary));
    let before = boundary.iter().filter(|(time, _)| phase(*time, 20_000_000) < 10_000_000);
    assert_eq!(before.count() * 2, boundary.len());
    let distance = |time: u64| phase(time, 20_000_000).abs_diff(10_000_000);
    assert!(boundary.iter().all(|(time, _)| distance(*time) < 100_001));
}

#[test]
fn attacker_is_one_more_client_in_the_middle_third() {
    let requests = requests(&load(LoadKind::Attack));
    let attacker = Ipv4Addr::from(CLIENT_ADDRESSES + 50).to_string();
    let times: Vec<u64> = requests
        .iter()
        .filter(|(_, address)| *address == attacker)
        .map(|(time, _)| *time)
        .collect();
    assert_eq!(times.len(), 20_000);
    assert!(times[0] >= 20_000_000 && times[19_999] < 40_000_000);
}

#[test]
fn impossible_numbers_are_errors() {
    let valid = load(LoadKind::Steady);
    for (invalid, message) in [
        (GeneratedLoad { rate: 0.0, ..valid.clone() }, "--rate 0 is out of range"),
        (GeneratedLoad { rate: f64::NAN, ..valid.clone() }, "--rate NaN"),
        (GeneratedLoad { rate: f64::INFINITY, ..valid.clone() }, "--rate inf"),
        (GeneratedLoad { rate: -1.0, ..valid.clone() }, "--rate -1"),
        (GeneratedLoad { keys: 0, ..valid.clone() }, "--keys 0"),
        (GeneratedLoad { zipf: -0.5, ..valid.clone() }, "--zipf -0.5"),
        (GeneratedLoad { duration: Duration::ZERO, ..valid.clone() }, "--duration 0ns"),
        (GeneratedLoad { period: Duration::ZERO, ..valid.clone() }, "--period 0ns"),
        (
            GeneratedLoad { rate: 1e8, duration: MAX_DURATION, ..valid.clone() },
            "at most 10000000000",
        ),
    ] {
        let error = invalid.check().expect_err("impossible").to_string();
        assert!(error.contains(message), "{error}");
    }
    assert!(valid.check().is_ok());
}
