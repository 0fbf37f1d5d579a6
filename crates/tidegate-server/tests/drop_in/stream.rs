use std::time::{Duration, Instant};

use prost::Message as _;
use prost_types::Any;
use tidegate_api::envoy::service::discovery::v3::DiscoveryResponse;
use tidegate_config::envoy::RateLimitConfig;

use crate::control_plane::ControlPlane;
use crate::support::{Redis, Service, free_port, with_free_ports};
use crate::{limited, node, rules_of, send, start};

const USER: [(&str, &str); 1] = [("user", "ann")];

#[tokio::test(flavor = "multi_thread")]
async fn rules_are_accepted_replaced_and_emptied() {
    let (_redis, mut plane, program) = start().await;
    let mut client = program.client().await;
    assert_eq!(program.rules(), "");
    assert_eq!(send(&mut client, "edge", &USER).await, (true, None), "no rules yet");

    plane.accept("1", &[rules_of("edge", vec![limited("user", "", 1)])]).await;
    assert_eq!(send(&mut client, "edge", &USER).await, (true, Some(1)));
    assert_eq!(send(&mut client, "edge", &USER).await, (false, Some(1)));

    // The state of the world: a domain that is not in it has no rules any more.
    plane.accept("2", &[rules_of("other", vec![limited("user", "", 7)])]).await;
    assert_eq!(send(&mut client, "edge", &USER).await, (true, None));
    assert_eq!(send(&mut client, "other", &USER).await, (true, Some(7)));
    assert!(program.rules().starts_with("other.user: unit=HOUR requests_per_unit=7"));

    plane.accept("3", &[]).await;
    assert_eq!(
        (program.rules(), send(&mut client, "other", &USER).await),
        (String::new(), (true, None))
    );
    assert_eq!(program.metric("ratelimit_service_config_load_success"), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_rules_are_rejected_with_the_reason_and_the_old_ones_stay() {
    let (_redis, mut plane, program) = start().await;
    let mut client = program.client().await;
    plane.accept("1", &[rules_of("edge", vec![limited("user", "", 100)])]).await;

    let mut no_unit = limited("user", "", 1);
    no_unit.rate_limit.as_mut().expect("a limit").unit = 0;
    plane.send("2", "b", &[rules_of("edge", vec![node("route", "a", vec![no_unit])])]);
    let rejection = plane.request().await;
    assert_eq!((&*rejection.version_info, &*rejection.response_nonce), ("1", "b"));
    let error = rejection.error_detail.expect("a reason");
    assert!(error.message.contains("edge: rate_limit.unit is missing"), "{}", error.message);

    // Many control planes answer a rejection with the same rules at once.
    let start = Instant::now();
    for nonce in ["b2", "b3"] {
        let mut no_unit = limited("user", "", 1);
        no_unit.rate_limit.as_mut().expect("a limit").unit = 0;
        plane.send("2", nonce, &[rules_of("edge", vec![node("route", "a", vec![no_unit])])]);
        let rejection = plane.request().await;
        assert_eq!((&*rejection.version_info, &*rejection.response_nonce), ("1", nonce));
        assert_eq!(rejection.error_detail.as_ref(), Some(&error));
    }
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(program.output().matches("rules of the control plane rejected").count(), 1);

    // Bytes that are no message, and a resource of another type.
    for (nonce, type_url, value) in [
        ("c", RateLimitConfig::TYPE_URL, vec![0xff]),
        ("d", "type.googleapis.com/envoy.config.cluster.v3.Cluster", Vec::new()),
    ] {
        plane.respond(DiscoveryResponse {
            version_info: "3".to_owned(),
            resources: vec![Any { type_url: type_url.to_owned(), value }],
            type_url: RateLimitConfig::TYPE_URL.to_owned(),
            nonce: nonce.to_owned(),
        });
        let rejection = plane.request().await;
        assert_eq!((&*rejection.version_info, &*rejection.response_nonce), ("1", nonce));
        assert!(rejection.error_detail.is_some());
    }
    assert_eq!(send(&mut client, "edge", &USER).await, (true, Some(100)), "the old rules");
    assert_eq!(program.metric("ratelimit_service_config_load_error"), 1);

    // Too much for one message, and a reason that is long itself.
    let long = limited("user", &"v".repeat(4_000), 1);
    for (nonce, value) in [
        ("e", vec![0; 65 << 20]),
        ("f", rules_of("edge", vec![long.clone(), long]).encode_to_vec()),
    ] {
        plane.respond(DiscoveryResponse {
            version_info: "3".to_owned(),
            resources: vec![Any { type_url: RateLimitConfig::TYPE_URL.to_owned(), value }],
            type_url: RateLimitConfig::TYPE_URL.to_owned(),
            nonce: nonce.to_owned(),
        });
        let rejection = plane.request().await;
        assert_eq!((&*rejection.version_info, &*rejection.response_nonce), ("1", nonce));
        let reason = rejection.error_detail.expect("a reason").message;
        assert!((20..=1_001).contains(&reason.chars().count()), "{reason}");
    }
    plane.accept("4", &[rules_of("edge", vec![limited("user", "", 50)])]).await;
    assert_eq!(send(&mut client, "edge", &USER).await, (true, Some(50)));
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_stream_and_killed_control_plane_leave_the_rules() {
    let (_redis, mut plane, program) = start().await;
    let mut client = program.client().await;
    plane.accept("1", &[rules_of("edge", vec![limited("user", "", 100)])]).await;
    plane.close_stream();
    program.wait_until_logged("the control plane is not connected, keeping the current rules");
    assert_eq!(send(&mut client, "edge", &USER).await, (true, Some(100)));
    // A control plane that has restarted may use the same version for other rules.
    let again = plane.request().await;
    assert_eq!((&*again.version_info, &*again.response_nonce), ("", ""));
    plane.accept("2", &[rules_of("edge", vec![limited("user", "", 200)])]).await;

    let address = plane.address.to_string();
    plane.kill().await;
    program.wait_until("the outage is noticed", || program.metric("tidegate_xds_connected") == 0);
    assert_eq!(send(&mut client, "edge", &USER).await, (true, Some(200)));
    let mut plane = ControlPlane::start_on(&address, None).await;
    assert_eq!(plane.request().await.version_info, "");
    assert_eq!(program.metric("tidegate_xds_connected"), 1);
    plane.accept("3", &[rules_of("edge", vec![limited("user", "", 300)])]).await;
    assert_eq!(send(&mut client, "edge", &USER).await, (true, Some(300)));
}

/// Envoy Gateway sends all rules again for changes of others, and in any order.
#[tokio::test(flavor = "multi_thread")]
async fn unchanged_rules_are_accepted_without_a_reload() {
    let (_redis, mut plane, program) = start().await;
    let rules = |name: &str| rules_of(name, vec![limited("user", "", 100)]);
    plane.accept("1", &[rules("a"), rules("b")]).await;
    plane.accept("2", &[rules("b"), rules("a")]).await;
    plane.send("3", "bad", &[rules("")]);
    let rejection = plane.request().await;
    assert_eq!(&*rejection.version_info, "2", "the version of the rules in use");
    plane.accept("4", &[rules("a"), rules("b")]).await;
    assert_eq!(program.metric("ratelimit_service_config_load_success"), 3);
    let output = program.output();
    for once in [
        "rules of the control plane applied",
        "reload: configuration reloaded",
        "event=\"reloaded\"",
    ] {
        assert_eq!(output.matches(once).count(), 1, "{once}:\n{output}");
    }
    plane.accept("5", &[rules("a")]).await;
    assert_eq!(program.rules().lines().count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn outage_is_logged_once_for_each_reason_and_its_end() {
    let redis = Redis::start();
    let address = format!("127.0.0.1:{}", free_port());
    let program = crate::Program::start(&crate::Variables::of_gateway(&address, &redis));
    let warning = "the control plane is not connected";
    program.wait_until_logged(warning);
    assert!(program.output().contains("Connection refused"), "{}", program.output());
    // It listens, but speaks another protocol.
    let other = tokio::net::TcpListener::bind(&address).await.expect("a free port");
    let attempts = tokio::spawn(async move {
        for _ in 0..2 {
            drop(other.accept().await);
        }
    });
    attempts.await.expect("two attempts");
    // How it fails depends on how far a call has come, but each line has a new reason.
    let reasons = || -> Vec<String> {
        let output = program.output();
        let reasons = output.lines().filter(|line| line.contains(warning));
        reasons.filter_map(|line| Some(line.split_once("reason=")?.1.to_owned())).collect()
    };
    program.wait_until("the new reason is logged", || reasons().len() > 1);
    let mut plane = ControlPlane::start_on(&address, None).await;
    plane.request().await;
    plane.accept("1", &[]).await;
    program.wait_until_logged("control plane connected");
    let reasons = reasons();
    assert!(reasons.windows(2).all(|two| two[0] != two[1]), "{reasons:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn control_plane_may_start_after_the_program() {
    let redis = Redis::start();
    let address = format!("127.0.0.1:{}", free_port());
    let variables = crate::Variables::of_gateway(&address, &redis);
    let program = crate::Program::start(&variables);
    let mut client = program.client().await;
    assert_eq!(send(&mut client, "edge", &USER).await, (true, None));
    program.wait_until_logged("the control plane is not connected");
    let mut plane = ControlPlane::start_on(&address, None).await;
    assert_eq!(plane.request().await.version_info, "");
    plane.accept("1", &[rules_of("edge", vec![limited("user", "", 3)])]).await;
    assert_eq!(send(&mut client, "edge", &USER).await, (true, Some(3)));
}

/// Prints the time from sending the rules until they are in use, for the page of this mode.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_rules_and_messages_of_megabytes_are_applied() {
    let (_redis, mut plane, program) = start().await;
    let mut client = program.client().await;
    for (version, count, limit) in [("1", 5_000, 5), ("2", 10_000, 5), ("3", 10_000, 6)] {
        let rules = (0..count).map(|route| {
            let name = format!("httproute/default/backend-{route}/rule/0/match/0/www_example_com");
            node(&name, &name, vec![limited("rule-0-match-0", "", limit)])
        });
        let rules = [rules_of("default/eg/http", rules.collect())];
        let start = Instant::now();
        plane.accept(version, &rules).await;
        println!("{count} rules (version {version}): accepted after {:?}", start.elapsed());
    }
    let route = "httproute/default/backend-9999/rule/0/match/0/www_example_com";
    let entries = [(route, route), ("rule-0-match-0", "ann")];
    assert_eq!(send(&mut client, "default/eg/http", &entries).await, (true, Some(6)));

    // Beyond the 4 MiB that clients in general accept.
    let names = (0..3_000).map(|number| format!("{number}-{}", "x".repeat(2_000)));
    let large = names.map(|name| limited(&name, &name, 1)).collect();
    plane.accept("4", &[rules_of("edge", large)]).await;
    assert_eq!(program.rules().lines().count(), 3_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn own_configuration_may_name_a_control_plane_and_settings_of_later_rules() {
    let mut plane = ControlPlane::start().await;
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let config = |more: &str| {
        let xds = format!("xds: {{server: '{}', node_id: fleet-a}}", plane.address);
        with_free_ports(&format!("envoy: {{{xds}, algorithms: {{export: token-bucket}}{more}}}\n"))
    };
    let (first, second) = (config(""), config(", shadow_mode: true"));
    std::fs::write(&file, first).expect("written");
    let service = Service::start_on(folder, &file, &[]);
    assert_eq!(plane.request().await.node.expect("a node").id, "fleet-a");
    let mut export = limited("export", "", 1);
    export.rate_limit.as_mut().expect("a limit").name = "export".to_owned();
    plane.accept("1", &[rules_of("edge", vec![export, limited("user", "", 1)])]).await;
    let policies = service.admin("/v1/policies").json();
    let algorithm = |name: &str| {
        let mut policies = policies.as_array().expect("a list").iter();
        policies.find(|policy| policy["name"] == name).expect("a rule")["algorithm"].clone()
    };
    assert_eq!(algorithm("edge.export"), "token-bucket");
    assert_eq!(algorithm("edge.user"), "fixed-window");

    // A changed file keeps the rules.
    std::fs::write(service.file(), second).expect("written");
    service.wait_until_logged("sections=\"envoy\"");
    assert!(service.admin("/v1/policies").body.contains("edge.export"));
    // Another way to get rules needs a restart, and is rejected until then.
    std::fs::write(service.file(), with_free_ports("policies: []\n")).expect("written");
    service.wait_until_logged("envoy.xds was removed, which needs a restart");
    assert!(service.admin("/v1/policies").body.contains("edge.user"));
}
