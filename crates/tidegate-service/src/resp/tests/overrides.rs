//! `TG.OVERRIDE`: its arguments, its scope, and what it does.

use super::*;

const KEYED: &str = "policies:
  - {name: per-user, key: [header.x-user-id], limit: 2, window: 60s}
";

#[test]
fn admin_raises_blocks_and_takes_back_a_limit() {
    let mut client = Conversation::new(KEYED);
    let set = client.ask("TG.OVERRIDE SET per-user ann LIMIT 50 EXPIRES 2m REASON launch");
    assert!(set.contains("\"limit\":50") && set.contains("\"reason\":\"launch\""), "{set}");
    assert!(client.ask("TG.ACQUIRE per-user ann").starts_with("*6 :1 :50 :49"));
    assert!(client.ask("TG.ACQUIRE per-user bob").starts_with("*6 :1 :2 :1"));
    let set = client.ask("tg.override set per-user * MODE block EXPIRES never REASON incident");
    assert!(set.contains("\"mode\":\"block\""), "{set}");
    assert!(client.ask("TG.ACQUIRE per-user bob").starts_with("*6 :0 :2 :0 :0"));
    assert!(client.ask("TG.ACQUIRE per-user ann").starts_with("*6 :1 :50"));
    assert!(client.ask("TG.OVERRIDE LIST").starts_with("*2 $"));
    assert_eq!(client.ask("TG.OVERRIDE DEL per-user *"), ":1");
    assert_eq!(client.ask("TG.OVERRIDE DEL per-user * REASON twice"), ":0");
    assert!(client.ask("TG.ACQUIRE per-user bob").starts_with("*6 :1 :2"));
    client.clock.advance(Duration::from_secs(120));
    assert_eq!(client.ask("TG.OVERRIDE LIST per-user"), "*0");
    assert!(client.ask("TG.ACQUIRE per-user ann").starts_with("*6 :1 :2"));
}

#[test]
fn wrong_arguments_are_errors() {
    let mut client = Conversation::new(KEYED);
    for (line, message) in [
        ("TG.OVERRIDE", "wrong number of arguments"),
        ("TG.OVERRIDE SET per-user", "wrong number of arguments"),
        ("TG.OVERRIDE SET per-user ann LIMIT", "wrong number of arguments"),
        (
            "TG.OVERRIDE SET per-user ann LIMIT many EXPIRES 1h REASON x",
            "LIMIT 'many' is not a whole number",
        ),
        ("TG.OVERRIDE SET per-user ann MODE free EXPIRES 1h REASON x", "unknown variant `free`"),
        ("TG.OVERRIDE SET per-user ann LIMIT 5 REASON x", "expires_in"),
        ("TG.OVERRIDE SET per-user ann LIMIT 5 EXPIRES 1h", "reason"),
        ("TG.OVERRIDE SET per-user ann LIMIT 5 LIMIT 6", "LIMIT is given twice"),
        ("TG.OVERRIDE SET per-user ann FOR 5", "syntax error near 'FOR'"),
        ("TG.OVERRIDE SET other ann LIMIT 5 EXPIRES 1h REASON x", "other"),
        ("TG.OVERRIDE DROP per-user", "wrong number of arguments"),
    ] {
        let reply = client.ask(line);
        assert!(reply.starts_with("-ERR") && reply.contains(message), "{line}: {reply}");
    }
}

#[test]
fn only_a_token_that_may_reset_changes_limits() {
    let mut client = Conversation::new(&format!("{TOKENS}{KEYED}"));
    let set = "TG.OVERRIDE SET per-user ann LIMIT 50 EXPIRES 2m REASON launch";
    assert!(client.ask(set).starts_with("-NOAUTH"));
    assert_eq!(client.ask("AUTH secret"), "+OK");
    for line in [set, "TG.OVERRIDE LIST", "TG.OVERRIDE DEL per-user ann"] {
        assert!(client.ask(line).starts_with("-NOPERM"), "{line}");
    }
    assert_eq!(client.ask("AUTH root"), "+OK");
    let reply = client.ask(set);
    assert!(reply.contains("\"by\":\"admin_token\""), "{reply}");
    // In a transaction, too.
    assert_eq!(client.ask("MULTI"), "+OK");
    assert_eq!(client.ask("TG.OVERRIDE DEL per-user ann"), "+QUEUED");
    assert_eq!(client.finish("EXEC"), "*1 :1");
}

#[test]
fn a_token_that_may_not_read_lists_nothing() {
    let tokens = "auth: {tokens: [{name: ops, token: ops-s3cret-0123456789, scopes: [reset]}]}\n";
    let mut client = Conversation::new(&format!("{tokens}{KEYED}"));
    assert_eq!(client.ask("AUTH ops-s3cret-0123456789"), "+OK");
    let set = "TG.OVERRIDE SET per-user ann LIMIT 50 EXPIRES 2m REASON launch";
    assert!(client.ask(set).contains("\"by\":\"ops\""));
    assert!(client.ask("TG.OVERRIDE LIST").starts_with("-NOPERM"));
}
