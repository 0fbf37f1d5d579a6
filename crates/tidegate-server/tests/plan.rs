//! `tidegate plan` as a process; its costs are compared with a real Redis.

mod support;

use std::process::{Command, Output, Stdio};

use serde_json::Value;
use support::Redis;

const BILLION: [&str; 8] = ["--users", "1B", "--limit", "100", "--window", "10s", "--rps", "150k"];

fn plan(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let command = command.arg("plan").args(arguments).stdin(Stdio::null()).env_clear();
    command.output().expect("the binary runs")
}

fn json(arguments: &[&str]) -> Value {
    let output = plan(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

fn name(form: &Value) -> String {
    format!("{} {}", form["algorithm"], form["encoding"])
}

#[test]
fn billion_users_have_a_plan() {
    let output = plan(&BILLION);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(output.status.success() && text.contains("primaries"), "{text}");
    assert!(text.trim_end().ends_with('.') && text.contains("\nUse `algorithm: "), "{text}");
    assert!(!text.contains('\x1b'), "no colours without a terminal: {text}");
    let plan = json(&BILLION);
    let forms = plan["forms"].as_array().expect("a list");
    for form in forms {
        let keys = number(&form["keys"]);
        assert!([1.5e6, 3e6].contains(&keys), "as many as requests within a key's life: {form}");
        let memory = number(&form["memory_bytes"]);
        let expected = keys * number(&form["bytes_per_key"]) * number(&plan["fragmentation"]);
        assert!((memory / expected - 1.0).abs() < 0.02, "{form}");
        let cores = 150e3 * number(&form["cpu_micros"]) / 1e6;
        assert!((number(&form["cores"]) / cores - 1.0).abs() < 0.001, "{form}");
    }
}

#[test]
fn impossible_numbers_are_errors() {
    for (name, value, says) in [
        ("--users", "0", "--users must be at least 1"),
        ("--users", "many", "is not a count"),
        ("--limit", "0", "limit"),
        ("--window", "0s", "window"),
        ("--window", "soon", "soon"),
        ("--rps", "-1", "rps"),
        ("--active", "120%", "is not a share"),
        ("--active", "0", "--active must be more than 0"),
        ("--headroom", "100%", "--headroom must be less"),
        ("--node-memory", "3", "is not a size"),
        ("--measure", "redis://127.0.0.1:1", "127.0.0.1:1"),
    ] {
        let mut arguments: Vec<&str> = BILLION.to_vec();
        match arguments.iter().position(|argument| *argument == name) {
            Some(at) => arguments[at + 1] = value,
            None => arguments.extend([name, value]),
        }
        let output = plan(&arguments);
        let error = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(2), "{name} {value}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.contains(says), "{name} {value}: {error}");
        assert!(output.stdout.is_empty());
    }
}

/// The checked-in costs are those of a real server: memory within 15 %, CPU within 40 % in
/// relation to an empty script.
#[test]
fn costs_are_those_of_a_real_redis() {
    let redis = Redis::start();
    let url = redis.url();
    let planned = json(&BILLION);
    // The best of three: other processes disturb the CPU times.
    let mut wrong = Vec::new();
    for _ in 0..3 {
        let measured = json(&[&BILLION[..], &["--measure", &url, "--decisions", "2000"]].concat());
        assert_eq!(measured["measured"], true);
        wrong = deviations(&planned, &measured);
        if wrong.is_empty() {
            break;
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let left: u64 = redis.query(&["DBSIZE"]);
    assert_eq!(left, 0, "all keys are deleted");
}

fn deviations(planned: &Value, measured: &Value) -> Vec<String> {
    let forms = |plan: &Value| plan["forms"].as_array().expect("a list").clone();
    let (planned_forms, measured_forms) = (forms(planned), forms(measured));
    assert_eq!(planned_forms.len(), measured_forms.len());
    let mut wrong = Vec::new();
    for (planned_form, measured_form) in planned_forms.iter().zip(&measured_forms) {
        assert_eq!(name(planned_form), name(measured_form));
        for (field, tolerance, is_cpu) in [
            ("bytes_per_key", 0.15, false),
            ("bytes_per_full_key", 0.15, false),
            ("cpu_micros", 0.4, true),
            ("batched_cpu_micros", 0.4, true),
        ] {
            let value = |plan: &Value, form: &Value| {
                let unit = if is_cpu { number(&plan["empty_script_micros"]) } else { 1.0 };
                number(&form[field]) / unit
            };
            let (plan, real) = (value(planned, planned_form), value(measured, measured_form));
            if (plan / real - 1.0).abs() > tolerance {
                wrong.push(format!(
                    "{} {field}: {plan:.2}, measured {real:.2}",
                    name(measured_form)
                ));
            }
        }
    }
    wrong
}
