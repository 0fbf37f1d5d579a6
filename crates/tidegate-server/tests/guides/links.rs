//! Links in the documents of the repository, and the list of pages of the book.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use crate::root;

/// Folders without documents, or only with templates of documents.
const SKIPPED: [&str; 5] = ["target", "node_modules", ".git", ".venv", "tests"];

/// Returns all Markdown files of the repository.
pub(crate) fn documents(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).expect("a folder");
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_symlink() || SKIPPED.contains(&&*name) {
            continue;
        }
        if path.is_dir() {
            documents(&path, found);
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
}

/// Returns the lines of a page that are not code, without code in the line.
fn prose(page: &str) -> impl Iterator<Item = (usize, String)> {
    let mut in_code = false;
    page.lines().enumerate().filter_map(move |(index, line)| {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
            return None;
        }
        let text = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        (!in_code).then_some((index + 1, text))
    })
}

/// Returns the targets of the links of a page, with their lines. The text of a link may be code, so
/// only the part behind it is searched for.
fn links(page: &str) -> Vec<(usize, String)> {
    let mut all = Vec::new();
    for (line, text) in prose(page) {
        for part in text.split("](").skip(1) {
            if let Some((target, _)) = part.split_once(')') {
                all.push((line, target.split(' ').next().unwrap_or_default().to_owned()));
            }
        }
    }
    all
}

/// Returns the anchors of a page: those that GitHub and mdBook make of its headings.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mut in_code = false;
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        let title = line.trim_start_matches('#');
        if in_code || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let slug: String = title
            .trim()
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
            .map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() })
            .collect();
        let free = |number: &usize| {
            let name = if *number == 0 { slug.clone() } else { format!("{slug}-{number}") };
            (!all.contains(&name)).then_some(name)
        };
        let name = (0..).find_map(|number| free(&number)).expect("a free name");
        all.insert(name);
    }
    all
}

/// Returns a path without `.` and `..`.
fn normalized(path: &Path) -> PathBuf {
    let mut all = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(all.pop()),
            Component::CurDir => {}
            other => all.push(other),
        }
    }
    all
}

/// Returns what is wrong with a link of a page, if anything.
fn wrong(page: &Path, text: &str, target: &str) -> Option<String> {
    if ["https://", "http://", "mailto:"].iter().any(|scheme| target.starts_with(scheme)) {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(p, a)| (p, Some(a)));
    let file = match path {
        "" => page.to_owned(),
        path => normalized(&page.parent().expect("a folder").join(path)),
    };
    if !file.starts_with(root()) || !file.exists() {
        return Some(format!("{target} does not exist"));
    }
    let anchor = anchor?;
    let other = (file != page).then(|| std::fs::read_to_string(&file).unwrap_or_default());
    let names = anchors(other.as_deref().unwrap_or(text));
    (!names.contains(anchor)).then(|| format!("{target} has no such heading; it has {names:?}"))
}

#[test]
fn links_of_all_documents_lead_somewhere() {
    let mut pages = Vec::new();
    documents(&root(), &mut pages);
    let mut checked = 0;
    let mut failures = Vec::new();
    for page in pages {
        let text = std::fs::read_to_string(&page).expect("a page");
        for (line, target) in links(&text) {
            checked += 1;
            let name = page.strip_prefix(root()).unwrap_or(&page).display();
            failures
                .extend(wrong(&page, &text, &target).map(|what| format!("{name}:{line}: {what}")));
        }
    }
    assert!(checked > 200, "only {checked} links were found");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn the_book_has_every_page_once() {
    let docs = root().join("docs");
    let mut pages = Vec::new();
    documents(&docs, &mut pages);
    let page = |path: &PathBuf| path.strip_prefix(&docs).expect("inside").display().to_string();
    let mut pages: Vec<String> = pages.iter().map(page).filter(|p| p != "SUMMARY.md").collect();
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md")).expect("SUMMARY.md");
    let mut listed: Vec<String> = links(&summary).into_iter().map(|(_, target)| target).collect();
    pages.sort();
    listed.sort();
    assert_eq!(listed, pages, "docs/SUMMARY.md, and the pages of docs/");
}

#[test]
fn broken_links_are_found() {
    let page = root().join("docs/library.md");
    let text = "# One title\n\n## One title\n";
    for right in
        ["#one-title", "#one-title-1", "algorithms.md", "../README.md", "https://x.example"]
    {
        assert_eq!(wrong(&page, text, right), None);
    }
    for target in ["#two", "missing.md", "../../../etc/hosts", "algorithms.md#missing"] {
        assert!(wrong(&page, text, target).is_some(), "{target}");
    }
    let links = links("[a](b.md) and `[no](c.md)` [`x`](d.md#e)\n```\n[no](f.md)\n```\n");
    assert_eq!(links, [(1, "b.md".to_owned()), (1, "d.md#e".to_owned())]);
}
