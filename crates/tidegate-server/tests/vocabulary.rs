//! The words of the repository: comments, documents, messages and constants use the terms of the
//! field (CONTRIBUTING.md, "Words"). The test reports every finding with a suggestion.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders and files to check, relative to the root of the repository.
const ROOTS: [&str; 9] = [
    "crates",
    "docs",
    "deploy",
    "bench",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
];

/// Files that quote the idioms on purpose.
const EXCLUDED: [&str; 1] = ["crates/tidegate-server/tests/vocabulary.rs"];

/// Idioms that are found as words of a text and as parts of an identifier.
const IDIOM_WORDS: [(&str, &str); 17] = [
    ("told", "reported, sent, answered, logged"),
    ("untold", "pending, suppressed"),
    ("tell", "report, send, return, log, distinguish"),
    ("tells", "reports, shows, returns, logs"),
    ("telling", "reporting, logging"),
    ("nobody", "no client, no caller, no task"),
    ("somebody", "a client, another task"),
    ("everybody", "all clients, all callers"),
    ("anew", "again"),
    ("seldom", "rarely; for logs: throttled"),
    ("patience", "timeout"),
    ("patient", "with a timeout"),
    ("stir", "trigger a refresh"),
    ("stirs", "triggers a refresh"),
    ("stirred", "triggered"),
    ("trouble", "error, failure, outage"),
    ("whoever", "the client that, the task that"),
];

/// Idioms of several words, found in texts and in the names of functions.
const IDIOM_PHRASES: [(&str, &str); 38] = [
    ("under way", "in flight, in progress"),
    ("so many", "the number, for example `n` requests"),
    ("so much", "the amount, for example `n` units"),
    ("but for", "except for"),
    ("is none", "is absent, does not exist, is invalid"),
    ("are none", "are absent, do not exist"),
    ("by itself", "alone, on its own, automatically"),
    ("by themselves", "alone, on their own, automatically"),
    ("as good as", "equivalent to, treated as"),
    ("in vain", "without success, unsuccessfully"),
    ("without end", "forever, indefinitely"),
    ("all the same", "anyway, nevertheless"),
    ("step aside", "yield"),
    ("steps aside", "yields"),
    ("stepped aside", "yielded"),
    ("put aside", "preempted, parked, set apart"),
    ("turn away", "reject"),
    ("turns away", "rejects"),
    ("turned away", "rejected"),
    ("give back", "return, refund, release"),
    ("gives back", "returns, refunds, releases"),
    ("given back", "returned, refunded, released"),
    ("gave back", "returned, refunded, released"),
    ("at the door", "during the handshake, on connect"),
    ("own word", "own setting, own policy"),
    ("their word", "their setting, their policy"),
    ("for nothing", "unnecessarily, without a result"),
    ("well enough", "sufficiently"),
    ("stand still", "stall"),
    ("stands still", "stalls"),
    ("go away", "disconnect, disappear"),
    ("goes away", "disconnects, disappears"),
    ("gone away", "disconnected, disappeared"),
    ("in peace", "undisturbed, until its deadline"),
    ("one too many", "above the limit"),
    ("looked at", "checked, read, inspected"),
    ("say of", "report about"),
    ("says of", "reports about"),
];

/// Pronouns that must not start a sentence, except in a question.
const CLAUSE_SUBJECTS: [&str; 2] = ["who", "what"];

/// Counted things in "a request a second", which is written "one request per second".
const COUNTED: [&str; 20] = [
    "request",
    "requests",
    "decision",
    "decisions",
    "call",
    "calls",
    "unit",
    "units",
    "denial",
    "denials",
    "key",
    "keys",
    "entry",
    "entries",
    "file",
    "line",
    "byte",
    "bytes",
    "connection",
    "connections",
];
const PER: [&str; 12] = [
    "second", "minute", "hour", "day", "call", "request", "decision", "key", "command", "node",
    "policy", "suite",
];

/// Endings of a constant that bounds or waits. `MAX_…` and `MIN_…` are fine as well.
const BOUND_SUFFIXES: [&str; 8] =
    ["TIMEOUT", "INTERVAL", "BACKOFF", "TTL", "DEADLINE", "DEBOUNCE", "AFTER", "EJECTION_TIME"];

