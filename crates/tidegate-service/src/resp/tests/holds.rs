//! Reservations, their commits and renewals, and ids that are charged once.

use super::*;

const TOKENS: &str = "policies:
  - {name: tokens, limit: 100, window: 60s}
";

#[test]
fn reservation_is_settled_by_its_id() {
    let mut client = Conversation::new(TOKENS);
    let reserve = "TG.RESERVE tokens ann COST 80 TTL 30000 ID job";
    let reserved = "*9 :1 :100 :20 :0 :60000 :0 $3 job :30000 $4 held";
    assert_eq!(client.ask(reserve), reserved);
    let replayed = reserved.replace("$4 held", "$8 replayed");
    assert_eq!(client.ask(reserve), replayed, "the earlier answer");
    assert_eq!(client.ask("TG.PEEK tokens ann"), "*6 :1 :100 :19 :0 :60000 :0", "charged once");
    let conflict = client.ask("TG.RESERVE tokens ann COST 70 ID job");
    let error = "-ERR the id \"job\" is in use with another cost: a new request needs a new id";
    assert_eq!(conflict, error);
    for _ in 0..2 {
        let denied = client.ask("TG.RESERVE tokens ann COST 30 ID two");
        assert_eq!(denied, "*9 :0 :100 :20 :60000 :60000 :0 $-1 :0 $-1", "and not remembered");
    }
    assert!(client.ask("TG.RENEW tokens ann two 5000").contains(" $3 two :0 "));
    client.clock.advance(Duration::from_secs(20));
    let renewed = client.ask("TG.RENEW tokens ann job 30000");
    assert_eq!(renewed, "*9 :1 :100 :20 :0 :40000 :0 $3 job :30000 $4 held");
    client.clock.advance(Duration::from_secs(20));
    for actual in [50, 10] {
        let settled = client.ask(&format!("TG.COMMIT tokens ann job {actual}"));
        let expected = "*9 :1 :100 :50 :0 :20000 :0 $3 job :0 $7 settled";
        assert_eq!(settled, expected, "a second commit changes nothing");
    }
    client.clock.advance(Duration::from_secs(20));
    assert!(client.ask("TG.PEEK tokens ann COST 100").starts_with("*6 :1 "), "by its own time");
}

#[test]
fn commit_of_an_unknown_id_is_a_report() {
    let mut client = Conversation::new(TOKENS);
    let unknown = client.ask("TG.COMMIT tokens ann job 30");
    assert!(unknown.starts_with("*9 :1 :100 :70 :0 :60000 :0 $3 job :0 "), "{unknown}");
    assert!(!unknown.ends_with("settled"), "{unknown}");
    assert!(client.ask("TG.COMMIT tokens ann job 0").starts_with("*9 :1 :100 :70 "));
}

#[test]
fn fields_of_a_hold_have_names_on_request() {
    let mut client = Conversation::new(TOKENS);
    for (version, start, null) in [("2", "*18", "$-1"), ("3", "%9", "_")] {
        client.ask(&format!("HELLO {version}"));
        client.ask("TG.RESET tokens ann");
        let reply = client.ask(&format!("TG.RESERVE tokens ann ID r{version} WITHNAMES COST 99"));
        let fields = format!(
            "{start} $7 allowed :1 $5 limit :100 $9 remaining :1 $14 retry_after_ms :0 \
             $14 reset_after_ms :60000 $8 delay_ms :0 $11 reservation $2 r{version} \
             $16 expires_after_ms :60000 $6 status $4 held"
        );
        assert_eq!(reply, fields);
        let denied = client.ask("TG.RESERVE tokens ann COST 2 withnames ID other");
        let end = format!("$11 reservation {null} $16 expires_after_ms :0 $6 status {null}");
        assert!(denied.starts_with(start) && denied.ends_with(&end), "{denied}");
    }
}

