//! Configurations: errors have a position within the text, a bounded length, and no secrets.

use tidegate_config::ConfigError;

use crate::fuzz::{self, Random};

const SEEDS: [&str; 12] = [
    concat!(
        "policies:\n  - name: a\n    match: {path: '/api/**', method: [GET, POST]}\n",
        "    key: [ip]\n    limit: 5\n    window: 60s\n",
    ),
    concat!(
        "policies:\n",
        "- {name: a, limit: 5, window: 60s, algorithm: token-bucket, burst: 9, mode: shadow}\n",
    ),
    concat!(
        "attributes: [tenant]\npolicies:\n  - name: t\n",
        "    key: [tenant, header.x-user-id]\n    missing_key: deny\n    limit: 1\n",
        "    window: 1h\n    cost: {attribute: header.x-cost, default: 1, max: 1}\n",
    ),
    "paths: {encoded_slashes: decode, parameters: keep, case_insensitive: true}\npolicies: []\n",
    concat!(
        "policies:\n  - name: a\n    key: ip\n    limit: 5\n    window: 60s\n    overrides:\n",
        "      - {key: gold, limit: 9}\n",
    ),
    "x: &a {limit: 5, window: 60s}\npolicies: [{name: a, <<: *a}]\n",
    "policies:\n\t- name: a\n",
    "policies:\n  - name: \"a\n    limit: 5\n",
    "policies:\n  - name:a\n    limit:5\n",
    "policies: [{name: a, limit: 5, window: 60s\n",
    "policies:\n  - name: *a\n    limit: !!int \"5\"\n",
    "policies: # a\u{a0}comment\n\u{2003}- name: a\r\n",
];
const PIECES: [&str; 40] = [
    "policies:",
    "\n",
    "\n  ",
    "\n    ",
    "- ",
    "  - name: a\n",
    "name: ",
    "limit: 5\n",
    "window: 60s\n",
    "key: ",
    "match: ",
    "path: ",
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
    "!!str ",
    "|\n",
    ">-\n",
    "---\n",
    "...\n",
    "~",
    "<<: *a\n",
    "\u{a0}",
    "\r",
    "\u{feff}",
    "token: x\n",
    "%",
    "?",
    "0x1",
];

fn errors_of(text: &str) -> Option<ConfigError> {
    tidegate_config::parse_policies("limits.yaml", text).err()
}

fn check_position(text: &str, error: &ConfigError) {
    assert!(error.line().starts_with("limits.yaml:"), "{error}");
    let Some((line, column)) = error.position() else { return };
    // Lines end with a line feed, a carriage return, or both.
    let lines: Vec<&str> = text
        .strip_prefix('\u{feff}')
        .unwrap_or(text)
        .split('\n')
        .flat_map(|line| line.strip_suffix('\r').unwrap_or(line).split('\r'))
        .collect();
    assert!((1..=lines.len()).contains(&line), "line {line} of {}: {error}", lines.len());
    let length = lines[line - 1].chars().count();
    assert!((1..=length + 1).contains(&column), "column {column} of {length}: {error}");
}

#[test]
fn fuzz_config_errors_have_a_position_within_the_text() {
    let generate = |random: &mut Random| {
        let mut text = match random.below(4) {
            0 => random.pieces(&PIECES, 24),
            _ => random.pick(&SEEDS).as_bytes().to_vec(),
        };
        random.mutate(&mut text, &PIECES, &SEEDS);
        text
    };
    fuzz::run(&SEEDS, 10, generate, |text| {
        let text = String::from_utf8_lossy(text);
        let Some(error) = errors_of(&text) else { return };
        check_position(&text, &error);
        assert!(error.to_string().len() < 4_096, "an error of {} bytes", error.to_string().len());
        assert_eq!(errors_of(&text).map(|error| error.to_string()), Some(error.to_string()));
    });
}

/// A section with a secret is never shown, whatever is written before and after it.
#[test]
fn fuzz_config_errors_never_show_a_secret() {
    const SECRETS: [&str; 6] = [
        "auth:\n  api_token: S3CR3T\n",
        "auth: {api_token: S3CR3T, admin_token: \"S3CR3T\"}\n",
        "store:\n  redis: redis://user:S3CR3T@localhost\n",
        "store:\n  sentinel:\n    password: 'S3CR3T'\n",
        "auth: &a\n  api_token: &b S3CR3T\n",
        "tls:\n  key: |\n    S3CR3T\n",
    ];
    let generate = |random: &mut Random| {
        let mut parts =
            [random.pick(&SEEDS), random.pick(&SEEDS)].map(|seed| seed.as_bytes().to_vec());
        for part in &mut parts {
            random.mutate(part, &PIECES, &SEEDS);
        }
        [&parts[0], b"\n".as_slice(), random.pick(&SECRETS).as_bytes(), &parts[1]].concat()
    };
    fuzz::run(&SECRETS, 10, generate, |text| {
        let text = String::from_utf8_lossy(text);
        // The shrinker may take the section apart.
        if !SECRETS.iter().any(|section| text.contains(&format!("\n{section}"))) {
            return;
        }
        let Some(error) = errors_of(&text) else { return };
        let shown = format!("{error}\n{error:?}");
        assert!(!shown.contains("S3CR3T"), "{shown}");
    });
}
