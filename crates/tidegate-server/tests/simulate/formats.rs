//! Formats of servers, load balancers, clouds and containers, and what a line must not do.

use serde_json::{Value, json};

use crate::{Folder, combined, report, simulate, simulate_with_input, text};

/// Lines of our own in public formats.
const FORMATS: &str = include_str!("formats.txt");
/// Lines with the values of their attributes.
const LINES: &str = include_str!("lines.txt");

const CONFIG: &str = "
client_ip: {trusted_proxies: [10.0.0.0/8]}
attributes: [status, bytes, remote_user]
policies:
  - {name: clients, match: {path: /api/x, method: GET}, key: [ip, query.a], limit: 2, window: 10s}
  - {name: statuses, key: [status], limit: 100, window: 10s}
  - {name: agents, key: [header.user-agent], limit: 100, window: 10s}
  - {name: users, key: [remote_user], limit: 100, window: 10s}
  - {name: sizes, key: [bytes], limit: 100, window: 10s}
";

/// Returns each format with three lines of successive seconds, after those that name the columns.
fn formats() -> Vec<(&'static str, String)> {
    let blocks = || FORMATS.split("\n\n").filter_map(|block| block.strip_prefix("# "));
    let combined = blocks().find_map(|block| block.strip_prefix("combined\n")).expect("a line");
    let format = |block: &'static str| {
        let (name, lines) = block.split_once('\n').expect("lines");
        let lines = lines.trim_end().replace('→', "\t").replace("{COMBINED}", combined);
        let lines = lines.replace("{ESCAPED}", &combined.replace('"', "\\\""));
        let (header, line) = lines.rsplit_once('\n').unwrap_or(("", &lines));
        let header = if header.is_empty() { String::new() } else { format!("{header}\n") };
        let seconds = ["7", "8", "9"].map(|second| line.replace('§', second) + "\n");
        (name, header + &seconds.concat())
    };
    blocks().map(format).collect()
}

fn policy<'r>(report: &'r Value, name: &str) -> &'r Value {
    let policies = report["variants"][0]["policies"].as_array().expect("policies");
    policies.iter().find(|policy| policy["name"] == name).expect("the policy")
}

fn keys(report: &Value, name: &str) -> Vec<String> {
    let keys = policy(report, name)["heaviest_keys"].as_array().expect("keys");
    keys.iter().map(|key| key["key"].as_str().expect("a key").to_owned()).collect()
}

#[test]
fn public_formats_are_read_without_a_flag() {
    let folder = Folder::new();
    let config = folder.write("tidegate.yaml", CONFIG);
    let formats = formats();
    assert!(formats.len() > 50, "{}", formats.len());
    let (mut statuses, mut agents) = (0, 0);
    for (name, lines) in &formats {
        let log = folder.write("access.log", lines);
        let found = report(&["--access-log", &log, "--config", &config, "--strict"]);
        assert_eq!(found["requests"], 3, "{name}: {found}");
        let start = found["start"].as_str().expect("a time");
        assert!(start.starts_with("2026-11-16T07:44:07."), "{name}: {start}");
        assert!(keys(&found, "clients") == ["203.0.113.9|b"], "{name}: {found}");
        assert_eq!(policy(&found, "clients")["denied"], 1, "{name}: {found}");
        let optional = |policy: &str, value: &str| {
            let found = keys(&found, policy);
            assert!(found.is_empty() || found == [value], "{name}: {policy} {found:?}");
            found.len()
        };
        statuses += optional("statuses", "200");
        agents += optional("agents", "curl/8.1");
        optional("users", "ann");
        optional("sizes", "512");
    }
    assert!(
        statuses > 50 && agents > 30,
        "{statuses} formats with a status, {agents} with an agent"
    );
}

#[test]
fn hostile_lines_of_all_formats_never_crash() {
    let mut seed = 7_u64;
    let mut random = |bound: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        usize::try_from(seed >> 33).expect("64 bits") % bound
    };
    for (name, lines) in formats() {
        let mut bytes = lines.clone().into_bytes();
        for _ in 0..40 {
            let mut line = lines.clone().into_bytes();
            for _ in 0..random(6) {
                let place = random(line.len());
                match random(4) {
                    0 => line[place] = b"\"\\[]{}:,$% \t\0\xff"[random(14)],
                    1 => line.truncate(place + 1),
                    2 => line.insert(place, b'"'),
                    _ => drop(line.remove(place)),
                }
                line.push(b'\n');
            }
            bytes.extend(line);
        }
        let arguments = ["--access-log", "-", "--limit", "5", "--window", "1s", "--allow-late"];
        let output = simulate_with_input(&arguments, &bytes);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{name}: {error}");
        assert!(!error.contains("panicked"), "{name}: {error}");
    }
}

