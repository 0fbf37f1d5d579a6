use crate::support::Redis;
use crate::{advice_of, assert_found, doctor, findings_of, run_checks, text, tidegate};

/// Starts a server without a command.
fn without(command: &str) -> Redis {
    Redis::start_with(&["--rename-command", command, ""])
}

#[test]
fn server_without_time_is_named_with_advice() {
    let redis = without("TIME");
    let (found, code) = run_checks(&redis.url());
    assert_eq!(code, Some(2), "{found}");
    let message = "this server lacks commands that decisions need: time";
    assert_found(&found, "commands", "error", message);
    assert!(advice_of(&found, "commands", "error").contains("rename-command"), "{found}");
    // As text, the advice has a line of its own.
    let shown = text(&doctor(&redis.url(), &[]).stdout);
    assert!(shown.starts_with("error    commands ") && shown.contains("→ they were"), "{shown}");
}

#[test]
fn user_without_time_gets_the_minimal_user() {
    let redis = Redis::start();
    let () = redis.query(&["ACL", "SETUSER", "u", "on", ">pw", "~*", "+@all", "-time"]);
    let output = doctor(&redis.url().replace("redis://", "redis://u:pw@"), &[]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{shown}");
    assert!(shown.contains("lacks permissions that decisions need: time\n"), "{shown}");
    assert!(shown.contains("→ the minimal user: ACL SETUSER tidegate "), "{shown}");
}

#[test]
fn server_without_evalsha_is_named_in_plain_text() {
    let redis = without("EVALSHA");
    let (found, code) = run_checks(&redis.url());
    assert_eq!(code, Some(2), "{found}");
    let message = "this server lacks commands that decisions need: evalsha";
    assert_found(&found, "commands", "error", message);
    // The server repeats arguments of the call, which are not UTF-8.
    assert_found(&found, "scripts", "error", "unknown command 'EVALSHA'");
    assert_eq!(findings_of(&found, "routing"), Vec::new(), "{found}");
}

#[test]
fn server_without_script_load_is_fit_because_eval_works() {
    let redis = without("SCRIPT");
    let (found, code) = run_checks(&redis.url());
    assert_eq!(code, Some(0), "{found}");
    assert_found(&found, "commands", "note", "script|load");
    assert_found(&found, "scripts", "ok", "works");
    // No proxy is in front.
    assert!(findings_of(&found, "routing").iter().all(|(level, _)| level == "ok"), "{found}");
    let decided = ["acquire", "u", "--limit", "1", "--window", "1h", "--redis"];
    assert_eq!(tidegate(&[&decided[..], &[&redis.url()]].concat()).status.code(), Some(0));
}

#[test]
fn user_without_script_load_is_fit_with_eval_only() {
    let redis = Redis::start();
    let url = redis.url().replace("redis://", "redis://u:pw@");
    let () = redis.query(&["ACL", "SETUSER", "u", "on", ">pw", "~*", "+@all", "-script"]);
    let (found, code) = run_checks(&url);
    assert_eq!(code, Some(0), "{found}");
    assert_found(&found, "acl", "note", "script|load");
    let () = redis.query(&["ACL", "SETUSER", "u", "-eval"]);
    let (found, code) = run_checks(&url);
    assert_eq!(code, Some(2), "{found}");
    assert_found(&found, "acl", "error", "lacks permissions that decisions need: script|load");
}