/// Units of time: a constant of this name is a value, not a bound.
const TIME_UNITS: [&str; 5] = ["MILLISECOND", "SECOND", "MINUTE", "HOUR", "DAY"];

/// Parts of a constant's name that stand for a word of the field.
const CONSTANT_WORDS: [(&str, &str); 12] = [
    ("PATIENCE", "…_TIMEOUT"),
    ("PAUSE", "…_INTERVAL or …_BACKOFF"),
    ("LONGEST", "MAX_…"),
    ("LARGEST", "MAX_…"),
    ("MOST", "MAX_…"),
    ("ENOUGH", "MIN_…"),
    ("LEAST", "MIN_…"),
    ("OLDEST", "MIN_…"),
    ("CALM", "IDLE_… or HEALTHY_…"),
    ("BEAT", "HEARTBEAT_…"),
    ("LOOKS", "…_POLLS, …_ATTEMPTS, …_SAMPLES"),
    ("A", "…_PER_…"),
];

/// Parts of a constant's name that need one of the forms above.
const ORDINALS: [&str; 2] = ["FIRST", "LAST"];

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    path: String,
    line: usize,
    found: String,
    suggestion: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, line, found, suggestion } = self;
        write!(formatter, "{path}:{line}: {found:?}; plain: {suggestion}")
    }
}

/// One line of prose with its number in the file.
type Line = (usize, String);

/// Prose and names of one file.
#[derive(Default)]
struct Contents {
    /// Blocks of consecutive lines, in Markdown.
    blocks: Vec<Vec<Line>>,
    identifiers: Vec<Line>,
    /// Names after `fn`.
    functions: Vec<Line>,
}

/// Words up to the next full stop, question mark, colon or bracket.
#[derive(Default)]
struct Clause {
    words: Vec<(usize, String)>,
    /// The first clause of its sentence.
    is_first: bool,
    is_question: bool,
}

fn clauses(lines: &[Line]) -> Vec<Clause> {
    let mut found = Vec::new();
    let mut clause = Clause { is_first: true, ..Clause::default() };
    for (number, line) in lines {
        let mut in_code = false;
        let mut word = String::new();
        let mut chars = line.chars().peekable();
        while let Some(char) = chars.next() {
            if char == '`' {
                in_code = !in_code;
                word.push('`');
                continue;
            }
            if char.is_alphanumeric() || matches!(char, '_' | '\'' | '-') {
                if !in_code {
                    word.extend(char.to_lowercase());
                }
                continue;
            }
            if in_code {
                continue;
            }
            if !word.is_empty() {
                clause.words.push((*number, std::mem::take(&mut word)));
            }
            let at_end = chars.peek().is_none_or(|next| next.is_whitespace() || *next == '*');
            let ends_sentence = matches!(char, '.' | '!' | '?') && at_end;
            let ends_clause = matches!(char, ':' | ';') && at_end;
            if ends_sentence || ends_clause || matches!(char, '(' | ')' | '|') {
                clause.is_question = char == '?';
                found.push(std::mem::take(&mut clause));
                clause.is_first = ends_sentence;
            } else if char == ',' {
                clause.words.push((*number, ",".into()));
            }
        }
        if !word.is_empty() {
            clause.words.push((*number, word));
        }
    }
    found.push(clause);
    found
}

/// Splits Markdown into paragraphs, list items, table rows and lines of code.
fn paragraphs(block: &[Line]) -> Vec<Vec<Line>> {
    let mut found: Vec<Vec<Line>> = vec![Vec::new()];
    let mut in_fence = false;
    for (number, line) in block {
        let text = line.trim();
        if text.starts_with("```") {
            in_fence = !in_fence;
            found.push(Vec::new());
            continue;
        }
        let is_item = text.starts_with(['-', '*', '+', '|', '>', '#'])
            || text.split_once(". ").is_some_and(|(head, _)| head.parse::<u32>().is_ok());
        if text.is_empty() || is_item || in_fence {
            found.push(Vec::new());
        }
        if let Some(last) = found.last_mut() {
            last.push((*number, text.to_owned()));
        }
    }
    found
}

