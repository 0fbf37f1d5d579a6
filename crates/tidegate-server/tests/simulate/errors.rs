//! Invalid input: one clear line, exit code 2, and no file that is half written.

use crate::{Folder, combined, compressed, simulate, simulate_with_input, text};

const POLICY: &str = "policies:\n  - {name: api, match: {path: '/api/**'}, limit: 1, window: 1s}\n";

#[test]
fn invalid_input_is_one_line_and_writes_nothing() {
    let folder = Folder::new();
    let config = folder.write("tidegate.yaml", POLICY);
    let broken = folder.write("broken.yaml", "policies: [{name: a, limit: many, window: 1s}]\n");
    let no_policies = folder.write("none.yaml", "policies: []\n");
    let good: String = (0..5_000).map(|second| combined("203.0.113.9", second, "/")).collect();
    let log = folder.write("access.log", &good);
    let empty = folder.write("empty.log", "");
    let binary: Vec<u8> = (0..100_000_u32).map(|n| n.wrapping_mul(97).to_le_bytes()[1]).collect();
    let binary = folder.write("binary.log", binary);
    let no_break = folder.write("line.log", vec![b'x'; 3_000_000]);
    let prose = folder.write("prose.log", "These are words.\n".repeat(500));
    let half = |path: &str| {
        let bytes = std::fs::read(path).expect("a file");
        bytes[..bytes.len() / 2].to_vec()
    };
    let gzip = folder.write("half.gz", half(&compressed("gzip", &log, "gz")));
    let zstd = folder.write("half.zst", half(&compressed("zstd", &log, "zst")));
    let bad_csv = folder.write("bad.csv", "ip,path\n1.2.3.4,/\n");
    let no_time = folder.write("bad.log", format!("{}\n", "x [y] \"GET / HTTP/1.1\""));
    let host_names = folder.write("names.log", combined("client.example", 1, "/"));
    let no_files = Folder::new();
    let empty_folder = no_files.0.path().to_str().expect("UTF-8").to_owned();
    let rules = folder.write("rules.yaml", "domain: a\ndescriptors: [{key: remote_address}]\n");
    let missing = folder.path("missing.log");
    let missing = missing.to_str().expect("UTF-8");
    let (svg, decisions) = (folder.path("a.svg"), folder.path("a.jsonl"));
    let before = folder.names();

    let limit: &[&str] = &["--limit", "5", "--window", "1s"];
    let log_of = |file| [&["--access-log", file], limit].concat();
    let load = |more: &[&'static str]| [&["--load", "steady"], limit, more].concat();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec![], "--load <SHAPE>"),
        (vec!["--load", "steady"], "give --limit and --window"),
        (vec!["--load", "storm", "--limit", "5", "--window", "1s"], "invalid value 'storm'"),
        (log_of(missing), "missing.log: No such file"),
        (log_of(&empty_folder), "no file has such a name"),
        (log_of(&empty), "empty.log has no lines"),
        (log_of(&binary), "binary.log: its format is unknown"),
        (log_of(&no_break), "line.log: its format is unknown"),
        (log_of(&prose), "prose.log: its format is unknown"),
        (log_of(&no_time), "bad.log: its format is unknown"),
        (log_of(&gzip), "half.gz: line"),
        (log_of(&zstd), "half.zst: line"),
        (log_of(&host_names), "no request could be decided: a policy needs ip"),
        ([log_of(&log), vec!["--log-format", "json"]].concat(), "no line is a request"),
        (
            [log_of(&bad_csv), vec!["--log-format", "csv"]].concat(),
            "or name columns in its first line",
        ),
        ([log_of(&log), vec!["--attribute", "path=/"]].concat(), "--attribute is for generated"),
        ([log_of(&log), vec!["--load", "steady"]].concat(), "cannot be used with"),
        ([log_of("-"), vec!["--access-log", "-"]].concat(), "--access-log - is given 2 times"),
        (load(&["--rate", "0"]), "--rate 0 is out of range"),
        (load(&["--rate", "nan"]), "--rate NaN is out of range"),
        (load(&["--rate", "1e300"]), "is out of range"),
        (load(&["--rate", "1e8", "--duration", "366d"]), "can be simulated"),
        (load(&["--rate", "fast"]), "invalid value 'fast'"),
        (load(&["--keys", "0"]), "--keys 0 is out of range"),
        (load(&["--keys", "1000000000000"]), "is out of range"),
        (load(&["--zipf=-1"]), "--zipf -1 is out of range"),
        (load(&["--duration", "0s"]), "--duration 0ns is out of range"),
        (load(&["--duration", "10"]), "is not a duration"),
        (load(&["--period", "999d"]), "--period"),
        (load(&["--seed=-1"]), "--seed"),
        (load(&["--attribute", "path"]), "write it like path=/api/items"),
        (load(&["--key", "heder.x"]), "heder.x"),
        (load(&["--policy", "api"]), "--config"),
        (vec!["--load", "steady", "--limit", "0", "--window", "1s"], "limit 0 is out of range"),
        (vec!["--load", "steady", "--limit", "5", "--window", "400d"], "out of range"),
        (
            vec!["--load", "steady", "--limit", "5", "--window", "1s", "--burst", "9"],
            "sliding-log has no burst",
        ),
        (vec!["--load", "steady", "--config", &broken], "broken.yaml:1:"),
        (vec!["--load", "steady", "--config", &no_policies], "it has no policies"),
        (vec!["--load", "steady", "--config", &rules], "this is a rule file of Envoy's"),
        (vec!["--load", "steady", "--config", missing], "missing.log: cannot be read"),
        (vec!["--load", "steady", "--config", &config], "no policy of"),
        (vec!["--access-log", &log, "--config", &config], "no policy of"),
        (
            vec!["--load", "steady", "--config", &config, "--policy", "ap", "--limit", "2"],
            "--policy \"ap\" is not in",
        ),
        (
            vec!["--load", "steady", "--config", &config, "--what-if", missing],
            "missing.log: cannot be read",
        ),
    ];
    for (arguments, message) in cases {
        let outputs = [svg.to_str().expect("UTF-8"), decisions.to_str().expect("UTF-8")];
        let files = ["--svg", outputs[0], "--decisions", outputs[1]];
        let output = simulate(&[&arguments[..], &files].concat());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(message), "{arguments:?}: {error}");
        // Errors in a configuration also show its line.
        let lines = if message.starts_with("broken.yaml") { 4 } else { 1 };
        assert_eq!(error.trim_end().lines().count(), lines, "{arguments:?}: {error}");
        assert_eq!(text(&output.stdout), "", "{arguments:?}");
        assert_eq!(folder.names(), before, "{arguments:?}");
    }
}

