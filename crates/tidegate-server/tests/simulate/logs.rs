//! Several files, compression, order of lines, columns.

use serde_json::{Value, json};

use crate::{Folder, combined, compressed, report, simulate, simulate_with_input, text};

const LIMIT: [&str; 6] = ["--limit", "3", "--window", "10s", "--algorithm", "sliding-log"];

fn policy(report: &Value) -> &Value {
    &report["variants"][0]["policies"][0]
}

#[test]
fn compressed_files_and_stdin_are_read_like_plain_ones() {
    let folder = Folder::new();
    let lines: String = (0..2_000).map(|second| combined("203.0.113.9", second, "/")).collect();
    let plain = folder.write("access.log", &lines);
    let expected = report(&[&["--access-log", &plain], &LIMIT[..]].concat());
    assert_eq!(expected["lines"]["read"], 2_000);
    let gzip = compressed("gzip", &plain, "gz");
    let zstd = compressed("zstd", &plain, "zst");
    // Both formats allow to append one file to another.
    let half = lines.len() / 2;
    let middle = half + lines[half..].find('\n').expect("a line") + 1;
    let appended = |program: &str, extension: &str| {
        let mut bytes = Vec::new();
        for (name, part) in [("a", &lines[..middle]), ("b", &lines[middle..])] {
            let file = folder.write(&format!("{name}.{program}"), part);
            bytes.extend(std::fs::read(compressed(program, &file, extension)).expect("a file"));
        }
        folder.write(&format!("appended.{extension}"), bytes)
    };
    let both = [appended("gzip", "gz"), appended("zstd", "zst")];
    for file in [&gzip, &zstd, &both[0], &both[1]] {
        let found = report(&[&["--access-log", file], &LIMIT[..]].concat());
        assert_eq!(found, expected, "{file}");
    }
    for input in [lines.as_bytes(), &std::fs::read(&gzip).expect("a file")] {
        let arguments = [&["--access-log", "-", "--json"], &LIMIT[..]].concat();
        let output = simulate_with_input(&arguments, input);
        let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(found, expected, "stdin");
    }
}

#[test]
fn several_files_are_merged_by_time() {
    let folder = Folder::new();
    let all: Vec<String> = (0..400).map(|second| combined("203.0.113.9", second, "/")).collect();
    let of = |part: usize| -> String { all.iter().skip(part).step_by(3).cloned().collect() };
    let files = [0, 1, 2].map(|part| folder.write(&format!("{part}.log"), of(part)));
    let whole = folder.write("whole.log", all.concat());
    let empty = folder.write("empty.log", "");
    let expected = report(&[&["--access-log", &whole], &LIMIT[..]].concat());
    let merged =
        report(&[&["--access-log", &files[2], &files[0], &empty, &files[1]], &LIMIT[..]].concat());
    assert_eq!(merged, expected);
    assert!(policy(&merged)["denied"].as_u64() > Some(100));
}

#[test]
fn columns_are_attributes_and_others_are_named() {
    let folder = Folder::new();
    let config = "
attributes: [tenant]
policies:
  - {name: tenants, match: {path: '/a/**', method: POST}, key: [tenant, header.x-user],
     limit: 5, window: 1m}
";
    let config = folder.write("tidegate.yaml", config);
    let csv = "Time,ip,method,target,tenant,header.X-User,shop,cost\n\
               2026-11-16T10:00:00Z,203.0.113.9,POST,/a/b?c=d,acme,\"ann \"\"a\"\"\",200,4\n\
               2026-11-16T10:00:01Z,203.0.113.9,POST,/a/b,acme,\"ann \"\"a\"\"\",200,2\n\
               2026-11-16T10:00:01Z,203.0.113.9,POST,/b,acme,ann,200,\n\
               2026-11-16T10:00:02Z,203.0.113.9,POST,/a/b,acme,,200,\n";
    let log = folder.write("requests.csv", csv);
    let found = report(&["--access-log", &log, "--config", &config]);
    assert_eq!(found["lines"]["ignored_columns"], json!(["shop"]));
    let policy = policy(&found);
    assert_eq!(
        policy["heaviest_keys"],
        json!([{"key": "acme|ann \"a\"", "requests": 2, "admitted": 1, "denied": 1}])
    );
    assert_eq!(found["variants"][0]["without_policy"], 2);
}

#[test]
fn requests_are_refunded_by_the_status_of_their_line() {
    let folder = Folder::new();
    let config = "
policies:
  - {name: logins, key: [ip], limit: 2, window: 1m, refund_on: {status: [2xx, 302]}}
  - {name: all, limit: 100, window: 1m}
";
    let config = folder.write("tidegate.yaml", config);
    let statuses = ["200", "401", "302", "204", "401", "301", "200"];
    let lines = |line: &dyn Fn(usize, &str) -> String| -> String {
        statuses.iter().enumerate().map(|(second, status)| line(second, status)).collect()
    };
    let combined = lines(&|second, status| {
        let time = format!("16/Nov/2026:07:44:0{second} +0000");
        format!("203.0.113.9 - - [{time}] \"POST /login HTTP/1.1\" {status} 5 \"-\" \"-\"\n")
    });
    let json = |name: &str, quote: &str| {
        lines(&|second, status| {
            format!(
                "{{\"ts\":179481504{second},\"remote_addr\":\"203.0.113.9\",\"method\":\"POST\",\
                 \"target\":\"/login\",\"{name}\":{quote}{status}{quote}}}\n"
            )
        })
    };
    let csv = lines(&|second, status| format!("179481504{second},203.0.113.9,{status}\n"));
    for text in [
        combined,
        json("status", ""),
        json("status", "\""),
        json("DownstreamStatus", ""),
        format!("time,ip,status\n{csv}"),
    ] {
        let log = folder.write("access.log", &text);
        let found = report(&["--access-log", &log, "--config", &config]);
        // The two failures use up the limit.
        assert_eq!(found["variants"][0]["admitted"], 5, "{text}{found}");
        assert_eq!(found["variants"][0]["denied"], 2, "{text}{found}");
        let logins = policy(&found);
        assert_eq!((&logins["over_admitted"], &logins["under_admitted"]), (&json!(0), &json!(0)));
        assert_eq!(logins["worst_window"]["units"], 2, "{text}");
        assert_eq!(found["lines"]["ignored_columns"], json!([]), "{text}");
    }
    let unknown = folder.write("access.log", json("other", ""));
    let found = report(&["--access-log", &unknown, "--config", &config]);
    assert_eq!(found["variants"][0]["admitted"], 2, "without a status, every request counts");
}

#[test]
fn bad_lines_are_counted_with_examples_and_end_a_strict_run() {
    let folder = Folder::new();
    let good = combined("203.0.113.9", 5, "/");
    let gigantic = "x".repeat(100_000);
    let lines = format!("{good}\u{1b}]red\n{gigantic}\n\n{good}");
    let log = folder.write("access.log", lines);
    let arguments = ["--access-log", &log, "--limit", "3", "--window", "10s"];
    let found = report(&arguments);
    assert_eq!((&found["lines"]["bad"], &found["requests"]), (&json!(2), &json!(2)));
    let table = simulate(&arguments);
    let table = text(&table.stdout);
    assert!(table.contains("access.log:2: it has no time: \\u{1b}]red"), "{table}");
    assert!(table.contains("access.log:3: it is longer than 65536 bytes"), "{table}");
    let strict = simulate(&[&arguments[..], &["--strict"]].concat());
    assert_eq!(strict.status.code(), Some(2));
    assert_eq!(text(&strict.stdout), "");
    assert!(text(&strict.stderr).contains("access.log:2: it has no time"));
}