fn phrase_at<'a>(
    words: &[(usize, String)],
    phrases: &'a [(&'a str, &'a str)],
) -> Option<(&'a str, &'a str)> {
    let starts_with = |phrase: &str| {
        let mut rest = words.iter();
        phrase.split(' ').all(|part| rest.next().is_some_and(|(_, word)| word == part))
    };
    phrases.iter().copied().find(|(phrase, _)| starts_with(phrase))
}

/// Finds "a request a second" at the start of `words`.
fn per_at(words: &[(usize, String)]) -> Option<String> {
    let text = |index: usize| words.get(index).map_or("", |(_, word)| word.as_str());
    let is_plural = text(0).ends_with('s');
    let unit_is_time = PER[..4].contains(&text(2));
    let plural = COUNTED.contains(&text(0)) && is_plural && text(1) == "a" && unit_is_time;
    let singular = matches!(text(0), "a" | "an" | "one")
        && COUNTED.contains(&text(1))
        && text(2) == "a"
        && PER.contains(&text(3));
    let length = if plural { 3 } else { 4 };
    (plural || singular).then(|| {
        words[..length].iter().map(|(_, word)| word.as_str()).collect::<Vec<_>>().join(" ")
    })
}

struct Checker<'a> {
    path: &'a str,
    findings: Vec<Finding>,
}

impl Checker<'_> {
    fn report(&mut self, line: usize, found: &str, suggestion: &str) {
        self.findings.push(Finding {
            path: self.path.to_owned(),
            line,
            found: found.to_owned(),
            suggestion: suggestion.to_owned(),
        });
    }

    fn check_clause(&mut self, clause: &Clause, is_heading: bool) {
        for (index, (line, word)) in clause.words.iter().enumerate() {
            let rest = &clause.words[index..];
            if let Some((phrase, suggestion)) =
                phrase_at(rest, &IDIOM_WORDS).or_else(|| phrase_at(rest, &IDIOM_PHRASES))
            {
                self.report(*line, phrase, suggestion);
            }
            if let Some(found) = per_at(rest) {
                self.report(*line, &found, "per");
            }
            let is_start = index == 0 && clause.words.len() > 2;
            let may_start =
                clause.is_question || is_heading || (word == "what" && !clause.is_first);
            if is_start && CLAUSE_SUBJECTS.contains(&word.as_str()) && !may_start {
                let found = format!("{word} {} …", clause.words[1].1);
                self.report(*line, &found, "a noun as the subject (\"The client that …\")");
            }
        }
    }

    fn check_names(&mut self, contents: &Contents) {
        for (line, name) in &contents.identifiers {
            for (idiom, suggestion) in IDIOM_WORDS {
                if words_of_name(name).iter().any(|word| word == idiom) {
                    self.report(*line, name, suggestion);
                }
            }
        }
        for (line, name) in &contents.functions {
            let words: Vec<_> = words_of_name(name).into_iter().map(|word| (*line, word)).collect();
            for index in 0..words.len() {
                let found = phrase_at(&words[index..], &IDIOM_PHRASES);
                // `is_none` is the name of a method of `Option`.
                if let Some((phrase, suggestion)) = found.filter(|(phrase, _)| *phrase != "is none")
                {
                    self.report(*line, &format!("{phrase} (in fn {name})"), suggestion);
                }
            }
        }
    }
}