/// Runs with these flags on lines, and returns the keys of one policy.
fn keys_with(flags: &[&str], key: &str, lines: &str) -> Vec<String> {
    let folder = Folder::new();
    let log = folder.write("access.log", lines);
    let arguments = ["--access-log", &log, "--limit", "9", "--window", "1m", "--key", key];
    keys(&report(&[&arguments[..], flags].concat()), "limit")
}

#[test]
fn directives_describe_any_format() {
    let nginx = "$host [$time_iso8601] $request_method \"$request_uri\" for \
                 <$remote_addr|$http_x_tenant> $status";
    let line = "e.com [2026-11-16T07:44:08+00:00] PUT \"/a \\\"b\\\"?c=d\" for \
                <[2001:db8::1]:80|acme> 204\n";
    for (key, value) in [
        ("ip", "2001:db8::/64"),
        ("path", "/a%20%22b%22"),
        ("query.c", "d"),
        ("header.x-tenant", "acme"),
        ("host", "e.com"),
        ("status", "204"),
    ] {
        assert_eq!(keys_with(&["--log-format", nginx], key, line), [value], "{key}");
    }
    let apache =
        r#"%{X-Forwarded-For}i %h:%p %l %u %t \"%m %U%q %H\" %>s %b %D \"%{User-Agent}i\""#;
    let line = "203.0.113.9 10.0.0.1:443 - ann [16/Nov/2026:07:44:08 +0000] \
                \"GET /a?c=d HTTP/1.1\" 200 - 1234 \"curl\"\n";
    for (key, value) in [
        ("ip", "10.0.0.1"),
        ("header.x-forwarded-for", "203.0.113.9"),
        ("path", "/a"),
        ("query.c", "d"),
        ("remote_user", "ann"),
        ("header.user-agent", "curl"),
    ] {
        assert_eq!(keys_with(&["--log-format", apache], key, line), [value], "{key}");
    }
    // A format of nginx.conf has the blanks of its lines.
    let wide = "$remote_addr  [$time_local]\t \"$request\" $status";
    let line = "203.0.113.9  [16/Nov/2026:07:44:07 +0000]  \"GET /a HTTP/1.1\" 200\n";
    assert_eq!(keys_with(&["--log-format", wide], "status", line), ["200"]);
    let list = "$http_x_forwarded_for $remote_addr [$time_local] \"$request\"";
    let line = "198.51.100.7, 10.0.0.3 10.0.0.1 [16/Nov/2026:07:44:07 +0000] \"GET /a HTTP/1.1\"\n";
    let hops = keys_with(&["--log-format", list], "header.x-forwarded-for", line);
    assert_eq!(hops, ["198.51.100.7, 10.0.0.3"]);
    let envoy = "[%START_TIME%] \"%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%\" \
                 %RESPONSE_CODE% %DOWNSTREAM_REMOTE_ADDRESS% \"%REQ(X-TENANT)%\"";
    let line = "[2026-11-16T07:44:08Z] \"GET /a?c=d HTTP/2\" 200 203.0.113.9:99 \"acme\"\n";
    for (key, value) in [("ip", "203.0.113.9"), ("path", "/a"), ("header.x-tenant", "acme")] {
        assert_eq!(keys_with(&["--log-format", envoy], key, line), [value], "{key}");
    }
}

#[test]
fn members_and_columns_are_named_by_the_user() {
    let json = "{\"when\":\"2026-11-16T07:44:08Z\",\"who\":{\"addr\":\"203.0.113.9:80\"},\
                \"call\":{\"verb\":\"GET\",\"what\":\"/a?b=c\"},\"tenant id\":\"acme\"}\n";
    let flags = [
        "--field",
        "time=.when",
        "--field",
        "ip=.who.addr",
        "--field",
        "target=.call.what",
        "--field",
        "header.x-tenant=.[\"tenant id\"]",
    ];
    for (key, value) in [("ip", "203.0.113.9"), ("path", "/a"), ("header.x-tenant", "acme")] {
        assert_eq!(keys_with(&flags, key, json), [value], "{key}");
    }
    // Where a member is named, a method is not needed.
    let json = "{\"time\":\"2026-11-16T07:44:08Z\",\"ip\":\"203.0.113.9\",\"what\":\"/a\"},\n";
    assert_eq!(keys_with(&["--field", "target=.what"], "path", json), ["/a"]);
    let csv = "when;who;method;path\n2026-11-16 07:44:08;203.0.113.9;GET;/a\n";
    let flags = ["--field", "time=when", "--field", "ip=who"];
    assert_eq!(keys_with(&flags, "ip", csv), ["203.0.113.9"]);
}

