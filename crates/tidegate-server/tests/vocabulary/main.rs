//! The words of the repository: comments, documents, messages and constants use the terms of the
//! field (CONTRIBUTING.md, "Words"). The test reports every finding with a suggestion.

mod checker_tests;
mod prose;
mod words;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use prose::{Clause, Contents, clauses, comments, paragraphs, rust_contents, words_of_name};
use words::{
    BOUND_WORDS, CLAUSE_SUBJECTS, CONSTANT_WORDS, COUNTED, IDIOM_PHRASES, IDIOM_WORDS,
    METHOD_NAMES, ORDINALS, OTHERS, TIME_UNITS, TIMES,
};

/// Folders and files to check, relative to the root of the repository.
const ROOTS: [&str; 13] = [
    "crates",
    "docs",
    "deploy",
    "bench",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
    "Cargo.toml",
    "clippy.toml",
    "deny.toml",
];

/// Files that quote the idioms on purpose.
const EXCLUDED: [&str; 2] = [
    "crates/tidegate-server/tests/vocabulary/checker_tests.rs",
    "crates/tidegate-server/tests/vocabulary/words.rs",
];

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

/// Finds the idiom of `idioms` at the start of `words`, with its suggestion.
fn idiom_at(
    words: &[(usize, String)],
    idioms: &[(&'static str, &'static str)],
) -> Option<(&'static str, &'static str)> {
    let starts_with = |form: &str| {
        let mut rest = words.iter();
        form.split(' ').all(|part| rest.next().is_some_and(|(_, word)| word == part))
    };
    let mut all = idioms
        .iter()
        .flat_map(|(forms, suggestion)| forms.split('|').map(move |form| (form, *suggestion)));
    all.find(|(form, _)| starts_with(form))
}

/// Finds a rate with "a" in place of "per" at the start of `words`.
fn per_at(words: &[(usize, String)]) -> Option<String> {
    let text = |index: usize| words.get(index).map_or("", |(_, word)| word.as_str());
    let plural = |word: &str| word.strip_suffix('s').is_some_and(|one| has(COUNTED, one));
    let length = if plural(text(0)) && text(1) == "a" && has(TIMES, text(2)) {
        3
    } else if matches!(text(0), "a" | "an" | "one")
        && has(COUNTED, text(1))
        && text(2) == "a"
        && (has(TIMES, text(3)) || has(OTHERS, text(3)))
    {
        4
    } else {
        return None;
    };
    Some((0..length).map(text).collect::<Vec<_>>().join(" "))
}

/// Whether `word` is one of the words of `list`.
fn has(list: &str, word: &str) -> bool {
    list.split(' ').any(|listed| listed == word)
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
                idiom_at(rest, IDIOM_WORDS).or_else(|| idiom_at(rest, IDIOM_PHRASES))
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
            for word in words_of_name(name) {
                if let Some((_, suggestion)) = idiom_at(&[(*line, word)], IDIOM_WORDS) {
                    self.report(*line, name, suggestion);
                }
            }
        }
        for (line, name) in &contents.functions {
            let words: Vec<_> = words_of_name(name).into_iter().map(|word| (*line, word)).collect();
            for index in 0..words.len() {
                let found = idiom_at(&words[index..], IDIOM_PHRASES);
                let found = found.filter(|(phrase, _)| !METHOD_NAMES.contains(phrase));
                if let Some((phrase, suggestion)) = found {
                    self.report(*line, &format!("{phrase} (in fn {name})"), suggestion);
                }
            }
        }
    }
}

/// Extension of a file.
fn file_type(path: &str) -> Option<&str> {
    Path::new(path).extension()?.to_str()
}

/// Idioms of one file, or nothing for a kind of file that has no prose of ours.
fn check_words(path: &str, text: &str) -> Vec<Finding> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let contents = match file_type(path) {
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

/// Whether this is the name of a constant, and not the start of a `const fn`.
fn is_constant_name(name: &str) -> bool {
    name.chars().all(|char| matches!(char, 'A'..='Z' | '0'..='9' | '_'))
}

/// Constants whose names do not say that they bound or wait.
fn check_constants(path: &str, text: &str) -> Vec<Finding> {
    let mut checker = Checker { path, findings: Vec::new() };
    for (index, line) in text.lines().enumerate() {
        let Some((before, declaration)) = line.split_once("const ") else { continue };
        let is_item = before.trim().is_empty() || before.trim_start().starts_with("pub");
        let Some((name, rest)) = declaration.split_once(':').filter(|_| is_item) else { continue };
        if !is_constant_name(name) {
            continue;
        }
        let parts: Vec<&str> = name.split('_').collect();
        for (part, suggestion) in CONSTANT_WORDS {
            if parts.contains(part) {
                checker.report(index + 1, name, suggestion);
            }
        }
        let is_bound = parts.iter().any(|part| has(BOUND_WORDS, part));
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
        let entries = fs::read_dir(path);
        for entry in entries.unwrap_or_else(|error| panic!("{}: {error}", path.display())) {
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
        path.starts_with("crates/") && path.contains("/src/") && file_type(path) == Some("rs")
    });
    assert_none(sources.flat_map(|(path, text)| check_constants(path, text)).collect());
}
