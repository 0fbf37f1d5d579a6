//! Fuzzing of the whole configuration: errors have a position within the text and no secrets.

use super::*;
use crate::fuzz::{self, Random};

const SEEDS: [&str; 5] = [
    SAMPLE,
    "listen: {http: 127.0.0.1:8080, admin: 127.0.0.1:9090}\npolicies: []\n",
    concat!(
        "gateway:\n  upstreams: ['http://127.0.0.1:9000']\n  timeout: 5s\n",
        "policies: [{name: a, limit: 5, window: 1s}]\n",
    ),
    "client_ip: {trusted_proxies: [10.0.0.0/8], ipv6_prefix: 64}\nheaders: {x_ratelimit: true}\n",
    concat!(
        "envoy: {files: [], algorithm: token-bucket, near_limit_ratio: 0.5}\nlisten:\n",
        "  http: localhost\n",
    ),
];
const PIECES: [&str; 36] = [
    "\n",
    "\n  ",
    "\n    ",
    "- ",
    "{",
    "}",
    "[",
    "]",
    ",",
    ": ",
    ":",
    "\"",
    "'",
    "#",
    " ",
    "\t",
    "&a ",
    "*a",
    "|\n",
    ">\n",
    "---\n",
    "~",
    "\u{a0}",
    "\r",
    "\u{feff}",
    "listen:",
    "store:",
    "auth:",
    "policies:",
    "gateway:",
    "envoy:",
    "token: ",
    "1e9",
    "-1",
    "!!binary ",
    "?",
];
const SECRETS: [&str; 7] = [
    "auth:\n  api_token: S3CR3T\n",
    "auth: {api_token: S3CR3T, admin_token: 'S3CR3T'}\n",
    "store:\n  redis: rediss://user:S3CR3T@localhost:6379\n",
    "store:\n  sentinel:\n    master: m\n    password: S3CR3T\n",
    "store: {redis: 'redis://:S3CR3T@h', prefix: [1]}\n",
    "auth: &a\n  api_token: &b S3CR3T\nlisten: {http: *b}\n",
    "unknown: {bearer: S3CR3T}\n",
];

#[test]
fn fuzz_config_of_the_server_has_errors_with_a_position_and_no_secrets() {
    let generate = |random: &mut Random| {
        let mut parts =
            [random.pick(&SEEDS), random.pick(&SEEDS)].map(|text| text.as_bytes().to_vec());
        for part in &mut parts {
            random.mutate(part, &PIECES, &SEEDS);
        }
        [&parts[0], b"\n".as_slice(), random.pick(&SECRETS).as_bytes(), &parts[1]].concat()
    };
    fuzz::run(&SEEDS, 20, generate, |text| {
        let text = String::from_utf8_lossy(text);
        let Err(error) = Config::parse("tidegate.yaml", &text) else { return };
        let lines: Vec<&str> = text
            .strip_prefix('\u{feff}')
            .unwrap_or(&text)
            .split('\n')
            .flat_map(|line| line.strip_suffix('\r').unwrap_or(line).split('\r'))
            .collect();
        if let Some((line, column)) = error.position() {
            assert!((1..=lines.len()).contains(&line), "{error}");
            assert!((1..=lines[line - 1].chars().count() + 1).contains(&column), "{error}");
        }
        let shown = format!("{error}\n{error:?}");
        assert!(shown.len() < 8_192, "an error of {} bytes", shown.len());
        // The shrinker may take the section apart.
        if SECRETS.iter().any(|section| text.contains(&format!("\n{section}"))) {
            assert!(!shown.contains("S3CR3T"), "{shown}");
        }
    });
}
