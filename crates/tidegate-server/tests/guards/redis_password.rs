use std::fs;
use std::process::{Command, Output};

use crate::POLICY;
use crate::support::{Redis, Service};

const PASSWORD: &str = "pa ss/w@rd:#1";
const WARNING: &str = "process list";

fn redis() -> Redis {
    let redis = Redis::start();
    let _: () = redis.query(&[
        "ACL",
        "SETUSER",
        "limiter",
        "on",
        &format!(">{PASSWORD}"),
        "~*",
        "&*",
        "+@all",
    ]);
    let _: () = redis.query(&["CONFIG", "SET", "requirepass", PASSWORD]);
    redis
}

fn acquire(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["acquire", "k", "--limit", "1000", "--window", "1h"])
        .args(arguments)
        .env_clear()
        .envs(environment.iter().copied())
        .output()
        .expect("the binary runs")
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

#[test]
fn password_comes_from_a_file() {
    let redis = redis();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("password");
    fs::write(&file, format!("{PASSWORD}\n")).expect("written");
    let file = file.to_str().expect("UTF-8");
    let address = format!("127.0.0.1:{}", redis.port());
    let (url, named) = (format!("redis://{address}"), format!("redis://limiter@{address}"));
    assert!(!acquire(&["--redis", &url], &[]).status.success());
    for url in [&url, &named] {
        let flag = acquire(&["--redis", url, "--redis-password-file", file], &[]);
        assert!(flag.status.success() && !text(&flag).contains(WARNING), "{}", text(&flag));
        let variables = [("TIDEGATE_REDIS", url.as_str()), ("TIDEGATE_REDIS_PASSWORD_FILE", file)];
        let environment = acquire(&[], &variables);
        assert!(environment.status.success(), "{}", text(&environment));
    }
    let doctor = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["doctor", "--redis", &named, "--redis-password-file", file, "--probes", "1"])
        .output()
        .expect("the binary runs");
    assert!(text(&doctor).contains("fit"), "{}", text(&doctor));

    // In the configuration, and for the Redis of a configuration.
    let password = format!("store: {{redis: '{named}', password_file: {file}}}\n");
    for (config, arguments) in [
        (password, vec![]),
        (format!("store: {{redis: '{named}'}}\n"), vec!["--redis-password-file", file]),
    ] {
        let service = Service::start_with(&format!("{config}{POLICY}"), &arguments);
        service.wait_until("Redis decides", |service| {
            let peek = service.post("/v1/peek", r#"{"policy": "p", "key": "k"}"#);
            peek.json()["source"] == serde_json::json!("store")
        });
        let readiness = service.admin("/readyz").body;
        assert!(!service.output().contains(PASSWORD) && !readiness.contains(PASSWORD));
    }
}

#[test]
fn password_on_the_command_line_is_a_warning() {
    let redis = redis();
    let url = format!("redis://:pa%20ss%2Fw%40rd%3A%231@127.0.0.1:{}", redis.port());
    let flag = acquire(&["--redis", &url], &[]);
    assert!(flag.status.success(), "{}", text(&flag));
    let shown = text(&flag);
    assert!(shown.contains(WARNING) && shown.contains("--redis-password-file"), "{shown}");
    assert!(!shown.contains("pa%20ss"), "{shown}");
    let environment = acquire(&[], &[("TIDEGATE_REDIS", &url)]);
    assert!(environment.status.success() && !text(&environment).contains(WARNING));
    let service = Service::start_with(POLICY, &["--redis", &url]);
    service.wait_until_logged(WARNING);
    let service = Service::start_with_environment(POLICY, &[("TIDEGATE_REDIS", &url)]);
    assert!(!service.output().contains(WARNING), "{}", service.output());
}