#[test]
fn output_that_cannot_be_written_is_an_error_before_the_work() {
    let folder = Folder::new();
    let missing = folder.path("missing/a.svg");
    let limit = ["--load", "steady", "--limit", "5", "--window", "1s"];
    for flag in ["--svg", "--decisions"] {
        for (path, message) in [
            (missing.to_str().expect("UTF-8"), "cannot be written"),
            (folder.0.path().to_str().expect("UTF-8"), "is a folder"),
        ] {
            let output = simulate(&[&limit[..], &[flag, path]].concat());
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2));
            assert!(error.contains(flag) && error.contains(message), "{error}");
            assert_eq!(text(&output.stdout), "");
        }
    }
}

#[test]
fn random_bytes_never_crash() {
    let mut state = 7_u64;
    let good = combined("203.0.113.9", 1, "/");
    for round in 0..30 {
        let mut bytes = good.repeat(3).into_bytes();
        for _ in 0..round {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let place = usize::try_from(state >> 33).expect("64 bits") % bytes.len();
            bytes[place] = state.to_le_bytes()[3];
        }
        let arguments = ["--access-log", "-", "--limit", "5", "--window", "1s"];
        let output = simulate_with_input(&arguments, &bytes);
        assert!(matches!(output.status.code(), Some(0 | 2)), "{:?}", output.status);
        assert!(!text(&output.stderr).contains("panicked"), "{}", text(&output.stderr));
    }
}