#[test]
fn id_is_charged_once_and_refunded_once() {
    let mut client = Conversation::new(TOKENS);
    for status in ["$7 settled", "$8 replayed", "$8 replayed"] {
        let reply = client.ask("TG.ACQUIRE tokens ann COST 40 ID pay-1");
        assert_eq!(reply, format!("*9 :1 :100 :60 :0 :60000 :0 $5 pay-1 :0 {status}"));
    }
    assert!(client.ask("TG.ACQUIRE tokens ann COST 41 ID pay-1").starts_with("-ERR the id"));
    assert!(client.ask("TG.ACQUIRE tokens ann COST 30").starts_with("*6 :1 :100 :30 "));
    for _ in 0..2 {
        let refunded = client.ask("TG.REFUND tokens ann ID pay-1");
        assert_eq!(refunded, "*9 :1 :100 :70 :0 :60000 :0 $5 pay-1 :0 $7 settled");
    }
    // The id is remembered for a minute, or as long as the command says.
    client.ask("TG.ACQUIRE tokens bob ID short TTL 1000");
    client.ask("TG.ACQUIRE tokens bob ID usual");
    client.clock.advance(Duration::from_secs(59));
    assert!(client.ask("TG.ACQUIRE tokens bob ID usual").ends_with("replayed"));
    assert!(client.ask("TG.ACQUIRE tokens bob ID short").ends_with("settled"));
}

#[test]
fn caller_can_bring_a_limit_of_units_in_flight() {
    let mut client = Conversation::new(TOKENS);
    let quota = "KEY ann QUOTA concurrency 2";
    let first = client.ask(&format!("TG.ACQUIRE {quota}"));
    let (decision, rest) = first.split_at("*9 :1 :2 :1 :0 :60000 :0 ".len());
    assert_eq!(decision, "*9 :1 :2 :1 :0 :60000 :0 ", "{first}");
    let id = rest.strip_prefix("$32 ").and_then(|rest| rest.split(' ').next()).expect("an id");
    assert!(rest.ends_with(" :60000 $4 held"), "{first}");
    assert!(client.ask(&format!("TG.RESERVE {quota} ID b TTL 5000")).starts_with("*9 :1 :2 :0 "));
    let denied = client.ask(&format!("TG.ACQUIRE {quota}"));
    assert_eq!(denied, "*6 :0 :2 :0 :5000 :60000 :0", "until the first one ends");
    assert!(client.ask(&format!("TG.COMMIT {quota} {id} 0")).ends_with(" $7 settled"));
    assert!(client.ask(&format!("TG.ACQUIRE {quota}")).starts_with("*9 :1 :2 :0 "));
    // A renewal extends, and never revives.
    client.clock.advance(Duration::from_secs(4));
    assert!(client.ask(&format!("TG.RENEW {quota} b 5000")).ends_with(" :5000 $4 held"));
    client.clock.advance(Duration::from_secs(5));
    let ended = client.ask(&format!("TG.RENEW {quota} b 5000"));
    assert!(ended.starts_with("*9 :1 :2 :1 ") && !ended.ends_with("held"), "{ended}");
    // The same commands of a rate have a window.
    let rate = "KEY ann QUOTA token-bucket 10 10s";
    assert!(
        client.ask(&format!("TG.RESERVE {rate} COST 5 BURST 20 ID c")).starts_with("*9 :1 :20")
    );
    let settled = client.ask(&format!("TG.COMMIT {rate} c 1 BURST 20"));
    assert!(settled.starts_with("*9 :1 :20 :19 ") && settled.ends_with("settled"), "{settled}");
}

#[test]
fn commands_of_a_pipeline_repeat_an_id_in_their_order() {
    let mut client = Conversation::new(TOKENS);
    let reply = client.finish(
        "MULTI\r\nTG.RESERVE tokens ann COST 10 ID a\r\nTG.RESERVE tokens ann COST 10 ID a\r\n\
         TG.COMMIT tokens ann a 4\r\nTG.ACQUIRE tokens ann ID b\r\nTG.REFUND tokens ann ID b\r\nEXEC",
    );
    let of = |left: u64, rest: &str| format!("*9 :1 :100 :{left} :0 :60000 :0 {rest}");
    let expected = [
        "+OK +QUEUED +QUEUED +QUEUED +QUEUED +QUEUED *5".to_owned(),
        of(90, "$1 a :60000 $4 held"),
        of(90, "$1 a :60000 $8 replayed"),
        of(96, "$1 a :0 $7 settled"),
        of(95, "$1 b :0 $7 settled"),
        of(96, "$1 b :0 $7 settled"),
    ];
    assert_eq!(reply, expected.join(" "));
}