/// Words of `snake_case`, `CamelCase` or `UPPER_CASE`, in lower case.
fn words_of_name(name: &str) -> Vec<String> {
    let is_upper = name.chars().all(|char| !char.is_lowercase());
    let mut words = vec![String::new()];
    for char in name.chars() {
        if char == '_' || (char.is_uppercase() && !is_upper) {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| char != '_') {
            word.extend(char.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Comments, string literals and names of a Rust file.
fn rust_contents(text: &str) -> Contents {
    let mut contents = Contents::default();
    let mut comment: Vec<Line> = Vec::new();
    let chars: Vec<char> = text.chars().collect();
    let at = |index: usize| chars.get(index).copied().unwrap_or('\0');
    let (mut index, mut line) = (0, 1);
    let mut previous = String::new();
    while index < chars.len() {
        let char = chars[index];
        if char == '/' && at(index + 1) == '/' {
            let end = (index..chars.len()).find(|end| at(*end) == '\n').unwrap_or(chars.len());
            let content: String = chars[index..end].iter().collect();
            if comment.last().is_some_and(|(last, _)| last + 1 != line) {
                contents.blocks.push(std::mem::take(&mut comment));
            }
            comment.push((line, content.trim_start_matches(['/', '!']).to_owned()));
            index = end;
        } else if char == '"' {
            let raw = previous
                .ends_with('r')
                .then(|| chars[..index].iter().rev().take_while(|char| **char == '#').count());
            let (end, lines) = string_literal(&chars, index + 1, line, raw);
            line += chars[index..end].iter().filter(|char| **char == '\n').count();
            index = end;
            previous.clear();
            if lines.iter().any(|(_, text)| text.trim().contains(' ')) {
                contents.blocks.push(lines);
            }
        } else if char == '\'' {
            let is_char = at(index + 1) == '\\' || at(index + 2) == '\'';
            let close = (index + 2..chars.len()).find(|close| at(*close) == '\'');
            // The quote of '\'' follows the escaped one.
            let close = close.filter(|_| is_char).map_or(index, |close| {
                if at(index + 1) == '\\' && close == index + 2 { close + 1 } else { close }
            });
            index = close + 1;
            previous.clear();
        } else if char.is_alphabetic() || char == '_' {
            let is_part = |end: &usize| at(*end).is_alphanumeric() || at(*end) == '_';
            let end = (index..).find(|end| !is_part(end)).unwrap_or(chars.len());
            let name: String = chars[index..end].iter().collect();
            if previous == "fn" {
                contents.functions.push((line, name.clone()));
            }
            contents.identifiers.push((line, name.clone()));
            previous = name;
            index = end;
        } else {
            line += usize::from(char == '\n');
            if !char.is_whitespace() && char != '#' {
                previous.clear();
            }
            index += 1;
        }
    }
    contents.blocks.push(comment);
    contents
}

/// The end and the lines of a string literal whose content starts at `start`. `raw` is the number
/// of `#` before a raw one.
fn string_literal(
    chars: &[char],
    start: usize,
    mut line: usize,
    raw: Option<usize>,
) -> (usize, Vec<Line>) {
    let mut lines = vec![(line, String::new())];
    let mut index = start;
    while let Some(char) = chars.get(index) {
        let hashes = raw.unwrap_or(0);
        let closes = *char == '"'
            && chars[index + 1..].iter().take(hashes).filter(|char| **char == '#').count()
                == hashes;
        if closes {
            return (index + 1 + hashes, lines);
        }
        if *char == '\\' && raw.is_none() {
            let is_break = matches!(chars.get(index + 1), Some('n' | '\n'));
            line += usize::from(chars.get(index + 1) == Some(&'\n'));
            if is_break {
                lines.push((line, String::new()));
            }
            index += 2;
            continue;
        }
        line += usize::from(*char == '\n');
        if *char == '\n' {
            lines.push((line, String::new()));
        } else if let Some((_, text)) = lines.last_mut() {
            text.push(*char);
        }
        index += 1;
    }
    (chars.len(), lines)
}

/// Comments that start with `marker`, at the start of a line or after a space.
fn comments(text: &str, marker: &str) -> Contents {
    let mut contents = Contents::default();
    for (index, line) in text.lines().enumerate() {
        let start = line
            .match_indices(marker)
            .find(|(start, _)| *start == 0 || line[..*start].ends_with(char::is_whitespace));
        let Some((start, _)) = start else { continue };
        let content = line[start..].trim_start_matches(['#', '-']).to_owned();
        let line = (index + 1, content);
        match contents.blocks.last_mut() {
            Some(block) if block.last().is_some_and(|(last, _)| last + 1 == line.0) => {
                block.push(line);
            }
            _ => contents.blocks.push(vec![line]),
        }
    }
    contents
}

/// Idioms of one file, or nothing for a kind of file that has no prose of ours.
fn check_words(path: &str, text: &str) -> Vec<Finding> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let contents = match name.rsplit('.').next() {
        Some("rs") => rust_contents(text),
        Some("lua") => comments(text, "--"),
        Some("yaml" | "yml" | "toml" | "sh" | "conf" | "cfg") => comments(text, "#"),
        _ if matches!(name, "Makefile" | "Caddyfile") => comments(text, "#"),
        Some("md") => {
            let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.to_owned()));
            Contents { blocks: vec![lines.collect()], ..Contents::default() }
        }
        _ => return Vec::new(),
    };
    let mut checker = Checker { path, findings: Vec::new() };
    for paragraph in contents.blocks.iter().flat_map(|block| paragraphs(block)) {
        let is_heading = paragraph.iter().any(|(_, line)| line.starts_with('#'));
        for clause in clauses(&paragraph) {
            checker.check_clause(&clause, is_heading);
        }
    }
    checker.check_names(&contents);
    checker.findings
}

/// Constants whose names do not say that they bound or wait.
fn check_constants(path: &str, text: &str) -> Vec<Finding> {
    let mut checker = Checker { path, findings: Vec::new() };
    for (index, line) in text.lines().enumerate() {
        let Some((before, declaration)) = line.split_once("const ") else { continue };
        let is_item = before.trim().is_empty() || before.trim_start().starts_with("pub");
        let Some((name, rest)) = declaration.split_once(':').filter(|_| is_item) else { continue };
        let parts: Vec<&str> = name.split('_').collect();
        for (part, suggestion) in CONSTANT_WORDS {
            if parts.contains(&part) {
                checker.report(index + 1, name, suggestion);
            }
        }
        let is_bound = parts.len() > 1 && ["MAX", "MIN"].contains(&parts[0])
            || BOUND_SUFFIXES.iter().any(|suffix| name.ends_with(suffix));
        let is_duration = rest.trim_start().starts_with("Duration") && !TIME_UNITS.contains(&name);
        let is_ordinal = ORDINALS.iter().any(|word| parts.contains(word));
        if (is_duration || is_ordinal) && !is_bound {
            let forms = "MAX_…, MIN_…, …_TIMEOUT, …_INTERVAL, …_BACKOFF, …_TTL, …_AFTER";
            checker.report(index + 1, name, forms);
        }
    }
    checker.findings
}

fn files_in(path: &Path, found: &mut Vec<PathBuf>) {
    let skipped = ["target", "node_modules", ".git", ".venv"];
    if path.is_file() {
        found.push(path.to_owned());
    } else if !path.file_name().is_some_and(|name| skipped.iter().any(|skip| name == *skip)) {
        let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        for entry in entries {
            files_in(&entry.expect("a readable folder").path(), found);
        }
    }
}

/// Path relative to the root, and text, of every file that is checked.
fn repository_files() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut paths = Vec::new();
    for name in ROOTS {
        files_in(&root.join(name), &mut paths);
    }
    let mut files = Vec::new();
    for path in paths {
        let name = path.strip_prefix(&root).expect("below the root").display().to_string();
        if EXCLUDED.contains(&name.as_str()) {
            continue;
        }
        if let Ok(text) = fs::read_to_string(&path) {
            files.push((name, text));
        }
    }
    files
}

