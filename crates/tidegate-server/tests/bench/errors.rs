//! Invalid input: one clear line, and exit code 2.

use crate::support::{Redis, Service, free_port};
use crate::{bench, text};

#[test]
fn invalid_input_is_one_line() {
    let redis = Redis::start();
    let service = Service::start("policies: [{name: per-user, limit: 1, window: 1s}]\n");
    let http = format!("http://{}", service.http);
    let http = http.as_str();
    let grpc = service.grpc.as_deref().expect("an address for gRPC");
    let admin = format!("http://{}", service.admin);
    let closed_port = free_port();
    let (closed_http, closed_grpc) =
        (format!("http://127.0.0.1:{closed_port}"), format!("127.0.0.1:{closed_port}"));
    let closed_redis = format!("redis://127.0.0.1:{closed_port}");
    let redis_as_http = format!("http://127.0.0.1:{}", redis.port());
    let redis_as_grpc = format!("127.0.0.1:{}", redis.port());
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let write = |name: &str, content: &str| {
        std::fs::write(path(name), content).expect("written");
        path(name)
    };
    let config = write("tidegate.yaml", "policies: [{name: a, limit: 1, window: 1s}]\n");
    let (empty, missing) = (write("empty", ""), path("missing"));
    let envoy = ["--domain", "d", "--descriptor", "user={key}"];
    let with_grpc = |more: &[&'static str]| [&["--grpc", grpc], &envoy[..], more].concat();

    let cases: Vec<(Vec<&str>, &str)> = vec![
        // Numbers.
        (vec!["--rate", "0"], "--rate 0 is out of range"),
        (vec!["--rate", "nan"], "--rate NaN is out of range"),
        (vec!["--rate", "1e9"], "is out of range"),
        (vec!["--rate", "fast"], "invalid value 'fast'"),
        (vec!["--rate", "5", "--concurrency", "5"], "cannot be used with"),
        (vec!["--concurrency", "0"], "from 1 to 10000"),
        (vec!["--concurrency", "1000000"], "from 1 to 10000"),
        (vec!["--max-in-flight", "0"], "from 1 to 100000"),
        (vec!["--connections", "0"], "from 1 to 1000"),
        (vec!["--requests", "0"], "--requests 0 is out of range"),
        (vec!["--duration", "0s"], "--duration 0s is out of range"),
        (vec!["--duration", "2d"], "--duration 2d is out of range"),
        (vec!["--duration", "10"], "is not a duration"),
        (vec!["--warmup", "2h"], "--warmup 2h is out of range"),
        (vec!["--timeout", "0s"], "--timeout 0s is out of range"),
        (vec!["--timeout", "1h"], "--timeout 1h is out of range"),
        (vec!["--keys", "0"], "--keys 0 is out of range"),
        (vec!["--keys", "1000000000000"], "is out of range"),
        (vec!["--distribution", "pareto"], "invalid value 'pareto'"),
        (vec!["--zipf", "1"], "--zipf is only for --distribution zipf"),
        (vec!["--distribution", "zipf", "--zipf", "0"], "--zipf 0 is out of range"),
        (vec!["--arrivals", "burst"], "invalid value 'burst'"),
        (vec!["--seed=-1"], "--seed"),
        // Policies.
        (vec!["--limit", "0"], "limit 0 is out of range"),
        (vec!["--window", "400d"], "out of range"),
        (vec!["--algorithm", "gcra"], "invalid value 'gcra'"),
        (vec!["--burst", "9"], "sliding-log has no burst"),
        (vec!["--cost", "0"], "--cost 0 is out of range"),
        (vec!["--limit", "5", "--cost", "6"], "--cost 6 is out of range"),
        (vec!["--policy", "a"], "give --config FILE"),
        (vec!["--config", &config, "--policy", "b"], "--policy \"b\" is not in --config: it has a"),
        (vec!["--config", &config, "--policy", "a", "--limit", "5"], "cannot be used with"),
        (vec!["--config", &missing], "missing: cannot be read"),
        // Targets.
        (vec!["--memory", "--http", http], "'--memory' cannot be used with '--http <URL>'"),
        (vec!["--http", http, "--grpc", grpc], "cannot be used with"),
        (vec!["--http", http, "--config", &config], "cannot be used with"),
        (vec!["--domain", "d"], "--grpc <ADDRESS>"),
        (vec!["--descriptor", "a=b"], "--grpc <ADDRESS>"),
        (vec!["--attribute", "path=/"], "--attribute is only for --http"),
        (vec!["--token-file", &empty], "--token-file is only for a service"),
        (vec!["--redis", "127.0.0.1"], "it must look like redis://"),
        (vec!["--redis", &closed_redis], "refused"),
        (vec!["--redis", "redis://127.0.0.1:1", "--prefix", "a{b"], "prefix"),
        // A service by HTTP.
        (vec!["--http", "127.0.0.1:8080"], "it must look like http://127.0.0.1:8080"),
        (vec!["--http", &closed_http], "Connection refused"),
        (vec!["--http", &redis_as_http], "--http"),
        (vec!["--http", &admin], "HTTP 404"),
        (vec!["--http", http, "--policy", "per-usr"], "HTTP 404"),
        (vec!["--http", http, "--attribute", "path=/", "--attribute", "colour={key}"], "colour"),
        (vec!["--http", http, "--attribute", "path=/"], "no --attribute contains {key}"),
        (vec!["--http", http, "--attribute", "path"], "write it like path=/api/items"),
        (vec!["--http", http, "--limit", "0"], "limit 0 is out of range"),
        (vec!["--http", http, "--cost", "0"], "--cost 0 is out of range"),
        (vec!["--http", http, "--token-file", &empty], "is empty"),
        (vec!["--http", http, "--token-file", &missing], "missing: cannot be read"),
        (vec!["--http", http, "--ca", &empty], "has no TLS"),
        (vec!["--http", "https://127.0.0.1:1", "--ca", &empty], "cannot read a certificate"),
        // A service by gRPC.
        (vec!["--grpc", grpc], "--grpc needs --domain NAME and --descriptor"),
        (vec!["--grpc", grpc, "--domain", "d", "--descriptor", "user"], "write it like user={key}"),
        (vec!["--grpc", grpc, "--domain", "d", "--descriptor", "a=b"], "no --descriptor contains"),
        ([&["--grpc", &closed_grpc], &envoy[..]].concat(), "Connection refused"),
        ([&["--grpc", &redis_as_grpc], &envoy[..]].concat(), "--grpc"),
        ([&["--grpc", "localhost"], &envoy[..]].concat(), "has no port"),
        (with_grpc(&["--limit", "5"]), "cannot be used with"),
        (with_grpc(&["--policy", "a"]), "cannot be used with"),
        (with_grpc(&["--cost", "5000000000"]), "--cost 5000000000 is out of range"),
    ];
    for (arguments, message) in cases {
        let output = bench(&[&arguments[..], &["--json"]].concat());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(message), "{arguments:?}: {error}");
        assert_eq!(error.trim_end().lines().count(), 1, "{arguments:?}: {error}");
        assert_eq!(text(&output.stdout), "", "{arguments:?}");
    }
}