#[test]
fn a_guess_is_named_and_an_unknown_format_says_which_flag_would_read_it() {
    let folder = Folder::new();
    let arguments =
        |log: &str| simulate(&["--access-log", log, "--limit", "2", "--window", "10s", "--json"]);
    let line = |second| {
        format!("2026-11-16 07:44:0{second} INFO [w-1] Access - 203.0.113.9 GET /api/x 200 5ms\n")
    };
    let lines = (0..3).map(line).collect::<Vec<_>>().concat();
    let output = arguments(&folder.write("guess.log", lines));
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&found["requests"], &found["variants"][0]["denied"]), (&json!(3), &json!(1)));
    let warning = text(&output.stderr);
    let guess = "--log-format '${time:2} $_ [$_] $_ $_ $remote_addr $method $target $status $_'";
    assert!(warning.contains(guess), "{warning}");

    for (line, message) in [
        (
            "{\"when\":\"2026-11-16T07:44:08Z\",\"who\":\"203.0.113.9\"}\n",
            "it is JSON with the members when, who: say which ones have the request, with \
             --field time=.NAME --field method=.NAME --field target=.NAME",
        ),
        (
            "t=2026-11-16T07:44:08Z method=GET path=/a remote_addr=203.0.113.9\n",
            "it is logfmt with the members t, method, path, remote_addr: say which ones have the \
             request, with --field time=.NAME",
        ),
        (
            "{\"ts\":\"half past eight\",\"ip\":\"203.0.113.9\",\"method\":\"GET\",\
             \"uri\":\"/\"}\n",
            "it is JSON, but its time \"half past eight\" or its request cannot be read",
        ),
        (
            "[{\"time\":\"2026-11-16T07:44:08Z\"},{\"time\":\"2026-11-16T07:44:08Z\"}]\n",
            "it is JSON, but not one object per line",
        ),
        (
            "2026/11/16 an elb request from \"GET / HTTP/1.1\"\n",
            "it has 6 words and only a request: describe them with --log-format",
        ),
        (
            "203.0.113.9 asked for something at 2026-11-16T07:44:08Z\n",
            "it has 6 words and only a time and an address: describe them with --log-format",
        ),
    ] {
        let output = arguments(&folder.write("unknown.log", line));
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2));
        assert!(error.contains("unknown.log: its format is unknown: "), "{error}");
        assert!(error.contains(message), "{error}");
    }
    let log = folder.write("access.log", combined("203.0.113.9", 1, "/"));
    for (format, message) in [
        ("nginxx", "--log-format \"nginxx\" is unknown: write directives of nginx"),
        ("$remote_addr $status", "it has no $request, and no path"),
        ("$remote_addr $", "\"$\" is no directive"),
    ] {
        let output = simulate(&[
            "--access-log",
            &log,
            "--limit",
            "2",
            "--window",
            "10s",
            "--log-format",
            format,
        ]);
        assert_eq!(output.status.code(), Some(2), "{format}");
        assert!(text(&output.stderr).contains(message), "{}", text(&output.stderr));
    }
}

#[test]
fn attributes_are_those_of_the_line() {
    let mut count = 0;
    for block in LINES.split("\n\n").skip(1) {
        let of_log = |line: &&str| !line.starts_with("> ");
        let log: String = block.lines().filter(of_log).flat_map(|line| [line, "\n"]).collect();
        let log = log.replace("[T]", "[16/Nov/2026:07:44:07 +0000]").replace('→', "\t");
        let log = log.replace('␛', "\u{1b}").replace('␀', "\0");
        for attribute in block.lines().filter_map(|line| line.strip_prefix("> ")) {
            let (key, value) = attribute.split_once('=').expect("a value");
            assert_eq!(keys_with(&[], key, &log), [value], "{key}: {log}");
            count += 1;
        }
    }
    assert!(count > 50, "{count}");
}

