//! Tables, JSON, pictures, and comparisons.

use serde_json::{Value, json};

use crate::{Folder, combined, report, simulate, text};

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
    assert!(table.contains("heaviest keys of limit"), "{table}");
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
    assert!(picture.contains("&lt;per&gt; &quot;address&quot; &amp; more"), "{picture}");
    assert!(picture.contains("class=\"limit\"") && picture.contains("limit 10 per 1m"));
    assert!(picture.contains("class=\"admitted\" d=") && picture.contains("class=\"denied\" d="));
    let python = "import sys, xml.etree.ElementTree as tree; tree.parse(sys.argv[1])";
    let checked = std::process::Command::new("python3").args(["-c", python, svg]).output();
    let checked = checked.expect("python3 runs");
    assert!(checked.status.success(), "{}", text(&checked.stderr));
}