fn assert_none(mut findings: Vec<Finding>) {
    findings.sort();
    let list: Vec<String> = findings.iter().map(ToString::to_string).collect();
    assert!(list.is_empty(), "{} findings:\n{}", list.len(), list.join("\n"));
}

#[test]
fn texts_use_plain_words() {
    let files = repository_files();
    assert!(files.len() > 100, "only {} files were found", files.len());
    assert_none(files.iter().flat_map(|(path, text)| check_words(path, text)).collect());
}

#[test]
fn constants_that_bound_or_wait_have_the_usual_forms() {
    let files = repository_files();
    let sources = files.iter().filter(|(path, _)| {
        path.starts_with("crates/") && path.contains("/src/") && path.ends_with(".rs")
    });
    assert_none(sources.flat_map(|(path, text)| check_constants(path, text)).collect());
}

#[cfg(test)]
mod checker {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<(usize, String)> {
        check_words(path, text).into_iter().map(|finding| (finding.line, finding.found)).collect()
    }

    #[track_caller]
    fn assert_found(path: &str, text: &str, expected: &[(usize, &str)]) {
        let expected: Vec<_> =
            expected.iter().map(|(line, found)| (*line, (*found).to_owned())).collect();
        assert_eq!(found(path, text), expected, "{text}");
    }

