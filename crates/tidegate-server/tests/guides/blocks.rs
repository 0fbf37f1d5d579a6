//! Blocks of all documents: each is run by this target or by another test, or says why not.

use std::path::Path;

use crate::links::documents;
use crate::page::{Action, steps};
use crate::{PAGES, root};

/// Languages of blocks that only show something.
const SHOWN: [&str; 3] = ["text", "json", "mermaid"];

/// Blocks of a page in a language, and the test that reads them.
const TESTED_ELSEWHERE: [(&str, &str, &str); 17] = [
    ("README.md", "python", "crates/tidegate-python/tests/test_docs.py"),
    ("README.md", "rust", "crates/tidegate/tests/fresh_project.rs"),
    ("README.md", "toml", "crates/tidegate/tests/fresh_project.rs"),
    ("README.md", "yaml", "crates/tidegate-config/src/config/tests.rs"),
    ("docs/algorithms.md", "lua", "crates/tidegate/tests/algorithms_page.rs"),
    ("docs/configuration.md", "yaml", "crates/tidegate-config/src/config/tests.rs"),
    ("docs/proxies.md", "yaml", "crates/tidegate-config/src/config/tests.rs"),
    ("docs/gateway.md", "yaml", "crates/tidegate-config/src/config/tests.rs"),
    ("docs/holds.md", "rust", "crates/tidegate/src/lib.rs"),
    ("docs/library.md", "rust", "crates/tidegate/src/lib.rs"),
    ("docs/migrating.md", "rust", "crates/tidegate/src/lib.rs"),
    ("crates/tidegate-python/README.md", "python", "crates/tidegate-python/tests/test_docs.py"),
    ("docs/python.md", "python", "crates/tidegate-python/tests/test_docs.py"),
    ("docs/redis-clients.md", "python", "crates/tidegate-server/tests/resp/examples.rs"),
    ("docs/redis-clients.md", "js", "crates/tidegate-server/tests/resp/examples.rs"),
    ("docs/redis.md", "yaml", "crates/tidegate-config/src/config/tests.rs"),
    ("docs/spellings.md", "yaml", "crates/tidegate-config/src/config/schema_tests.rs"),
];

/// Returns the lines and languages of the blocks of a page that no step of it runs.
fn other_blocks(page: &str) -> Vec<(usize, String)> {
    let run: Vec<usize> = steps(page).iter().map(|step| step.line).collect();
    let mut found = Vec::new();
    let (mut in_block, mut above) = (false, "");
    for (index, line) in page.lines().enumerate() {
        let line = line.trim();
        if let Some(kind) = line.strip_prefix("```") {
            in_block = !in_block;
            let language = kind.split(',').next().unwrap_or_default();
            let is_exempt = above.starts_with("<!-- not run: ");
            if in_block && !is_exempt && !run.contains(&(index + 2)) {
                found.push((index + 1, language.to_owned()));
            }
            above = "";
        } else if !in_block && !line.is_empty() {
            above = line;
        }
    }
    found
}

/// Returns what is wrong with a page, if anything.
fn untested(name: &str, page: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let is_run = PAGES.iter().any(|page| page.name == name);
    let runs = |action: &Action| !matches!(action, Action::File { .. });
    if let Some(step) = steps(page).iter().find(|step| runs(&step.action)).filter(|_| !is_run) {
        wrong.push(format!("{name}:{}: the page is not in PAGES", step.line));
    }
    for (line, language) in other_blocks(page) {
        let is_tested = SHOWN.contains(&language.as_str())
            || TESTED_ELSEWHERE.iter().any(|(page, kind, _)| (*page, *kind) == (name, &language));
        if !is_tested {
            wrong.push(format!(
                "{name}:{line}: no test reads this block (`{language}`): show it as a step of the \
                 page, add its test to TESTED_ELSEWHERE, or put `<!-- not run: reason -->` above it"
            ));
        }
    }
    wrong
}

#[test]
fn every_block_is_run_or_says_why_not() {
    let mut pages = Vec::new();
    documents(&root(), &mut pages);
    let mut wrong = Vec::new();
    for path in pages {
        let page = std::fs::read_to_string(&path).expect("a page");
        let name = path.strip_prefix(root()).expect("inside").display().to_string();
        wrong.extend(untested(&name, &page));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn tests_of_other_blocks_read_these_pages() {
    for (page, language, test) in TESTED_ELSEWHERE {
        let text = std::fs::read_to_string(root().join(test)).expect(test);
        assert!(text.contains(page), "{test} does not read {page}");
        let page_text = std::fs::read_to_string(root().join(page)).expect(page);
        let is_there = other_blocks(&page_text).iter().any(|(_, kind)| kind == language);
        assert!(is_there, "{page} has no block in {language} that needs {test}");
    }
    assert!(PAGES.iter().all(|page| Path::new(&root().join(page.name)).exists()));
}

#[test]
fn untested_blocks_are_found() {
    for (page, wrong) in [
        ("```sh\ntrue\n```\n", 1),
        ("<!-- not run: a reason -->\n```sh\ntrue\n```\n", 0),
        ("```yaml\na: 1\n```\n", 1),
        ("Save `a.yaml`:\n```yaml\na: 1\n```\n", 0),
        ("```text\nshown\n```\n", 0),
        ("```\nno language\n```\n", 1),
        ("<!-- not run: a reason -->\n```sh\ntrue\n```\n```js\n```\n", 1),
    ] {
        assert_eq!(untested("docs/new.md", page).len(), wrong, "{page}");
    }
    assert_eq!(untested("docs/redis-clients.md", "```js\n1\n```\n```go\n1\n```\n").len(), 1);
}