#[test]
fn passwords_are_not_printed() {
    for arguments in [
        ["--http", "http://user:s3cret@127.0.0.1:1"],
        ["--redis", "redis://user:s3cret@127.0.0.1:1"],
    ] {
        let output = bench(&arguments);
        assert_eq!(output.status.code(), Some(2));
        let printed = text(&output.stderr) + &text(&output.stdout);
        assert!(!printed.contains("s3cret"), "{printed}");
    }
}

#[test]
fn flag_wins_over_variables_that_it_excludes() {
    let service = Service::start("policies: [{name: api, limit: 9, window: 1h}]\n");
    let url = format!("http://{}", service.http);
    let grpc = service.grpc.clone().expect("an address for gRPC");
    let foreign = [
        ("TIDEGATE_REDIS", "redis://127.0.0.1:1"),
        ("TIDEGATE_REDIS_PASSWORD_FILE", "/nowhere/password"),
        ("TIDEGATE_CONFIG", "/nowhere/tidegate.yaml"),
        ("TIDEGATE_LIMIT", "0"),
        ("TIDEGATE_WINDOW", "0s"),
    ];
    let by_policy = ["--http", &url, "--policy", "api"];
    let by_grpc = ["--grpc", &grpc, "--domain", "d", "--descriptor", "user={key}"];
    for target in [&by_policy[..], &by_grpc] {
        let mut command = crate::with_long_timeout(&[target, &["--requests", "3"]].concat());
        let output = command.envs(foreign).output().expect("the binary runs");
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    // Two flags, or two variables, are still an error, which names the variables.
    let mut both = crate::command(&["--requests", "3"]);
    let both = both.envs([("TIDEGATE_REDIS", "redis://127.0.0.1:1"), ("TIDEGATE_HTTP", &url)]);
    let error = text(&both.output().expect("the binary runs").stderr);
    assert!(error.contains("(--redis is set by the variable TIDEGATE_REDIS)"), "{error}");
    assert!(error.contains("(--http is set by the variable TIDEGATE_HTTP)"), "{error}");
    let mut missing = crate::command(&["--policy", "api", "--requests", "3"]);
    let output = missing.env("TIDEGATE_CONFIG", "/nowhere/tidegate.yaml").output();
    let error = text(&output.expect("the binary runs").stderr);
    assert!(error.contains("/nowhere/tidegate.yaml"), "{error}");
    assert!(error.contains("is set by the variable TIDEGATE_CONFIG"), "{error}");
}
