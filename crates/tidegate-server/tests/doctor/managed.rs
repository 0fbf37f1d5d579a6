use crate::support::Redis;
use crate::{advice_of, assert_found, doctor_with, findings_of, report, run_checks};

#[test]
fn server_without_config_is_no_problem_of_permissions() {
    let lru = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let redis = Redis::start_with(&[&["--rename-command", "CONFIG", ""], &lru[..]].concat());
    let (found, code) = run_checks(&redis.url());
    assert_eq!(code, Some(1), "{found}");
    assert_found(&found, "config", "note", "this server has no CONFIG command");
    assert!(advice_of(&found, "config", "note").contains("console"), "{found}");
    assert!(!found.to_string().contains("may not run CONFIG"), "{found}");
    // The advice names no command that the server lacks.
    let advice = advice_of(&found, "eviction-policy", "warning");
    assert!(advice.contains("noeviction") && !advice.contains("CONFIG"), "{advice}");
}

#[test]
fn user_without_config_still_lacks_a_permission() {
    let redis = Redis::start();
    let rules = ["ACL", "SETUSER", "u", "on", ">pw", "~*", "+@all", "-config"];
    let () = redis.query(&rules);
    let (found, _) = run_checks(&redis.url().replace("redis://", "redis://u:pw@"));
    assert_found(&found, "min-replicas-to-write", "note", "this user may not run CONFIG GET");
    assert_eq!(findings_of(&found, "config"), Vec::new(), "{found}");
}

#[test]
fn missing_command_of_the_scripts_is_no_problem_of_permissions() {
    let redis = Redis::start_with(&["--rename-command", "UNLINK", ""]);
    let (found, code) = run_checks(&redis.url());
    assert_eq!(code, Some(2), "{found}");
    let message = "this server lacks commands that decisions need: unlink";
    assert_found(&found, "commands", "error", message);
    assert!(!found.to_string().contains("lacks permissions"), "{found}");
}

#[test]
fn synchronous_freeing_is_a_warning_if_there_are_large_logs() {
    let redis = Redis::start();
    let with = |policy: &str| {
        let config = format!("store: {{redis: '{}'}}\npolicies: [{policy}]\n", redis.url());
        report(&doctor_with(&config, &["--json", "--probes", "5"])).0
    };
    let log = "name: p, algorithm: sliding-log, window: 1h";
    for (policy, level) in [
        (format!("{{{log}, limit: 100}}"), "note"),
        (format!("{{{log}, limit: 50000}}"), "warning"),
        (format!("{{{log}, limit: 50000, encoding: packed}}"), "note"),
        (
            format!("{{{log}, limit: 10, key: host, overrides: [{{key: u, limit: 60000}}]}}"),
            "warning",
        ),
    ] {
        assert_found(&with(&policy), "lazy-freeing", level, "lazyfree-lazy-expire is off");
    }
    assert_found(&with(&format!("{{{log}, limit: 50000}}")), "lazy-freeing", "warning", "50000");

    // Without a configuration, the logs themselves show it.
    let mut add = redis::cmd("ZADD");
    add.arg("rate_limit:{u}:p");
    for number in 0..6_000 {
        add.arg(number).arg(format!("{number}:1"));
    }
    let () = add.query(&mut redis.connection()).expect("added");
    let () = redis.query(&["EXPIRE", "rate_limit:{u}:p", "1000"]);
    let (found, code) = run_checks(&redis.url());
    assert_eq!(code, Some(1), "{found}");
    assert_found(&found, "lazy-freeing", "warning", "6000");

    let () = redis.query(&["CONFIG", "SET", "lazyfree-lazy-expire", "yes"]);
    assert_found(&run_checks(&redis.url()).0, "lazy-freeing", "ok", "in the background");
}
