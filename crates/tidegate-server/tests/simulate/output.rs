//! Tables, JSON, pictures, and comparisons.

use serde_json::{Value, json};

use crate::{Folder, check_fields, combined, report, simulate, text};

#[test]
fn same_seed_gives_the_same_bytes() {
    let folder = Folder::new();
    let svg = folder.path("a.svg");
    let run = |load: &str, seed: &str, flags: &[&str]| {
        let traffic = ["--load", load, "--seed", seed, "--rate", "40", "--keys", "30"];
        let limit = ["--zipf", "1", "--limit", "20", "--window", "10s", "--compare"];
        let picture = ["--svg", svg.to_str().expect("UTF-8")];
        let output = simulate(&[&traffic[..], &limit, &picture, flags].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        (output.stdout, std::fs::read(&svg).expect("a picture"))
    };
    for load in ["steady", "burst", "boundary", "poisson", "diurnal", "attack"] {
        let (json, picture) = run(load, "7", &["--json"]);
        assert_eq!(run(load, "7", &["--json"]), (json.clone(), picture.clone()), "{load}");
        let (table, same_picture) = run(load, "7", &[]);
        assert_eq!(run(load, "7", &[]).0, table, "{load}");
        assert_eq!(same_picture, picture, "{load}");
        assert_ne!(run(load, "8", &["--json"]).0, json, "{load}");
    }
}

#[test]
fn units_in_flight_end_at_once_and_have_no_window() {
    let folder = Folder::new();
    let config = folder.path("tidegate.yaml");
    let policies = "policies:
  - {name: exports, key: ip, algorithm: concurrency, limit: 1}
  - {name: per-ip, key: ip, limit: 30, window: 60s}
";
    std::fs::write(&config, policies).expect("written");
    let svg = folder.path("a.svg");
    let [file, picture] = [&config, &svg].map(|path| path.to_str().expect("UTF-8"));
    let flags = ["--load", "steady", "--rate", "1", "--keys", "1", "--duration", "60s"];
    let run = |more: &[&str]| {
        let output = simulate(&[&flags[..], &["--config", file, "--svg", picture], more].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let table = run(&[]);
    let row = table.lines().find(|line| line.trim_start().starts_with("exports")).expect("a row");
    assert!(row.contains("concurrency") && row.contains("1 in flight"), "{table}");
    assert!(table.contains("Units in flight are released at once"), "{table}");
    let report: Value = serde_json::from_str(&run(&["--json"])).expect("JSON");
    let [exports, per_ip] = [0, 1].map(|index| &report["variants"][0]["policies"][index]);
    assert_eq!((&exports["window_ms"], &exports["worst_window"]), (&Value::Null, &Value::Null));
    assert_eq!((&exports["admitted"], &exports["denied"]), (&per_ip["admitted"], &json!(0)));
    assert_eq!(per_ip["admitted"], 30, "{report}");
    let drawn = std::fs::read_to_string(&svg).expect("a picture");
    assert!(drawn.contains("1 in flight") && !drawn.contains("NaN"), "{drawn}");
}

/// Returns (admitted, worst window, over, under) of each variant.
fn figures(report: &Value) -> Vec<(String, u64, u64, u64, u64)> {
    let variants = report["variants"].as_array().expect("variants");
    let number = |value: &Value| value.as_u64().expect("a number");
    let figures = |variant: &Value| {
        let policy = &variant["policies"][0];
        (
            variant["name"].as_str().expect("a name").to_owned(),
            number(&policy["admitted"]),
            number(&policy["worst_window"]["units"]),
            number(&policy["over_admitted"]),
            number(&policy["under_admitted"]),
        )
    };
    variants.iter().map(figures).collect()
}

#[test]
fn comparison_shows_what_each_algorithm_admits_at_a_boundary() {
    // Clusters of 2,000 requests, half of them just before the end of a window of 1,000.
    let found = report(&[
        "--load",
        "boundary",
        "--rate",
        "100",
        "--limit",
        "1000",
        "--window",
        "10s",
        "--compare",
        "--duration",
        "60s",
    ]);
    let found = figures(&found);
    let of = |name: &str| found.iter().find(|entry| entry.0 == name).expect("the algorithm");
    assert_eq!(found.len(), 5);
    let (_, admitted, worst, over, under) = of("sliding-log");
    assert_eq!((*admitted, *worst, *over, *under), (3_000, 1_000, 0, 0), "exact");
    let (_, admitted, worst, over, _) = of("fixed-window");
    assert_eq!((*admitted, *worst, *over), (6_000, 2_000, 3_000), "twice the limit");
    let (_, _, worst, ..) = of("sliding-counter");
    assert!((1_000..=1_010).contains(worst), "{worst}");
    let (_, _, worst, ..) = of("token-bucket");
    assert!((1_001..=1_020).contains(worst), "{worst}: the limit, and the refill of the cluster");
}

#[test]
fn table_has_the_figures_of_the_json() {
    let arguments = [
        "--load",
        "attack",
        "--rate",
        "50",
        "--keys",
        "20",
        "--limit",
        "100",
        "--window",
        "10s",
        "--duration",
        "90s",
    ];
    let table = text(&simulate(&arguments).stdout);
    let found = report(&arguments);
    let policy = &found["variants"][0]["policies"][0];
    assert!(table.contains("policy  algorithm    limit"), "{table}");
    assert!(table.contains("limit   sliding-log  100 per 10s"), "{table}");
    assert!(table.contains("keys of limit, most denials first"), "{table}");
    assert_eq!(policy["heaviest_keys"].as_array().map(Vec::len), Some(10));
    // The attacker is the one key that is denied.
    assert_eq!((&policy["keys"], &policy["denied_keys"]), (&json!(21), &json!(1)));
    assert_eq!(policy["heaviest_keys"][0]["key"], "10.0.0.20");
    assert_eq!(policy["heaviest_keys"][0]["admitted"], 300);
    let memory = policy["memory_bytes"].as_u64().expect("a number");
    let keys = policy["peak_keys"].as_u64().expect("a number");
    let entries = policy["peak_log_entries"].as_u64().expect("a number");
    assert_eq!(memory, keys * 40 + entries * 16);
    assert!(keys <= 21 && entries <= 700, "{keys} keys, {entries} entries");
}

const CURRENT: &str = "
policies:
  - {name: per-address, match: {path: '/api/**'}, key: [ip], limit: 10, window: 1m}
  - {name: tokens, key: [header.authorization], limit: 10, window: 1m, mode: shadow}
";

#[test]
fn what_if_shows_the_keys_that_would_newly_be_denied() {
    let folder = Folder::new();
    let current = folder.write("current.yaml", CURRENT);
    let strict = folder.write("strict.yaml", CURRENT.replace("limit: 10", "limit: 4"));
    let mut lines = String::new();
    for second in 0..8 {
        lines += &combined("203.0.113.1", second, "/api/a");
        if second < 5 {
            lines += &combined("203.0.113.2", second, "/api/b");
        }
        lines += &combined("203.0.113.3", second, "/free");
    }
    let log = folder.write("access.log", lines);
    let arguments = ["--access-log", &log, "--config", &current, "--what-if", &strict];
    let found = report(&arguments);
    let expected = json!([
        {
            "policy": "per-address", "key": "203.0.113.1", "newly_denied": 4,
            "first": "2026-11-16T00:00:04.000Z", "last": "2026-11-16T00:00:07.000Z",
        },
        {
            "policy": "per-address", "key": "203.0.113.2", "newly_denied": 1,
            "first": "2026-11-16T00:00:04.000Z", "last": "2026-11-16T00:00:04.000Z",
        },
    ]);
    assert_eq!(found["what_if"]["heaviest_keys"], expected);
    assert_eq!(found["what_if"]["newly_denied"], 5);
    assert_eq!(found["what_if"]["newly_admitted"], 0);
    assert_eq!(found["variants"][0]["denied"], 0);
    let table = text(&simulate(&arguments).stdout);
    assert!(
        table.contains("5 requests of 2 keys would newly be denied, 0 newly admitted"),
        "{table}"
    );
    let back = ["--access-log", &log, "--config", &strict, "--what-if", &current];
    assert_eq!(report(&back)["what_if"]["newly_admitted"], 5);
}

#[test]
fn one_policy_of_a_file_can_be_varied() {
    let folder = Folder::new();
    let config = folder.write("current.yaml", CURRENT);
    let lines: String = (0..8).map(|second| combined("203.0.113.1", second, "/api/a")).collect();
    let log = folder.write("access.log", lines);
    let file = ["--access-log", &log, "--config", &config];
    assert_eq!(report(&file)["variants"][0]["denied"], 0);
    let varied = report(&[&file[..], &["--policy", "per-address", "--limit", "3"]].concat());
    assert_eq!(varied["variants"][0]["denied"], 5);
    let compared = report(&[&file[..], &["--policy", "per-address", "--compare"]].concat());
    assert_eq!(compared["variants"].as_array().map(Vec::len), Some(5));
}

#[test]
fn keys_that_are_credentials_are_shown_as_hashes() {
    let folder = Folder::new();
    let config =
        "policies:\n  - {name: tokens, key: [header.authorization], limit: 1, window: 1m}\n";
    let config = folder.write("tidegate.yaml", config);
    let csv = "time,header.authorization\n1,Bearer abc\n2,Bearer abc\n";
    let log = folder.write("requests.csv", csv);
    for flags in [&["--json"][..], &[]] {
        let output = simulate(&[&["--access-log", &log, "--config", &config], flags].concat());
        let shown = text(&output.stdout);
        assert!(shown.contains("sha256:") && !shown.contains("abc"), "{shown}");
    }
}

#[test]
fn picture_is_xml_with_the_limit_as_a_line() {
    let folder = Folder::new();
    let config = CURRENT.replace("per-address", "'<per> \"address\" & more'");
    let config = folder.write("tidegate.yaml", config);
    let svg = folder.path("traffic.svg");
    let svg = svg.to_str().expect("UTF-8");
    let output = simulate(&[
        "--load",
        "burst",
        "--rate",
        "20",
        "--period",
        "10s",
        "--duration",
        "2m",
        "--config",
        &config,
        "--attribute",
        "path=/api/x",
        "--svg",
        svg,
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let picture = std::fs::read_to_string(svg).expect("a picture");
    assert!(picture.contains("prefers-color-scheme:dark"));
    // Renderers such as librsvg have no variables: without attributes, all would be black.
    assert!(!picture.contains("var("));
    for element in picture.split('<').filter(|element| element.contains("class=")) {
        let inherits = element.starts_with("text class=\"title\"");
        assert!(element.contains("fill=") || element.contains("stroke=") || inherits, "{element}");
    }
    assert!(picture.contains("&lt;per&gt; &quot;address&quot; &amp; more"), "{picture}");
    assert!(picture.contains("class=\"limit\"") && picture.contains("limit 10 per 1m"));
    for class in ["admitted", "denied"] {
        assert!(picture.contains(&format!("<path class=\"{class}\" fill=\"#")), "{picture}");
    }
    // Generated traffic has no date.
    assert!(picture.contains(">1m30s</text>"), "{picture}");
    let python = "import sys, xml.etree.ElementTree as tree; tree.parse(sys.argv[1])";
    let checked = std::process::Command::new("python3").args(["-c", python, svg]).output();
    let checked = checked.expect("python3 runs");
    assert!(checked.status.success(), "{}", text(&checked.stderr));
}

#[test]
fn picture_of_a_log_has_dates_and_marks_policies_in_shadow_mode() {
    let folder = Folder::new();
    let config = folder.write("tidegate.yaml", CURRENT.replace("header.authorization", "method"));
    let lines: String =
        (0..90).map(|minute| combined("203.0.113.1", 81_000 + minute * 60, "/api/a")).collect();
    let next_day = combined("203.0.113.1", 300, "/api/a").replace("16/Nov", "17/Nov");
    let log = folder.write("access.log", lines + &next_day);
    let svg = folder.path("traffic.svg");
    let svg = svg.to_str().expect("UTF-8");
    let output = simulate(&["--access-log", &log, "--config", &config, "--svg", svg]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let picture = std::fs::read_to_string(svg).expect("a picture");
    for label in
        ["Nov 16 22:30<", ">23:00<", "Nov 17 00:00<", "tokens · sliding-log · shadow mode<"]
    {
        assert!(picture.contains(label), "{label}: {picture}");
    }
}

#[test]
fn most_denied_keys_come_first_and_all_are_in_the_csv() {
    let folder = Folder::new();
    let mut lines = vec!["time,header.x-user,method,path\n".to_owned()];
    for second in 0..30 {
        // Those with most requests are not those with most denials.
        lines.push(format!("{},many,GET,/\n", 1_000 + second * 10));
        lines.push(format!("{},\"=a,\"\"b\"\"\",GET,/\n", 1_300 + second / 10));
    }
    for number in 0..15 {
        lines.push(format!("2000,user-{number:02},GET,/\n").repeat(2));
    }
    let csv = lines.concat();
    let log = folder.write("requests.csv", csv);
    let keys = folder.path("keys.csv");
    let limits = ["--key", "header.x-user", "--limit", "1", "--window", "5s"];
    let arguments =
        [&["--access-log", &log, "--keys-csv", keys.to_str().expect("UTF-8")], &limits[..]];
    let arguments = arguments.concat();
    let found = report(&arguments);
    let policy = &found["variants"][0]["policies"][0];
    let first = json!({"key": "=a,\"b\"", "requests": 30, "admitted": 1, "denied": 29});
    assert_eq!(policy["heaviest_keys"][0], first);
    assert_eq!(policy["heaviest_keys"][1]["key"], "user-00");
    assert_eq!(policy["heaviest_keys"].as_array().map(Vec::len), Some(10));
    let all = report(&[&arguments[..], &["--top", "17"]].concat());
    let policy = &all["variants"][0]["policies"][0];
    assert_eq!(policy["heaviest_keys"].as_array().map(Vec::len), Some(17));
    assert_eq!(policy["heaviest_keys"][16]["key"], "many");
    let keys = std::fs::read_to_string(keys).expect("the keys");
    let lines: Vec<&str> = keys.lines().collect();
    assert_eq!(lines.len(), 18, "{keys}");
    assert_eq!(lines[0], "variant,policy,key,requests,admitted,denied,newly_denied");
    // No spreadsheet takes it for a formula.
    assert_eq!(lines[1], "sliding-log,limit,\"'=a,\"\"b\"\"\",30,1,29,");
    assert_eq!(lines[17], "sliding-log,limit,many,30,30,0,");
}

#[test]
fn what_if_names_every_newly_denied_key() {
    let folder = Folder::new();
    let current = folder.write("current.yaml", CURRENT);
    let strict = folder.write("strict.yaml", CURRENT.replace("limit: 10", "limit: 1"));
    let line = |number: u32| combined(&format!("203.0.113.{}", number % 40), number / 40, "/api/a");
    let log = folder.write("access.log", (0..80).map(line).collect::<String>());
    let keys = folder.path("keys.csv");
    let csv = ["--keys-csv", keys.to_str().expect("UTF-8")];
    let arguments = ["--access-log", &log, "--config", &current, "--what-if", &strict];
    let found = report(&[&arguments[..], &csv, &["--expect", "newly_denied=40"]].concat());
    assert_eq!(found["what_if"]["heaviest_keys"].as_array().map(Vec::len), Some(40));
    let keys = std::fs::read_to_string(keys).expect("the keys");
    assert_eq!(keys.lines().filter(|line| line.ends_with(",2,1,1,1")).count(), 40, "{keys}");
}

#[test]
fn lines_of_decisions_have_the_request() {
    let folder = Folder::new();
    let config = folder.write("tidegate.yaml", CURRENT.replace("limit: 10", "limit: 1"));
    let lines: String =
        (0..2).map(|second| combined("203.0.113.1", second, "/api/a?b=c")).collect();
    let log = folder.write("access.log", lines);
    let decisions = folder.path("decisions.jsonl");
    let file = decisions.to_str().expect("UTF-8");
    report(&["--access-log", &log, "--config", &config, "--decisions", file]);
    let decisions = std::fs::read_to_string(decisions).expect("the decisions");
    let lines: Vec<Value> =
        decisions.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    for (number, allowed) in [(0, true), (1, false)] {
        let line = &lines[number];
        assert_eq!(line["time"], format!("2026-11-16T00:00:0{number}.000Z"), "{line}");
        assert_eq!((&line["file"], &line["line"]), (&json!(log), &json!(number + 1)));
        assert_eq!((&line["method"], &line["path"]), (&json!("GET"), &json!("/api/a")));
        assert_eq!((&line["allowed"], &line["key"]), (&json!(allowed), &json!("203.0.113.1")));
        assert_eq!(line["decisions"][0]["key"], "203.0.113.1");
    }
}

#[test]
fn expectations_set_the_exit_code() {
    let folder = Folder::new();
    let config = folder.write("tidegate.yaml", CURRENT);
    let line = |second: u32| combined(&format!("203.0.113.{}", second % 2), second / 40, "/api/a");
    let extra = combined("203.0.113.7", 50, "/api/a");
    let log = folder.write("access.log", (0..40).map(line).collect::<String>() + &extra);
    let run = |expectations: &[&str]| {
        let arguments = [&["--access-log", &log, "--config", &config], expectations].concat();
        let output = simulate(&arguments);
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    // 20 of 41 requests are denied: ten of each of two keys.
    for (flag, condition, holds) in [
        ("--expect", "per-address.denied<50%", true),
        ("--expect", "per-address.denied < 48.7 %", false),
        ("--expect", "denied<=20", true),
        ("--expect", "denied<20", false),
        ("--expect", "admitted>=21", true),
        ("--expect", "per-address.denied_keys=2", true),
        ("--expect", "per-address.keys>3", false),
        ("--expect", "shadow_denied=0", true),
        ("--expect-key", "203.0.113.7 denied=0", true),
        ("--expect-key", "203.0.113.1 denied<10%", false),
        ("--expect-key", "203.0.113.1 requests=20", true),
        ("--expect-key", "203.0.113.8 denied=0", false),
    ] {
        let (code, table, error) = run(&[flag, condition]);
        assert_eq!(code, Some(i32::from(!holds)), "{condition}: {error}");
        assert_eq!(error.contains(condition), !holds, "{condition}: {error}");
        let result = if holds { "holds" } else { "fails" };
        assert!(table.contains(&format!("expected {condition}: {result}, found")), "{table}");
    }
    for (flag, condition, message) in [
        ("--expect", "per-addres.denied=0", "has per-address, tokens"),
        ("--expect", "denied", "write it like per-user.denied<0.1%"),
        ("--expect", "per-address.refused=0", "\"refused\" before the operator is not one of"),
        ("--expect", "denied<few", "is not a number"),
        ("--expect", "newly_denied=0", "give --what-if"),
        ("--expect-key", "denied=0", "is not one of requests, admitted, denied"),
    ] {
        let (code, table, error) = run(&[flag, condition]);
        assert_eq!((code, table.as_str()), (Some(2), ""), "{condition}: {error}");
        assert!(error.contains(message), "{condition}: {error}");
    }
}

#[test]
fn markdown_has_tables_and_escapes_keys() {
    let folder = Folder::new();
    let csv = "time,header.x-user,method,path\n1,<b>|*x*`,GET,/\n1,<b>|*x*`,GET,/\n";
    let log = folder.write("requests.csv", csv);
    let limits = ["--key", "header.x-user", "--limit", "1", "--window", "5s", "--markdown"];
    let output =
        simulate(&[&["--access-log", &log], &limits[..], &["--expect", "denied=1"]].concat());
    let page = text(&output.stdout);
    assert!(page.contains("\n### 2 requests in"), "{page}");
    assert!(page.contains("\n| key | requests | admitted | denied |\n| --- | ---: |"), "{page}");
    assert!(page.contains("\n| &lt;b>\\|\\*x\\*\\` | 2 | 1 | 1 |\n"), "{page}");
    assert!(page.contains("- expected denied=1: holds, found 1 (50.0 %)"), "{page}");
}

#[test]
fn clients_send_denied_requests_again() {
    let folder = Folder::new();
    let log = folder.write(
        "requests.csv",
        "time,ip,method,path\n100,203.0.113.1,GET,/\n101,203.0.113.1,GET,/\n",
    );
    let limits = ["--access-log", &log, "--limit", "1", "--window", "10s"];
    let decisions = folder.path("decisions.jsonl");
    for (kind, times, abandoned) in [
        (
            "immediate",
            &[
                100_000, 101_000, 101_100, 101_200, 101_300, 101_400, 101_500, 101_600, 101_700,
                101_800, 101_900, 102_000,
            ][..],
            1,
        ),
        ("backoff", &[100_000, 101_000, 102_000, 104_000, 108_000, 116_000], 0),
        ("retry-after", &[100_000, 101_000, 110_000], 0),
    ] {
        let file = ["--decisions", decisions.to_str().expect("UTF-8"), "--retry", kind];
        let found = report(&[&limits[..], &file].concat());
        let variant = &found["variants"][0];
        let number = times.len() as u64;
        assert_eq!(found["requests"], 2, "those of the log");
        assert_eq!(
            (&variant["requests"], &variant["retries"]),
            (&json!(number), &json!(number - 2))
        );
        assert_eq!(variant["abandoned"], abandoned, "{kind}");
        assert_eq!(variant["admitted"], 2 - abandoned, "{kind}");
        let lines = std::fs::read_to_string(&decisions).expect("the decisions");
        let time = |line: &str| {
            let line: Value = serde_json::from_str(line).expect("JSON");
            line["time"].as_str().expect("a time").to_owned()
        };
        let expected = times.iter().map(|millis: &u64| {
            format!("1970-01-01T00:01:{:02}.{:03}Z", millis / 1_000 - 60, millis % 1_000)
        });
        assert_eq!(lines.lines().map(time).collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    }
    // Each algorithm has its own denials, and its own clients.
    let compared = report(&[&limits[..], &["--compare", "--retry", "backoff"]].concat());
    let retries = |name: &str| {
        let variants = compared["variants"].as_array().expect("variants");
        variants.iter().find(|it| it["name"] == name).expect("a variant")["retries"].clone()
    };
    assert_eq!((retries("sliding-log"), retries("leaky-bucket")), (json!(4), json!(4)));
    assert_eq!(retries("fixed-window"), json!(4));
}

#[test]
fn shown_lines_are_escaped_once() {
    let folder = Folder::new();
    let bad =
        "198.51.100.1 - \\x22\u{1b}[2J\"\\ [16/Foo/2026] \"GET / HTTP/1.1\" 200 0 \"-\" \"-\"\n";
    let log = folder.write("access.log", combined("203.0.113.1", 1, "/") + bad);
    let output = simulate(&["--access-log", &log, "--limit", "1", "--window", "1s"]);
    let table = text(&output.stdout);
    assert!(table.contains(r#" - \x22\u{1b}[2J"\ [16/Foo/2026] "GET"#), "{table}");
}

#[test]
fn every_field_of_the_json_is_in_the_document() {
    let folder = Folder::new();
    let config = folder.write("tidegate.yaml", CURRENT);
    let strict = folder.write("strict.yaml", CURRENT.replace("limit: 10", "limit: 1"));
    let lines: String = (0..3).map(|second| combined("203.0.113.1", second, "/api/a")).collect();
    let log = folder.write("access.log", lines);
    let flags = ["--config", &config, "--what-if", &strict, "--expect", "denied<9"];
    let found = report(&[&["--access-log", &log], &flags[..]].concat());
    let number = check_fields(&found, include_str!("../../../../docs/simulate.md"));
    assert!(number > 40, "{number} fields");
}