#[test]
fn guessed_values_end_where_their_words_do() {
    let folder = Folder::new();
    for (line, key, value) in [
        (
            "203.0.113.9|-|16/Nov/2026:07:44:07 +0000|GET /x HTTP/1.1|200|512|-|Mozilla/5.0 (X)",
            "header.user-agent",
            "Mozilla/5.0 (X)",
        ),
        (
            "2026-11-16 07:44:07.123 +00:00 [INF] HTTP GET /x responded 200 in 1 ms 203.0.113.9",
            "path",
            "/x",
        ),
        (
            "203.0.113.9|16/Nov/2026:07:44:07 +0000|GET /x HTTP/1.1|200|512|Mozilla/5.0 (X)|0.1|z",
            "header.user-agent",
            "Mozilla/5.0 (X)",
        ),
        (
            "2026-11-16T07:44:07+00:00 203.0.113.9 \"GET /x HTTP/1.1\" 200 512 \"M\" 0.003",
            "bytes",
            "512",
        ),
        ("2026-11-16 07:44:07,123 [worker-1] INFO 203.0.113.9 GET /x 200 5ms", "status", "200"),
        (
            "203.0.113.9 - - [16/Nov/2026:07:44:07.123 +0000] 'GET /x HTTP/1.1' 200 512",
            "method",
            "GET",
        ),
        (
            "2026/11/16 07:44:07 [host/abc-1] \"GET http://e.com/x HTTP/1.1\" from \
             203.0.113.9:4711 - 200 512B in 1ms",
            "ip",
            "203.0.113.9",
        ),
    ] {
        let log = folder.write("access.log", format!("{line}\n"));
        let flags = ["--limit", "9", "--window", "1m", "--key", key, "--json"];
        let output = simulate(&[&["--access-log", &log], &flags[..]].concat());
        let found = serde_json::from_slice(&output.stdout);
        let found = found.unwrap_or_else(|_| panic!("{line}: {}", text(&output.stderr)));
        assert_eq!(keys(&found, "limit"), [value], "{line}: {}", text(&output.stderr));
    }
}

#[test]
fn what_is_not_http_is_a_class_of_its_own() {
    let good = combined("203.0.113.9", 5, "/");
    let request = |request: &str| good.replace("GET / HTTP/1.1", request);
    let lines = [
        good.clone(),
        request(r"\x16\x03\x01\x02\x00\x01\x00\x01\xFC\x03\x03 \x8B"),
        request("-"),
        request(""),
        request("<BADREQ>"),
        good.clone(),
    ];
    let json = good_json("GET / HTTP/1.1") + &good_json("") + &good_json("\\u0016\\u0003\\u0001 x");
    let json = json + &good_json(r"\x16\x03");
    for (lines, requests, not_http) in [(lines.concat(), 2, 4), (json, 1, 3)] {
        let folder = Folder::new();
        let log = folder.write("access.log", lines);
        let arguments = ["--access-log", &log, "--limit", "3", "--window", "10s"];
        let found = report(&[&arguments[..], &["--strict"]].concat());
        let counts = (&found["requests"], &found["lines"]["bad"], &found["lines"]["not_http"]);
        assert_eq!(counts, (&json!(requests), &json!(0), &json!(not_http)));
        let table = text(&simulate(&arguments).stdout);
        assert!(table.contains("not HTTP, such as TLS sent to a plain port"), "{table}");
    }
}

#[test]
fn requests_that_caddy_logs_twice_are_one_and_lines_of_blanks_take_no_time() {
    let line = |logger: &str| {
        format!(
            "{{\"logger\":\"{logger}\",\"ts\":1794815048.1,\"request\":{{\
             \"remote_ip\":\"203.0.113.9\",\"method\":\"GET\",\"uri\":\"/\"}},\"status\":502}}\n"
        )
    };
    let lines = line("http.log.error.log0") + &line("http.log.access.log0");
    assert_eq!(keys_with(&["--strict"], "path", &lines), ["/"]);
    // A time that grew with the square of the blanks was a minute.
    let blanks = " ".repeat(60_000);
    let good = combined("203.0.113.9", 5, "/");
    let lines = format!("{good}{blanks}\n{}", good.replace("- - ", &format!("- a{blanks}b ")));
    let dots = format!("{{\"{}\":1}}\n", "a.".repeat(30_000));
    let folder = Folder::new();
    let log = folder.write("access.log", lines + &dots);
    let found = report(&["--access-log", &log, "--limit", "3", "--window", "10s"]);
    assert_eq!(found["requests"], 2);
}

fn good_json(request: &str) -> String {
    format!(
        "{{\"time_local\":\"16/Nov/2026:07:44:08 +0000\",\"remote_addr\":\"203.0.113.9\",\
         \"request\":\"{request}\",\"status\":\"200\"}}\n"
    )
}

#[test]
fn a_format_may_change_and_lines_of_programs_may_be_among_them() {
    let common = combined("203.0.113.9", 7, "/").replace(" \"-\" \"curl\"", "");
    let lines = format!(
        "api-1  | starting\nweb-1  | {}api-1  | {}web-1  | {}api-1  | done\n",
        combined("203.0.113.9", 5, "/"),
        "{\"time\":\"2026-11-16T00:00:06Z\",\"ip\":\"203.0.113.9\",\"method\":\"GET\",\
         \"path\":\"/\"}\n",
        common,
    );
    let folder = Folder::new();
    let log = folder.write("compose.log", lines);
    let found = report(&["--access-log", &log, "--limit", "2", "--window", "10s"]);
    assert_eq!((&found["requests"], &found["lines"]["bad"]), (&json!(3), &json!(2)), "{found}");
    assert_eq!(found["variants"][0]["denied"], 1);
}