#[test]
fn unusable_password_files_are_errors() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    fs::write(path("empty"), "\n").expect("written");
    fs::write(path("long"), "x".repeat(5_000)).expect("written");
    fs::write(path("password"), "S3CR3T").expect("written");
    let url = "redis://127.0.0.1:1";
    for (url, file, reason) in [
        (url, "nowhere", "cannot be read"),
        (url, "empty", "is empty"),
        (url, "long", "more than 4096 bytes"),
        ("redis://:other@127.0.0.1:1", "password", "already has a password"),
    ] {
        let output = acquire(&["--redis", url, "--redis-password-file", &path(file)], &[]);
        let shown = text(&output);
        assert!(output.status.code() == Some(2) && shown.contains(reason), "{file}: {shown}");
        let config = path("tidegate.yaml");
        let store = format!("store: {{redis: '{url}', password_file: {file}}}\n");
        fs::write(&config, store).expect("written");
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["config", "check", &config])
            .output()
            .expect("the binary runs");
        let shown = text(&output);
        assert!(output.status.code() == Some(2) && shown.contains(reason), "{file}: {shown}");
        assert!(!shown.contains("S3CR3T") && !shown.contains("other"), "{shown}");
    }
    let without_redis = acquire(&["--redis-password-file", &path("password")], &[]);
    assert!(text(&without_redis).contains("no Redis"), "{}", text(&without_redis));
}

#[test]
fn sentinels_have_a_password_file_of_their_own() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(folder.path().join("password"), "S3CR3T\n").expect("written");
    let file = folder.path().join("tidegate.yaml");
    for (fields, expected) in [
        ("password_file: password", None),
        ("username: limiter, password_file: password", None),
        ("password: a, password_file: password", Some("both password and password_file")),
        ("username: limiter", Some("has a username but no password")),
        ("password_file: nowhere", Some("cannot be read")),
    ] {
        let sentinel = format!("{{master: m, nodes: ['redis://127.0.0.1:1'], {fields}}}");
        let config = format!("store: {{sentinel: {sentinel}, password_file: password}}\n");
        fs::write(&file, config).expect("written");
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["config", "check"])
            .arg(&file)
            .output()
            .expect("the binary runs");
        let shown = text(&output);
        assert_eq!(output.status.success(), expected.is_none(), "{fields}: {shown}");
        assert!(shown.contains(expected.unwrap_or("valid")), "{fields}: {shown}");
        assert!(!shown.contains("S3CR3T"), "{shown}");
    }
}

/// Sets a new password of Redis, and closes all connections that know the old one.
fn rotate(redis: &Redis, password: &str) {
    let _: () = redis.query(&["ACL", "SETUSER", "limiter", "resetpass", &format!(">{password}")]);
    let _: i64 = redis.query(&["CLIENT", "KILL", "USER", "limiter"]);
}

fn is_decided_by_redis(service: &Service) -> bool {
    let peek = service.post("/v1/peek", r#"{"policy": "p", "key": "k"}"#);
    peek.json()["source"] == serde_json::json!("store")
}

#[test]
fn rotated_password_needs_no_restart() {
    let redis = Redis::start();
    let user = ["ACL", "SETUSER", "limiter", "on", ">first", "~*", "&*", "+@all"];
    let _: () = redis.query(&user);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("password");
    fs::write(&file, "first\n").expect("written");
    let password_file = file.to_str().expect("UTF-8");
    let named = format!("redis://limiter@127.0.0.1:{}", redis.port());
    let in_file = format!("store: {{redis: '{named}', password_file: {password_file}}}\n{POLICY}");
    let in_url = named.replace("limiter@", "limiter:first@");
    let with_url = format!("store: {{redis: '{in_url}'}}\n{POLICY}");
    let flags = ["--redis", &named, "--redis-password-file", password_file];
    let by_file = Service::start(&in_file);
    let by_flag = Service::start_with(POLICY, &flags);
    let by_url = Service::start(&with_url);
    let services = [&by_file, &by_flag, &by_url];
    for service in services {
        service.wait_until("Redis decides", is_decided_by_redis);
    }
    fs::write(&file, "second\n").expect("written");
    let config = fs::read_to_string(by_url.file()).expect("the file");
    fs::write(by_url.file(), config.replace("limiter:first@", "limiter:second@")).expect("written");
    for service in services {
        service.wait_until("the password is reloaded", |service| {
            service.output().contains("configuration reloaded")
        });
        assert!(is_decided_by_redis(service), "open connections go on: {}", service.output());
    }
    rotate(&redis, "second");
    for service in services {
        service.wait_until("the new password is used", is_decided_by_redis);
        let status = service.admin("/v1/status").json();
        assert_eq!(status["reload"]["restart_pending"], serde_json::json!([]), "{status}");
        let output = service.output();
        let secrets = ["first", "second"].map(|password| output.contains(password));
        assert_eq!(secrets, [false, false], "{output}");
    }
    by_file.wait_until_logged(&format!("files=\"{password_file}\""));
}
