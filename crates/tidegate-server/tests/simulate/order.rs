//! Lines out of order, files given as folders and patterns, and the requests that are chosen.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::{Folder, combined, compressed, report, simulate, simulate_with_input, text};

const LIMIT: [&str; 6] = ["--limit", "5", "--window", "10s", "--algorithm", "sliding-log"];

/// Returns lines of three clients over this number of seconds.
fn lines_of(seconds: u32) -> Vec<String> {
    let line = |number: u32| combined(&format!("203.0.113.{}", number % 3), number / 4, "/");
    (0..seconds * 4).map(line).collect()
}

/// Shuffles each part of this length.
fn shuffled(lines: &[String], part: usize) -> Vec<String> {
    let mut seed = 7_u64;
    let mut lines = lines.to_vec();
    for chunk in lines.chunks_mut(part) {
        for last in (1..chunk.len()).rev() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            chunk.swap(last, usize::try_from(seed >> 33).expect("64 bits") % (last + 1));
        }
    }
    lines
}

fn decisions(report: &Value) -> (Value, Value, Value) {
    let policy = report["variants"][0]["policies"][0].clone();
    (report["requests"].clone(), policy["denied"].clone(), policy["heaviest_keys"].clone())
}

#[test]
fn files_in_any_order_give_the_decisions_of_the_sorted_one() {
    let folder = Folder::new();
    let lines = lines_of(2_000);
    let truth = folder.write("truth.log", lines.concat());
    let expected = report(&[&["--access-log", &truth], &LIMIT[..]].concat());
    assert!(decisions(&expected).1.as_u64() > Some(500), "{}", decisions(&expected).1);
    assert_eq!(expected["lines"]["reordered"], 0);
    let reversed: Vec<String> = lines.iter().rev().cloned().collect();
    for (name, lines) in [
        ("a second", shuffled(&lines, 8)),
        ("a minute", shuffled(&lines, 240)),
        ("an hour", shuffled(&lines, 8_000)),
        ("reversed", reversed),
    ] {
        let log = folder.write("access.log", lines.concat());
        for file in [log.clone(), compressed("gzip", &log, "gz")] {
            let found = report(&[&["--access-log", &file], &LIMIT[..]].concat());
            assert_eq!(decisions(&found), decisions(&expected), "{name}");
            assert_eq!(found["lines"]["late"], 0, "{name}");
            assert!(found["lines"]["reordered"].as_u64() > Some(1_000), "{name}");
        }
        std::fs::remove_file(format!("{log}.gz")).expect("removed");
    }
}

#[test]
fn bad_lines_and_columns_survive_sorting() {
    let folder = Folder::new();
    let mut lines: String = "time,ip,method,path\n".to_owned();
    for second in [59, 0, 30] {
        let _ = writeln!(lines, "2026-11-16T07:44:{second:02}Z,203.0.113.9,GET,/");
        lines += "broken\n";
    }
    let log = folder.write("access.csv", lines);
    let found = report(&[&["--access-log", &log], &LIMIT[..]].concat());
    assert_eq!((&found["requests"], &found["lines"]["bad"]), (&json!(3), &json!(3)));
    assert_eq!(found["start"], "2026-11-16T07:44:00.000Z");
    let examples = found["lines"]["bad_examples"].to_string();
    for number in [3, 5, 7] {
        assert!(examples.contains(&format!("access.csv:{number}: it does not have")), "{examples}");
    }
}

