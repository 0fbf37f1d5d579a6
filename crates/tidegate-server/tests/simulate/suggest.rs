//! `tidegate suggest`: compared with a naive model and with `tidegate simulate`.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::{Folder, check_fields, combined, report, text};

const WINDOWS: [(&str, u64); 5] = [
    ("1s", 1_000_000),
    ("10s", 10_000_000),
    ("1m", 60_000_000),
    ("1h", 3_600_000_000),
    ("1d", 86_400_000_000),
];

fn suggest_with_input(arguments: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .arg("suggest")
        .args(arguments)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // It may end before it has read everything.
    let _ = child.stdin.take().expect("piped").write_all(input);
    child.wait_with_output().expect("the binary ends")
}

/// Runs the command, which succeeds, and returns its output.
fn suggest(arguments: &[&str]) -> String {
    let output = suggest_with_input(arguments, b"");
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "{arguments:?}");
    text(&output.stdout)
}

fn suggestion(arguments: &[&str]) -> Value {
    serde_json::from_str(&suggest(&[arguments, &["--json"]].concat())).expect("JSON")
}

fn check_config(path: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["config", "check", path])
        .output()
        .expect("the binary runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Request of the model: time in microseconds, key, path.
type Request = (u64, String, &'static str);

/// Requests of 40 clients, some much busier than others, during two hours and a day later.
fn requests() -> Vec<Request> {
    let mut state = 11_u64;
    let mut below = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % limit
    };
    let paths = ["/api/users/17", "/api/users/4711", "/api/search", "/static/a.css"];
    let mut requests = Vec::new();
    for _ in 0..500 {
        let client = below(40) * below(40) / 40;
        let start = 1_790_000_000_000_000 + below(7_200) * 1_000_000 + below(2) * 86_000_000_000;
        for _ in 0..=below(6) * below(6) {
            let time = start + below(8_000_000);
            let path = paths[usize::try_from(below(4)).expect("small")];
            requests.push((time, format!("203.0.113.{client}"), path));
        }
    }
    requests.sort();
    requests
}

fn csv(requests: &[Request]) -> String {
    let line = |(time, key, path): &Request| format!("{time},{key},GET,{path}\n");
    "time,ip,method,path\n".to_owned() + &requests.iter().map(line).collect::<String>()
}

/// Returns the requests of each key in its busiest window, in ascending order.
fn peaks(requests: &[Request], window: u64) -> Vec<u64> {
    let mut times: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for (time, key, _) in requests {
        times.entry(key).or_default().push(*time);
    }
    let peak = |times: &Vec<u64>| {
        let in_window =
            |end: &u64| times.iter().filter(|it| *it <= end && end - **it < window).count() as u64;
        times.iter().map(in_window).max().expect("a request")
    };
    let mut peaks: Vec<u64> = times.values().map(peak).collect();
    peaks.sort_unstable();
    peaks
}

/// Returns the requests that a sliding log denies.
fn denied(requests: &[Request], window: u64, limit: u64) -> u64 {
    let mut admitted: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    let mut denied = 0;
    for (time, key, _) in requests {
        let times = admitted.entry(key).or_default();
        let in_window = times.iter().filter(|it| time - **it < window).count() as u64;
        if in_window < limit {
            times.push(*time);
        } else {
            denied += 1;
        }
    }
    denied
}

/// Compares a group with the model.
fn check_group(group: &Value, requests: &[Request]) {
    let mut tried = 0;
    for (index, (name, window)) in WINDOWS.into_iter().enumerate() {
        let found = &group["windows"][index];
        assert_eq!(found["window"], name);
        let peaks = peaks(requests, window);
        for (field, percent) in [("p50", 500), ("p90", 900), ("p99", 990), ("p999", 999)] {
            let rank = (peaks.len() * percent).div_ceil(1_000);
            assert_eq!(found[field], peaks[rank - 1], "{field} of {name}: {peaks:?}");
        }
        assert_eq!(found["max"], *peaks.last().expect("a key"));
        let limits = found["limits"].as_array().expect("limits");
        for entry in limits {
            let limit = entry["limit"].as_u64().expect("a limit");
            let above = peaks.iter().filter(|peak| **peak > limit).count();
            assert_eq!(entry["denied_keys"], above, "{limit} per {name}");
            let denied = denied(requests, window, limit);
            assert_eq!(entry["denied_requests"], denied, "{limit} per {name}");
            tried += usize::from(denied > 0);
        }
        assert!(limits.iter().any(|entry| entry["limit"] == found["suggested_limit"]));
    }
    assert!(tried > 15, "{tried} limits deny something");
}

#[test]
fn every_figure_is_that_of_a_naive_model() {
    let requests = requests();
    let folder = Folder::new();
    let log = folder.write("requests.csv", csv(&requests));
    let found = suggestion(&["--access-log", &log, "--limit", "86"]);
    let groups = found["groups"].as_array().expect("groups");
    assert_eq!(found["requests"], requests.len());
    check_group(&groups[0], &requests);
    let paths: Vec<&Value> = groups.iter().map(|group| &group["path"]).collect();
    assert_eq!(paths.len(), 4, "{paths:?}");
    for group in &groups[1..] {
        let pattern = group["path"].as_str().expect("a pattern");
        let prefix = pattern.trim_end_matches('*');
        assert!(["/api/users/*", "/api/search", "/static/a.css"].contains(&pattern), "{pattern}");
        let part = requests.iter().filter(|(_, _, path)| path.starts_with(prefix)).cloned();
        check_group(group, &part.collect::<Vec<_>>());
    }
    let given = ["--path", "/api/**", "--path", "/api/users/17"];
    let found = suggestion(&[&["--access-log", &log][..], &given].concat());
    let of = |path: &str| {
        let part = requests.iter().filter(|(_, _, it)| it.starts_with(path)).cloned();
        part.collect::<Vec<_>>()
    };
    check_group(&found["groups"][1], &of("/api/"));
    check_group(&found["groups"][2], &of("/api/users/17"));
    let low = suggestion(&["--access-log", &log, "--percentile", "50"]);
    let number = check_fields(&low, include_str!("../../../../docs/from-a-log.md"));
    assert!(number > 30, "{number} fields");
}

#[test]
fn suggested_policies_deny_what_the_simulation_denies() {
    let requests = requests();
    let folder = Folder::new();
    let log = folder.write("requests.csv", csv(&requests));
    let yaml = folder.path("limits.yaml");
    let yaml = yaml.to_str().expect("UTF-8");
    // A low percentile, so that there is something to deny.
    let low = ["--percentile", "60", "--margin", "1", "--top", "3"];
    let found = suggestion(&[&["--access-log", &log, "--yaml", yaml][..], &low].concat());
    check_config(yaml);
    let simulated = report(&["--access-log", &log, "--config", yaml, "--top", "1000"]);
    assert_eq!(simulated["variants"][0]["denied"], 0, "shadow mode");
    let groups = found["groups"].as_array().expect("groups");
    for (group, policy) in
        groups.iter().zip(simulated["variants"][0]["policies"].as_array().expect("policies"))
    {
        assert_eq!(
            (&policy["name"], &policy["mode"]),
            (&group["policy"]["name"], &json!("shadow"))
        );
        assert_eq!(policy["algorithm"], "token-bucket");
        assert_eq!(policy["limit"], group["policy"]["limit"]);
        assert_eq!(policy["burst"], group["policy"]["burst"]);
        let [clients] = group["kinds"].as_array().expect("kinds").as_slice() else {
            panic!("only clients: {group}")
        };
        assert!(policy["denied"].as_u64() > Some(0), "{policy}");
        for (ours, theirs) in [
            ("keys", "keys"),
            ("requests", "requests"),
            ("denied_keys", "denied_keys"),
            ("denied_requests", "denied"),
        ] {
            assert_eq!(clients[ours], policy[theirs], "{ours} of {}", policy["name"]);
        }
        let top = group["policy"]["top_denied"].as_array().expect("keys");
        assert!(top.len() <= 3);
        for (named, simulated) in top.iter().zip(policy["heaviest_keys"].as_array().expect("keys"))
        {
            assert_eq!(named["denied"], simulated["denied"]);
        }
    }
    assert_eq!(found["yaml"], std::fs::read_to_string(yaml).expect("a file"));
}

/// Returns a log of 605 addresses, one of which sends 100 requests per minute, and all some
/// requests in each hour.
fn website() -> String {
    let mut lines: Vec<(u32, String)> = Vec::new();
    for client in 0..604 {
        for page in 0..100 {
            let second = page * 860 + client;
            lines.push((second, format!("198.51.{}.{}", client / 200, client % 200)));
        }
    }
    lines.extend((0..100).map(|request| (40_000 + request / 2, "192.0.2.1".to_owned())));
    lines.sort();
    lines.iter().map(|(second, address)| combined(address, *second, "/")).collect()
}

#[test]
fn users_of_the_log_are_keys_that_the_policies_declare() {
    let folder = Folder::new();
    let lines: String = (0..9)
        .map(|second| combined("203.0.113.1", second, "/").replace("- - ", "- ann "))
        .collect();
    let log = folder.write("access.log", lines);
    let yaml = folder.path("limits.yaml");
    let yaml = yaml.to_str().expect("UTF-8");
    suggestion(&["--access-log", &log, "--key", "remote_user", "--yaml", yaml]);
    check_config(yaml);
    let simulated = report(&["--access-log", &log, "--config", yaml]);
    assert_eq!(simulated["variants"][0]["policies"][0]["heaviest_keys"][0]["key"], "ann");
}

#[test]
fn one_glance_shows_whom_a_limit_denies_per_minute_and_per_day() {
    let folder = Folder::new();
    let log = folder.write("access.log", website());
    let table = suggest(&["--access-log", &log, "--limit", "86"]);
    let row = table.lines().find(|line| line.starts_with("   86")).expect("the limit");
    let cells: Vec<&str> = row.split("  ").map(str::trim).filter(|it| !it.is_empty()).collect();
    assert_eq!(cells, ["86", "0", "0", "1 (14)", "1 (14)", "605 (8,470)"], "{table}");
    assert!(table.contains("of 605 clients"), "{table}");
    let piped = suggest_with_input(&["--access-log", "-", "--limit", "86"], website().as_bytes());
    assert_eq!(text(&piped.stdout), table, "a pipe is read once");
}

#[test]
fn crawlers_and_health_checks_are_apart() {
    let folder = Folder::new();
    let agent = |line: String, agent: &str| line.replace("\"curl\"", &format!("\"{agent}\""));
    let mut lines = Vec::new();
    for second in 0..600 {
        lines.push(agent(combined("66.249.66.1", second, "/a"), "Googlebot/2.1"));
        lines.push(agent(combined("10.0.0.9", second, "/a"), "kube-probe/1.34"));
        lines.push(combined("10.0.0.8", second, ["/healthz", "//healthz/?x"][second as usize % 2]));
        if second % 60 == 0 {
            lines.push(agent(combined("203.0.113.5", second, "/a"), "Mozilla/5.0 (CUBOT X18)"));
            lines.push(combined("203.0.113.6", second, "/b"));
        }
    }
    lines.push("not a request\n".to_owned());
    let log = folder.write("access.log", lines.concat());
    let found = suggestion(&["--access-log", &log]);
    assert_eq!((&found["lines"]["bad"], &found["requests"]), (&json!(1), &json!(1_820)));
    let all = &found["groups"][0];
    assert_eq!(found["health_check_paths"], json!(["/healthz"]));
    assert!(found["yaml"].as_str().expect("YAML").contains("unless: [{path: [\"/healthz\"]}]"));
    // The distribution is that of the two clients, the limit applies to all keys.
    assert_eq!(
        (&all["windows"][2]["max"], &all["windows"][2]["suggested_limit"]),
        (&json!(1), &json!(2))
    );
    let kinds = all["kinds"].as_array().expect("kinds");
    let keys =
        |kind: &Value| (kind["kind"].clone(), kind["keys"].clone(), kind["denied_keys"].clone());
    let kinds: Vec<_> = kinds.iter().map(keys).collect();
    assert_eq!(
        kinds,
        [
            (json!("client"), json!(2), json!(0)),
            (json!("crawler"), json!(1), json!(1)),
            (json!("health_check"), json!(1), json!(1)),
        ]
    );
    let denied = all["policy"]["top_denied"].as_array().expect("keys");
    let names: Vec<&Value> = denied.iter().map(|entry| &entry["key"]).collect();
    assert_eq!(names, ["10.0.0.9", "66.249.66.1"]);
}

/// Returns the texts of the cells of all tables of a page.
fn rows(html: &str) -> Vec<Vec<String>> {
    let row = |row: &str| {
        let cells = row.split("<td>").skip(1);
        cells.map(|cell| cell.split("</td>").next().expect("a cell").to_owned()).collect()
    };
    html.split("<tr>").skip(1).map(row).filter(|row: &Vec<String>| !row.is_empty()).collect()
}

#[test]
fn page_has_the_figures_of_the_json_and_no_reference() {
    let requests = requests();
    let folder = Folder::new();
    let log = folder.write("requests.csv", csv(&requests));
    let page = folder.path("limits.html");
    let found = suggestion(&["--access-log", &log, "--html", page.to_str().expect("UTF-8")]);
    let page = std::fs::read_to_string(page).expect("a page");
    let references = ["src=", "href=", "url(", "@import", "<script", "<link", "<iframe"];
    for reference in references {
        assert!(!page.contains(reference), "{reference}");
    }
    assert!(!page.replace("http://www.w3.org/2000/svg", "").contains("://"), "no address");
    assert!(page.contains("default-src 'none'"));
    let number = |value: &Value| {
        let digits = value.as_u64().expect("a number").to_string();
        let bytes = digits.as_bytes().rchunks(3).rev();
        bytes.map(text).collect::<Vec<_>>().join(",")
    };
    let rows = rows(&page);
    let groups = found["groups"].as_array().expect("groups");
    assert_eq!(page.matches("<svg").count(), groups.len());
    for group in groups {
        for window in group["windows"].as_array().expect("windows") {
            let fields = ["p50", "p90", "p99", "p999", "max", "suggested_limit"];
            let mut expected = vec![window["window"].as_str().expect("a name").to_owned()];
            expected.extend(fields.map(|field| number(&window[field])));
            assert!(rows.iter().any(|row| row.starts_with(&expected)), "{expected:?}: {rows:?}");
        }
        for index in 0..group["windows"][0]["limits"].as_array().expect("limits").len() {
            let limit = &group["windows"][0]["limits"][index]["limit"];
            let cell = |window: &Value| {
                let limits = window["limits"].as_array().expect("limits");
                let tried = limits.iter().find(|it| it["limit"] == *limit)?;
                Some(match number(&tried["denied_keys"]) {
                    none if none == "0" => none,
                    keys => format!("{keys} ({})", number(&tried["denied_requests"])),
                })
            };
            let windows = group["windows"].as_array().expect("windows");
            let Some(cells) = windows.iter().map(cell).collect::<Option<Vec<_>>>() else {
                continue;
            };
            let expected = [vec![number(limit)], cells].concat();
            assert!(rows.contains(&expected), "{expected:?}: {rows:?}");
        }
    }
}

#[test]
fn hostile_keys_and_paths_are_text_everywhere() {
    let folder = Folder::new();
    let evil = "<script>alert(1)</script>\"'&: {x}";
    let quoted = evil.replace('"', "\"\"");
    let mut lines = vec!["time,header.x-user,method,path\n".to_owned()];
    for time in 0..200 {
        let path = format!("/<img src=x onerror=alert(1)>\u{1b}[2J/{time}");
        lines.push(format!("{time},\"{quoted}\",GET,\"{path}\"\n"));
        lines.push(format!("{},user-{time},GET,\"/a'b\"\"c<i>/x\"\n", time + 200));
    }
    let csv = lines.concat();
    let log = folder.write("requests.csv", csv);
    let [page, yaml] = ["page.html", "limits.yaml"].map(|name| folder.path(name));
    let [page, yaml] = [&page, &yaml].map(|path| path.to_str().expect("UTF-8"));
    let arguments = ["--access-log", &log, "--key", "header.x-user", "--percentile", "50"];
    let files = ["--margin", "1", "--html", page, "--yaml", yaml];
    let given = ["--path", "/<img src=x onerror=alert(1)>/**", "--path", "/a'b\"c<i>/*: #x"];
    for given in [&[][..], &given] {
        let table = suggest(&[&arguments[..], &files, given].concat());
        assert!(!table.contains('\u{1b}'), "{table}");
        assert!(table.contains("<script>alert(1)"), "the key is named: {table}");
        let html = std::fs::read_to_string(page).expect("a page");
        for tag in ["<script", "<img", "<i>", "\u{1b}"] {
            assert!(!html.contains(tag), "{tag}: {html}");
        }
        assert!(html.contains("&lt;script&gt;alert(1)"), "{html}");
        check_config(yaml);
    }
}

#[test]
fn wrong_flags_say_what_would_be_right() {
    let folder = Folder::new();
    let log = folder.write("access.log", website());
    let missing = folder.path("missing.log");
    let before = folder.names();
    let html = folder.path("page.html");
    let html = html.to_str().expect("UTF-8");
    for (arguments, message) in [
        (&[][..], "--access-log <FILE>"),
        (&["--access-log", missing.to_str().expect("UTF-8")], "missing.log: No such file"),
        (&["--access-log", &log, "--window", "5m"], "[possible values: 1s, 10s, 1m, 1h, 1d]"),
        (&["--access-log", &log, "--percentile", "0"], "above 0, and at most 100"),
        (&["--access-log", &log, "--margin", "0.5"], "from 1 to 1000"),
        (&["--access-log", &log, "--key", "heder.x"], "heder.x"),
        (
            &["--access-log", &log, "--key", "header.x-user"],
            "name an attribute of the log by --key",
        ),
        (&["--access-log", &log, "--path", "*"], "--path"),
        (&["--access-log", &log, "--limit", "0"], "--limit"),
        (&["--access-log", &log, "--json", "--markdown"], "cannot be used with"),
    ] {
        let output = suggest_with_input(&[arguments, &["--html", html]].concat(), b"");
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(message), "{arguments:?}: {error}");
        assert_eq!(error.trim_end().lines().count(), 1, "{arguments:?}: {error}");
        assert_eq!(text(&output.stdout), "", "{arguments:?}");
        assert_eq!(folder.names(), before, "{arguments:?}");
    }
    assert!(!Path::new(html).exists());
}
