//! Whether a key of ours has no expiry: it would never go, and whatever counts in it might stay
//! exhausted.

use std::time::{Duration, Instant};

use tidegate::store::redis::Reply;

use super::{Examination, Finding, Report, Subject};

const CHECK: &str = "expiry";
/// How many keys Redis walks in one step, and how many steps: it may hold a lot that is not ours.
const STEP: &str = "500";
const MOST_STEPS: usize = 1_000;
const MOST_TIME: Duration = Duration::from_secs(3);
/// How many are named, and how much of each.
const NAMED: usize = 3;
const LONGEST_NAME: usize = 100;

pub(super) async fn check(
    subject: &Subject<'_>,
    examination: &Examination<'_>,
    report: &mut Report,
) {
    let pattern = format!("{}:*", literally(examination.prefix));
    let deadline = Instant::now() + MOST_TIME;
    let (mut cursor, mut looked_at, mut all) = ("0".to_owned(), 0_usize, false);
    let mut without: Vec<String> = Vec::new();
    for _ in 0..MOST_STEPS {
        let scan = ["SCAN", &cursor, "MATCH", &pattern, "COUNT", STEP];
        let Ok(reply) = subject.store.ask_node(subject.address, &scan).await else { break };
        let Some((next, keys)) = scanned(reply) else {
            return subject.unknown(report, CHECK, "SCAN");
        };
        let questions: Vec<[&str; 2]> = keys.iter().map(|key| ["PTTL", key]).collect();
        let questions: Vec<&[&str]> = questions.iter().map(|words| &words[..]).collect();
        let Ok(answers) = subject.store.ask_node_all(subject.address, &questions).await else {
            break;
        };
        if answers.iter().any(|answer| matches!(answer, Reply::Error(_))) {
            return subject.unknown(report, CHECK, "PTTL");
        }
        looked_at += keys.len();
        let endless =
            keys.into_iter().zip(answers).filter(|(_, answer)| *answer == Reply::Integer(-1));
        without.extend(endless.map(|(key, _)| key));
        all = next == "0";
        if all || looked_at >= examination.keys || Instant::now() > deadline {
            break;
        }
        cursor = next;
    }
    // A walk may come by a key twice.
    without.sort_unstable();
    without.dedup();
    let extent = if all { "all" } else { "the first" };
    let prefix = examination.prefix.escape_debug();
    subject.found(
        report,
        if without.is_empty() {
            Finding::ok(CHECK, format!("{extent} {looked_at} keys under {prefix}: each has an expiry"))
        } else {
            let names: Vec<String> = without.iter().take(NAMED).map(|key| name(key)).collect();
            let message = format!(
                "{} of {extent} {looked_at} keys under {prefix}: have no expiry: {}{}",
                without.len(),
                names.join(", "),
                if without.len() > NAMED { ", …" } else { "" }
            );
            let advice =
                "tidegate never writes such keys: find out who does, delete them, or choose another store.prefix";
            Finding::error(CHECK, message).advice(advice)
        },
    );
}

/// The next cursor, and the keys that were found.
fn scanned(reply: Reply) -> Option<(String, Vec<String>)> {
    let Reply::List(parts) = reply else { return None };
    let [Reply::Text(cursor), Reply::List(keys)] = <[Reply; 2]>::try_from(parts).ok()? else {
        return None;
    };
    let text = |key| if let Reply::Text(text) = key { Some(text) } else { None };
    Some((cursor, keys.into_iter().filter_map(text).collect()))
}

/// A text as a pattern that matches just it.
pub(super) fn literally(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for character in text.chars() {
        if "*?[\\".contains(character) {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern
}

/// Users choose parts of keys: nothing in one may play tricks with a terminal.
fn name(key: &str) -> String {
    let shown: String = key.chars().take(LONGEST_NAME).collect();
    format!("\"{}\"{}", shown.escape_debug(), if shown.len() < key.len() { "…" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_with_stars_matches_only_itself() {
        assert_eq!(literally("rate_limit"), "rate_limit");
        assert_eq!(literally("a*b?[c]\\"), "a\\*b\\?\\[c]\\\\");
    }

    #[test]
    fn what_users_chose_is_shown_without_its_tricks() {
        assert_eq!(name("a\u{1b}[31m\"b"), r#""a\u{1b}[31m\"b""#);
        assert_eq!(name(&"é".repeat(101)), format!("\"{}\"…", "é".repeat(100)));
    }
}