    #[test]
    fn finds_idioms_in_comments_of_each_language() {
        let rust = "/// A call under\n/// way.\nfn send() {} // by itself\n";
        assert_found("a.rs", rust, &[(1, "under way"), (3, "by itself")]);
        assert_found("a.lua", "local x = 1 -- given back\n", &[(1, "given back")]);
        assert_found("a.yaml", "# In vain.\nkey: \"#told\"\n", &[(1, "in vain")]);
        assert_found("Makefile", "all: # all the\n# same\n", &[(1, "all the same")]);
    }

    #[test]
    fn finds_idioms_in_documents_but_not_in_code_spans() {
        assert_found("a.md", "A client is\ntold so.\n\n- so\n- many\n", &[(2, "told")]);
        assert_found("a.md", "`told` and `is none` are quoted.\n", &[]);
    }

    #[test]
    fn finds_idioms_in_string_literals() {
        let text = "fn f() { info!(\"it goes \\\n    away\"); let c = '\"'; g(\"nobody\"); }\n";
        assert_found("a.rs", text, &[(1, "goes away")]);
        assert_found("a.rs", "const A: &str = r#\"x \"seldom\" y\"#;\n", &[(1, "seldom")]);
        assert_found("a.rs", "let c = '\\''; // in vain\n", &[(1, "in vain")]);
    }

    #[test]
    fn finds_idioms_in_names() {
        assert_found("a.rs", "fn not_in_vain() {}\n", &[(1, "in vain (in fn not_in_vain)")]);
        assert_found("a.rs", "struct LastTrouble;\n", &[(1, "LastTrouble")]);
        assert_found("a.rs", "let first = told.is_none();\n", &[(1, "told")]);
        assert_found("a.rs", "fn is_none() {}\n", &[]);
    }

    #[test]
    fn finds_pronouns_as_subjects_except_in_questions() {
        assert_found("a.md", "Who waits gets in.\n", &[(1, "who waits …")]);
        assert_found("a.rs", "// It runs. What is left stays.\n", &[(1, "what is …")]);
        assert_found("a.md", "Who waits here?\n\n# What it does\n", &[]);
        assert_found("a.md", "A client who waits gets in.\n", &[]);
    }

    #[test]
    fn finds_a_in_place_of_per() {
        assert_found("a.md", "one call a decision\n", &[(1, "one call a decision")]);
        assert_found("a.md", "100 requests a second\n", &[(1, "requests a second")]);
        assert_found("a.md", "to request a key, once a second\n", &[]);
    }

    #[test]
    fn suggests_a_plain_word() {
        let finding = check_words("docs/a.md", "The calls under way.\n").remove(0);
        let expected = "docs/a.md:1: \"under way\"; plain: in flight, in progress";
        assert_eq!(finding.to_string(), expected);
    }

    #[test]
    fn finds_constants_without_a_usual_form() {
        let names = |text: &str| -> Vec<String> {
            check_constants("a.rs", text).into_iter().map(|finding| finding.found).collect()
        };
        assert_eq!(names("const SETTLE: Duration = Duration::ZERO;\n"), ["SETTLE"]);
        assert_eq!(names("    pub(crate) const MOST_TAGS: usize = 3;\n"), ["MOST_TAGS"]);
        assert_eq!(names("const SLOTS_A_SWEEP: usize = 3;\n"), ["SLOTS_A_SWEEP"]);
        assert_eq!(names("const FIRST_DELAY: u64 = 3;\n"), ["FIRST_DELAY"]);
        let usual = "const MAX_LINGER: Duration = X;\nconst CALL_TIMEOUT: Duration = X;\n\
            const DEBOUNCE: Duration = X;\nconst SECOND: Duration = X;\nconst fn x(y: u8) {}\n";
        assert!(names(usual).is_empty());
    }
}
