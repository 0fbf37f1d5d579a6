//! Encoding and decoding of requests.

use std::time::Duration;

use super::*;
use crate::store::redis::client::resp::parse;

fn add(requests: &mut EncodedRequests, operation: Operation, charges: &[Charge<'_>]) -> usize {
    let request = Request::new(operation, charges);
    requests.add(&request, 7, |text, charge| text.push_str(charge.key()))
}

/// Returns the arguments as texts, and headers as their numbers from the kind on.
fn words(arguments: &Command) -> String {
    let text = |argument: &[u8]| {
        if argument.len() >= 80 {
            let numbers =
                argument.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
            return format!("{:?}", numbers.skip(3).collect::<Vec<_>>()).replace(".0", "");
        }
        String::from_utf8_lossy(argument).into_owned()
    };
    let mut encoded = Vec::new();
    arguments.encode(&[], &mut encoded);
    // A command is an array of strings.
    let Ok(Some((Value::Array(words), _))) = parse(&encoded) else { panic!("{encoded:?}") };
    let texts = words.iter().map(|word| match word {
        Value::String(bytes) => text(bytes),
        other => panic!("{other:?}"),
    });
    texts.collect::<Vec<_>>().join(" ")
}

const ACQUIRE: Operation = Operation::Apply(Action::Acquire);

#[test]
fn equal_acquires_share_an_item_and_similar_ones_share_a_header() {
    let minute = Duration::from_secs(60);
    let ten = Quota::fixed_window(10, minute).expect("valid");
    let five = Quota::token_bucket(5, minute).expect("valid");
    let strict = Quota::sliding_log(3, minute)
        .and_then(|quota| quota.with_count_denied(true))
        .expect("valid");
    let (a, b, c) = (Charge::new("a", &ten), Charge::new("b", &ten), Charge::new("c", &five));
    let mut requests = EncodedRequests::default();
    assert_eq!(add(&mut requests, ACQUIRE, &[a]), 0);
    assert_eq!(add(&mut requests, ACQUIRE, &[c]), 1);
    assert_eq!(add(&mut requests, ACQUIRE, &[b]), 2);
    assert_eq!(add(&mut requests, ACQUIRE, &[a.with_cost(2)]), 3, "another cost");
    assert_eq!(add(&mut requests, ACQUIRE, &[c]), 1, "equal");
    assert_eq!(add(&mut requests, ACQUIRE, &[a, c]), 4, "a group");
    assert_eq!(add(&mut requests, ACQUIRE, &[a, c]), 5, "groups do not share an item");
    assert_eq!(add(&mut requests, Operation::Apply(Action::Peek), &[a]), 6, "a peek");
    let strict = Charge::new("d", &strict);
    assert_eq!(add(&mut requests, ACQUIRE, &[strict]), 7);
    assert_eq!(add(&mut requests, ACQUIRE, &[strict]), 8, "its denials are counted");
    assert_eq!(requests.charges.len(), 11);

    // The waiters of items 3, 5 and 8 were dropped.
    let times = ServerTimes { deadline: Some(99), ..ServerTimes::default() };
    let repeats = |item| if item == 1 { 2 } else { 1 };
    let order = requests.order([0, 1, 2, 4, 6, 7], repeats);
    let command = |mode| words(&requests.arguments(&order, &times, mode));
    let headers = "[5, 1, 10, 60000000, 0, 1, 1] [6, 1, 5, 60000000, 5, 1, 2] \
                   [5, 1, 10, 60000000, 0, 1, 1] \
                   [0, 2, 1, 2, 0, 0, 0, 5, 10, 60000000, 0, 1, 0, 6, 5, 60000000, 5, 1, 0] \
                   [5, 1, 10, 60000000, 0, 1, 0] \
                   [0, 1, 1, 1, 0, 0, 0, 1, 3, 60000000, 1, 1, 0]";
    assert_eq!(command(KeyMode::Declared), format!("7 a c b a c a d {headers}"));
    assert_eq!(command(KeyMode::CrossSlot), format!("1 a {headers} c b a c a d"));
}

#[test]
fn acquires_of_different_keys_are_sorted_by_their_quota() {
    let minute = Duration::from_secs(60);
    let ten = Quota::fixed_window(10, minute).expect("valid");
    let five = Quota::token_bucket(5, minute).expect("valid");
    let mut requests = EncodedRequests::default();
    for name in ["a", "b", "c", "d"] {
        let quota = if name < "c" { &ten } else { &five };
        add(&mut requests, ACQUIRE, &[Charge::new(name, quota)]);
    }
    let command = |requests: &EncodedRequests| {
        let order = requests.order([0, 2, 1, 3], |_| 1);
        words(&requests.arguments(&order, &ServerTimes::default(), KeyMode::Declared))
    };
    let expected = "4 a b c d [5, 2, 10, 60000000, 0, 1, 1] [6, 2, 5, 60000000, 5, 1, 1]";
    assert_eq!(command(&requests), expected);
    // The replies have the same order.
    let numbers = [7, 1, 10, 60, 1, 9, 60, 1, 5, 0, 0, 1, 4, 1, 0];
    let bytes = numbers.iter().flat_map(|number| f64::from(*number).to_le_bytes()).collect();
    let order = requests.order([0, 2, 1, 3], |_| 1);
    assert_eq!(order.iter().map(|ordered| ordered.item).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let replies = requests.read(&order, &Value::String(bytes)).expect("valid");
    let remaining = |reply: &ItemReply| match reply {
        ItemReply::Grants(grants) => grants.remaining,
        _ => panic!("{reply:?}"),
    };
    let remaining: Vec<u64> = replies.items.expect("in time").iter().map(remaining).collect();
    assert_eq!(remaining, [10, 9, 5, 4]);
    // With two requests for one key, the order of arrival matters.
    add(&mut requests, ACQUIRE, &[Charge::new("a", &ten).with_cost(2)]);
    assert!(command(&requests).starts_with("4 a c b d "), "{}", command(&requests));
}

#[test]
fn equal_acquires_share_an_item_across_many_other_quotas() {
    let quotas: Vec<Quota> = (1..=20)
        .map(|limit| Quota::fixed_window(limit, Duration::from_secs(60)).expect("valid"))
        .collect();
    let mut requests = EncodedRequests::default();
    let numbers: Vec<usize> = [quotas.as_slice(), &quotas[..1]]
        .concat()
        .iter()
        .map(|quota| {
            let charges = [Charge::new("a", quota)];
            add(&mut requests, Operation::Apply(Action::Acquire), &charges)
        })
        .collect();
    assert_eq!(numbers.last(), numbers.first());
}

#[test]
fn a_malformed_reply_is_an_error() {
    let quota = Quota::fixed_window(10, Duration::from_secs(60)).expect("valid");
    let mut requests = EncodedRequests::default();
    add(&mut requests, Operation::Apply(Action::Acquire), &[Charge::new("a", &quota)]);
    let read = |numbers: &[i32]| {
        let bytes = numbers.iter().flat_map(|number| f64::from(*number).to_le_bytes());
        requests.read(&requests.order([0], |_| 1), &Value::String(bytes.collect()))
    };
    let granted = read(&[5, 1, 10, 60]).expect("valid").items.expect("in time");
    let [ItemReply::Grants(grants)] = &granted[..] else { panic!("{granted:?}") };
    assert_eq!((grants.granted, grants.remaining), (1, 10));
    assert!(read(&[5]).expect("valid").items.is_none(), "too late");
    assert!(read(&[5, 0, 10, 60, 7, 8]).expect("valid").items.is_some(), "denied");
    let failed = [5.0_f64, -1.0, 3.0].iter().flat_map(|number| number.to_le_bytes());
    let failed = Value::String(failed.chain(*b"OOM").collect());
    let failed =
        requests.read(&requests.order([0], |_| 1), &failed).expect("valid").items.expect("in time");
    assert!(matches!(&failed[..], [ItemReply::Error(text)] if text == "OOM"), "{failed:?}");
    for wrong in [
        &[][..],
        &[5, 1],
        &[5, 1, 10],
        &[5, 0, 10, 60],
        &[5, 1, 10, 60, 1],
        &[5, 1, -2, 60],
        &[5, -1, 100],
    ] {
        assert!(read(wrong).is_err(), "{wrong:?}");
    }
    assert!(requests.read(&requests.order([0], |_| 1), &Value::Nil).is_err());
}
