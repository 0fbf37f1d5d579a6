use crate::support::{
    Databases, Redis, Refusal, Restrictions, ScriptCache, StrictServer, valkey_9,
};
use crate::{advice_of, assert_found, doctor_with, findings_of, report, run_checks, wait_until};

const SHARDS: &str = "one address in front of shards: scripts with keys of several slots are \
                      refused; Tidegate makes one call per slot";
const UNDECLARED: &str = "a script may only use keys that it declares";

#[test]
fn one_address_in_front_of_shards_is_named() {
    for restrictions in [Restrictions::enterprise(), Restrictions::alibaba_without_script_check()] {
        let server = StrictServer::start(restrictions);
        let (found, code) = run_checks(&server.url());
        assert_eq!(code, Some(0), "{found}");
        assert_found(&found, "routing", "note", SHARDS);
        assert!(advice_of(&found, "routing", "note").contains("cluster"), "{found}");
        assert_eq!(findings_of(&found, "routing").len(), 1, "{found}");
        assert_found(&found, "scripts", "ok", "works");
        server.redis().assert_every_key_expires();
    }
}

#[test]
fn refused_undeclared_keys_are_named() {
    // A missing script is not taken for a refusal, nor for the opposite.
    for script_cache in [ScriptCache::Keeps, ScriptCache::ForgetsEvery(1)] {
        let dragonfly = Restrictions { script_cache, ..Restrictions::dragonfly() };
        let server = StrictServer::start(dragonfly);
        let (found, _) = run_checks(&server.url());
        assert_found(&found, "scripts", "note", UNDECLARED);
        assert_found(&found, "scripts", "ok", "works");
        assert_found(&found, "clock", "ok", "this machine's clock");
        server.redis().assert_every_key_expires();
    }
    let plain = StrictServer::start(Restrictions::default());
    let (found, _) = run_checks(&plain.url());
    assert_eq!(findings_of(&found, "scripts").len(), 1, "{found}");
}

#[test]
fn script_text_that_a_proxy_refuses_has_advice() {
    let server = StrictServer::start(Restrictions::alibaba());
    let (found, code) = run_checks(&server.url());
    assert_eq!(code, Some(2), "{found}");
    assert_found(&found, "scripts", "error", "bad lua script for redis cluster");
    let advice = advice_of(&found, "scripts", "error");
    assert!(advice.contains("script_check_enable"), "{advice}");
}

#[test]
fn refused_database_has_advice() {
    let databases = Databases::OnlyZero;
    let server = StrictServer::start(Restrictions { databases, ..Restrictions::default() });
    let (found, code) = run_checks(&format!("{}/3", server.url()));
    assert_eq!(code, Some(2), "{found}");
    assert_found(&found, "connection", "error", "SELECT is not allowed");
    assert!(advice_of(&found, "connection", "error").contains("database 0"), "{found}");
    let (found, code) = run_checks(&format!("{}/0", server.url()));
    assert_eq!(code, Some(0), "{found}");
    let redis = Redis::start();
    let (found, _) = run_checks(&format!("{}/99", redis.url()));
    assert!(advice_of(&found, "connection", "error").contains("database 0"), "{found}");
}

#[test]
fn scripts_that_are_forgotten_at_times_are_no_problem_of_routing() {
    let script_cache = ScriptCache::ForgetsPermille(100);
    let server = StrictServer::start(Restrictions { script_cache, ..Restrictions::default() });
    let (found, code) = run_checks(&server.url());
    assert_eq!(code, Some(0), "{found}");
    assert_found(&found, "routing", "ok", "reach one server");
    assert!(server.refusals(Refusal::NoScript) > 0, "some were forgotten");
}

#[test]
fn missing_field_of_info_is_no_problem_of_permissions() {
    let absent_info = &["maxmemory_policy"];
    let server = StrictServer::start(Restrictions { absent_info, ..Restrictions::default() });
    let (found, _) = run_checks(&server.url());
    assert_found(&found, "eviction-policy", "note", "INFO of this server has no maxmemory_policy");
}

/// INFO of Valkey has `server_mode` instead of `redis_mode`.
#[test]
fn node_of_valkey_without_others_is_a_cluster() {
    let node = Redis::start_program(&valkey_9(), &["--cluster-enabled", "yes"]);
    let () = node.query(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    wait_until("the cluster is ready", || {
        node.query::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
    });
    let (found, _) = run_checks(&node.url());
    assert_found(&found, "topology", "ok", "a cluster of 1 primaries");
}

#[test]
fn virtual_node_of_a_service_is_fit() {
    let server = StrictServer::start(Restrictions::serverless());
    let (found, code) = run_checks(&server.url());
    assert_eq!(code, Some(0), "{found}");
    assert_found(&found, "failover", "note", "one node has all slots");
    assert_found(&found, "scripts", "note", UNDECLARED);
    assert_found(&found, "scripts", "ok", "works");
    server.redis().assert_every_key_expires();
}

#[test]
fn refused_time_is_named_with_the_clock_that_runs() {
    let time_in_scripts = Some("ERR This Redis command is not allowed from script");
    let server = StrictServer::start(Restrictions { time_in_scripts, ..Restrictions::default() });
    let (found, code) = run_checks(&server.url());
    assert_eq!(code, Some(0), "{found}");
    assert_found(&found, "clock", "note", "TIME is refused inside scripts: the clock is estimated");
    assert_found(&found, "clock", "note", "at most half a round trip, ");
    assert_found(&found, "scripts", "ok", "works");
    assert!(server.refusals(Refusal::Time) > 0);

    let config = format!("store: {{redis: '{}', clock: estimated}}\npolicies: []\n", server.url());
    server.restrict(Restrictions::default());
    let (found, code) = report(&doctor_with(&config, &["--json", "--probes", "5"]));
    assert_eq!(code, Some(0), "{found}");
    assert_found(&found, "clock", "note", "store.clock is estimated: the clock is estimated");
}