#[test]
fn what_a_line_says_about_later_ones_survives_sorting() {
    let folder = Folder::new();
    let w3c = "#Fields: date time c-ip cs-method cs-uri-stem\n\
               2026-11-16 07:44:59 203.0.113.9 GET /a\n\
               #Fields: date time cs-method cs-uri-stem c-ip\n\
               2026-11-16 07:44:00 GET /a 203.0.113.9\n2026-11-16 07:44:58 GET /a 203.0.113.9\n";
    let log = folder.write("access.log", w3c);
    let found = report(&[&["--access-log", &log], &LIMIT[..]].concat());
    assert_eq!((&found["requests"], &found["lines"]["bad"]), (&json!(3), &json!(0)));
    assert_eq!(found["start"], "2026-11-16T07:44:00.000Z");
    // A day above 12 shows that days are before months, in the lines before it, too.
    let line = |day| format!("{day}/11/2026 07:44:00,203.0.113.9,GET,/a\n");
    let csv = format!("time,ip,method,path\n{}{}", line("12"), line("13"));
    let log = folder.write("days.csv", csv);
    let found = report(&[&["--access-log", &log], &LIMIT[..]].concat());
    assert_eq!(found["start"], "2026-11-12T07:44:00.000Z");
    assert_eq!(found["end"], "2026-11-13T07:44:00.000Z");
}

#[test]
fn rotated_files_are_found_by_pattern_and_by_folder() {
    let folder = Folder::new();
    let logs = Folder::new();
    let lines = lines_of(900);
    let truth = folder.write("truth.log", lines.concat());
    let expected = report(&[&["--access-log", &truth], &LIMIT[..]].concat());
    logs.write("access.log", lines[2_400..].concat());
    logs.write("access.log.1", lines[1_200..2_400].concat());
    let oldest = logs.write("access.log.2", lines[..1_200].concat());
    compressed("gzip", &oldest, "gz");
    std::fs::remove_file(&oldest).expect("removed");
    let place = logs.0.path().to_str().expect("UTF-8");
    let pattern = format!("{place}/access.log*");
    for argument in [pattern.as_str(), place] {
        let found = report(&[&["--access-log", argument], &LIMIT[..]].concat());
        assert_eq!(decisions(&found), decisions(&expected), "{argument}");
    }
    // A folder has other files, too.
    logs.write("notes.txt", "These are words.\n");
    let arguments = [&["--access-log", place, "--json"], &LIMIT[..]].concat();
    let output = simulate(&arguments);
    let warning = text(&output.stderr);
    assert!(warning.contains("notes.txt: its format is unknown"), "{warning}");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(decisions(&found), decisions(&expected));
}

#[test]
fn files_given_twice_are_named() {
    let folder = Folder::new();
    let lines = lines_of(20).concat();
    let log = folder.write("access.log", &lines);
    let once = report(&[&["--access-log", &log], &LIMIT[..]].concat());
    let output = simulate(&[&["--access-log", &log, &log, "--json"], &LIMIT[..]].concat());
    let warning = text(&output.stderr);
    assert!(warning.contains("access.log is given twice: it is read once"), "{warning}");
    let twice: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(twice, once);
    let copy = compressed("gzip", &log, "gz");
    let output = simulate(&[&["--access-log", &log, &copy, "--json"], &LIMIT[..]].concat());
    let warning = text(&output.stderr);
    assert!(warning.contains("access.log.gz has the same lines as "), "{warning}");
    let both: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(both["requests"], 160);
    // Other clients at the same times, in as many bytes, are other lines.
    let other = folder.write("other.log", lines.replace("203.0.113.1 ", "203.0.113.8 "));
    report(&[&["--access-log", &log, &other], &LIMIT[..]].concat());
}