#[test]
fn errors_of_holds_say_what_would_be_right() {
    let mut client = Conversation::new(TOKENS);
    let long = format!("TG.RESERVE tokens ann ID {}", "x".repeat(65));
    for (line, code, hint) in [
        (long.as_str(), "-ERR an id", "from 1 to 64 printable ASCII characters"),
        ("TG.RESERVE tokens ann ID 'a b'", "-ERR an id", "without spaces"),
        ("TG.RESERVE tokens ann ID \"\\xff\"", "-ERR", "the id is not UTF-8"),
        ("TG.RESERVE tokens ann ID a ID b", "-ERR syntax error", "ID is given twice"),
        ("TG.RESERVE tokens ann ID", "-ERR wrong number", "[ID id]"),
        ("TG.RESERVE tokens ann TTL 999", "-ERR the ttl 999ms", "from 1s to 24h"),
        ("TG.RESERVE tokens ann TTL 86400001", "-ERR the ttl", "from 1s to 24h"),
        ("TG.RESERVE tokens ann TTL 1s", "-ERR TTL '1s'", "whole number"),
        ("TG.RESERVE tokens ann COST 101", "-ERR", "at most 100 at once"),
        ("TG.RESERVE tokens ann COST 0", "-ERR", "a cost is at least 1"),
        ("TG.RESERVE tokens ann AGE 1", "-ERR syntax error near 'AGE'", "TG.RESERVE policy key"),
        ("TG.RESERVE tokns ann", "-ERR", "did you mean \"tokens\"?"),
        ("TG.ACQUIRE tokens ann TTL 1000", "-ERR TTL", "send ID, too"),
        ("TG.ACQUIRE tokens ann ID a TTL 600001", "-ERR the ttl", "from 1s to 10m"),
        ("TG.PEEK tokens ann ID a", "-ERR syntax error near 'ID'", "TG.PEEK policy key"),
        ("TG.REPORT tokens ann TTL 5000", "-ERR syntax error near 'TTL'", "TG.REPORT policy key"),
        ("TG.REFUND tokens ann ID a AGE 1", "-ERR a refund by ID", "neither COST nor AGE"),
        ("TG.REFUND tokens ann ID a COST 1", "-ERR a refund by ID", "neither COST nor AGE"),
        ("TG.REFUND tokens ann COST 1", "-ERR a refund needs", "or its id"),
        ("TG.COMMIT tokens ann a", "-ERR wrong number", "TG.COMMIT policy key id actual"),
        ("TG.COMMIT tokens ann a x", "-ERR actual 'x'", "whole number"),
        ("TG.COMMIT tokens ann a 1 COST 1", "-ERR syntax error near 'COST'", "id actual"),
        ("TG.COMMIT tokens ann a 1 ID b", "-ERR syntax error near 'ID'", "id actual"),
        ("TG.COMMIT KEY ann QUOTA token-bucket 1 1s a", "-ERR wrong number", "id actual"),
        ("TG.RENEW tokens ann a", "-ERR wrong number", "TG.RENEW policy key id ttl"),
        ("TG.RENEW tokens ann a 0", "-ERR the ttl", "from 1s to 24h"),
        ("TG.ACQUIRE KEY ann QUOTA concurrency 5 60s", "-ERR quota", "concurrency has no window"),
        ("TG.ACQUIRE KEY ann QUOTA concurrency 0", "-ERR quota", "from 1 to"),
        ("TG.ACQUIRE KEY ann QUOTA concurrency 5 BURST 6", "-ERR quota", "has no burst"),
        ("TG.ACQUIRE KEY ann QUOTA concurrency", "-ERR wrong number", "QUOTA algorithm limit"),
    ] {
        let reply = client.ask(line);
        assert!(reply.starts_with(code), "{line}: {reply}");
        assert!(reply.contains(hint), "{line}: {reply}");
    }
    assert_eq!(client.ask("TG.PEEK tokens ann"), "*6 :1 :100 :99 :0 :60000 :0", "no charge");
    // A policy may be called KEY, and an id QUOTA.
    let mut client = Conversation::new("policies: [{name: KEY, limit: 9, window: 1s}]\n");
    assert!(client.ask("TG.RESERVE KEY QUOTA ID a").starts_with("*9 :1 :9 :8 "));
}