#[test]
fn late_lines_of_a_pipe_are_an_error_unless_asked_for() {
    let lines = lines_of(600);
    let folder = Folder::new();
    let truth = folder.write("truth.log", lines.concat());
    let expected = report(&[&["--access-log", &truth], &LIMIT[..]].concat());
    // The output of `zcat -f access.log*`.
    let piped = [&lines[1_200..], &lines[..1_200]].concat().concat();
    let pipe = |flags: &[&str]| {
        let arguments = [&["--access-log", "-", "--json"], &LIMIT[..], flags].concat();
        simulate_with_input(&arguments, piped.as_bytes())
    };
    let output = pipe(&[]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("warning: stdin:1201: this line is 9m"), "{error}");
    assert!(error.contains("1200 of 2400 lines came too late"), "{error}");
    assert_eq!(text(&output.stdout), "");
    let output = pipe(&["--allow-late"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stderr).lines().count(), 1);
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(found["lines"]["late"], 1_200);
    let output = pipe(&["--sort-window", "15m"]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(decisions(&found), decisions(&expected));
}

#[test]
fn encodings_and_compressions_lose_no_line() {
    let folder = Folder::new();
    let lines = lines_of(500).concat();
    let plain = folder.write("access.log", &lines);
    let expected = report(&[&["--access-log", &plain], &LIMIT[..]].concat());
    let mut files = vec![folder.write("bom.log", format!("\u{feff}{lines}"))];
    let utf16 = |convert: fn(u16) -> [u8; 2]| {
        let units = format!("\u{feff}{lines}").encode_utf16().map(convert).collect::<Vec<_>>();
        units.concat()
    };
    files.push(folder.write("little.log", utf16(u16::to_le_bytes)));
    files.push(folder.write("big.log", utf16(u16::to_be_bytes)));
    let middle = lines.len() / 2 + lines[lines.len() / 2..].find('\n').expect("a line") + 1;
    let halves = [&lines[..middle], &lines[middle..]];
    for (program, extension) in [("gzip", "gz"), ("zstd", "zst"), ("bzip2", "bz2"), ("xz", "xz")] {
        files.push(compressed(program, &plain, extension));
        // All formats allow to append one file to another.
        let parts = [("a", halves[0]), ("b", halves[1])].map(|(name, part)| {
            let file = folder.write(&format!("{name}.{extension}.log"), part);
            std::fs::read(compressed(program, &file, extension)).expect("a file")
        });
        files.push(folder.write(&format!("appended.{extension}"), parts.concat()));
    }
    for file in files {
        let found = report(&[&["--access-log", &file], &LIMIT[..]].concat());
        assert_eq!(found, expected, "{file}");
    }
}

#[test]
fn requests_are_chosen_by_time_and_attributes() {
    let folder = Folder::new();
    let mut lines = String::new();
    for second in 0..60 {
        let path = ["/api/a", "/login", "/health"][second as usize % 3];
        let status = if second % 6 == 1 { " 401 " } else { " 200 " };
        lines += &combined("203.0.113.9", second, path).replace(" 200 ", status);
    }
    let log = folder.write("access.log", lines);
    let count = |flags: &[&str]| {
        let found = report(&[&["--access-log", &log], &LIMIT[..], flags].concat());
        (found["requests"].as_u64(), found["lines"]["left_out"].as_u64())
    };
    assert_eq!(count(&[]), (Some(60), Some(0)));
    assert_eq!(count(&["--where", "status=401"]), (Some(10), Some(50)));
    assert_eq!(count(&["--where", "status=4*", "--where", "path=/login"]), (Some(10), Some(50)));
    assert_eq!(count(&["--where", "path!=/health"]), (Some(40), Some(20)));
    assert_eq!(count(&["--where", "header.x-absent="]), (Some(60), Some(0)));
    assert_eq!(count(&["--from", "2026-11-16T00:00:30Z"]), (Some(30), Some(30)));
    let range = ["--from", "2026-11-16 00:00:10", "--until", "2026-11-16T00:00:20Z"];
    assert_eq!(count(&range), (Some(10), Some(50)));
    assert_eq!(count(&["--from", "2026-11-16"]), (Some(60), Some(0)));
    for (flags, message) in [
        (vec!["--from", "yesterday"], "--from \"yesterday\" is not a time"),
        (vec!["--until", "2026-11-16", "--from", "2026-11-17"], "--until must be after --from"),
        (vec!["--where", "status"], "write it like status=401"),
        (vec!["--where", "user_agent!=kube*"], "--where user_agent: requests have method, path,"),
        (vec!["--where", "status>=400"], "--where status>: requests have method, path,"),
        (vec!["--where", "status=999"], "leave out all requests"),
        (vec!["--access-log", "/nowhere/*.log"], "no file has such a name"),
    ] {
        let files = if flags[0] == "--access-log" { vec![] } else { vec!["--access-log", &log] };
        let output = simulate(&[files, flags.clone(), LIMIT.to_vec()].concat());
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        assert!(text(&output.stderr).contains(message), "{}", text(&output.stderr));
    }
}
