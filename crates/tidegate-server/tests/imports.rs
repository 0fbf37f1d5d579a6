//! Arrows between the tools: each tool imports the shared modules in `tool`, and no other tool.
//!
//! The modules of the server join this list in a later session. Until then, only edges between the
//! modules of the tools are checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

type Edges = BTreeSet<(String, String)>;

/// Modules of the tools, each with those that it imports.
const ALLOWED: [(&str, &[&str]); 7] = [
    ("cli", &["bench", "doctor", "plan", "simulate", "tool", "top"]),
    ("bench", &["tool"]),
    ("doctor", &["tool"]),
    ("plan", &["tool"]),
    ("simulate", &["tool"]),
    ("top", &["tool"]),
    ("tool", &[]),
];

/// Returns whether a path below `src` belongs to tests.
fn is_test(path: &str) -> bool {
    path.split(['/', '.']).any(|name| name == "tests" || name.ends_with("_tests"))
}

/// Adds the edges of all files below a folder.
fn add_files(source: &Path, folder: &Path, edges: &mut Edges) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let relative = path.strip_prefix(source).expect("below src").to_str().expect("UTF-8");
        if path.is_dir() {
            add_files(source, &path, edges);
        } else if let Some(module) = relative.strip_suffix(".rs")
            && module != "main"
            && !is_test(relative)
        {
            let text = fs::read_to_string(&path).expect("a source file");
            edges.extend(edges_of(module, &text));
        }
    }
}

/// Returns the edges of a module, such as `bench/keys`, to other first-level modules.
fn edges_of(module: &str, text: &str) -> Edges {
    let code = production_code(text);
    let first = module.split('/').next().expect("a name");
    let from_root = "super::".repeat(module.split('/').count());
    let names = names_after(&code, "crate::").into_iter().chain(names_after(&code, &from_root));
    names.filter(|name| name != first).map(|name| (first.to_owned(), name)).collect()
}

/// Returns the code without comments and without items for tests.
fn production_code(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let trimmed = line.trim_start();
        if trimmed.starts_with("#[cfg(test)]") || trimmed.starts_with("#[cfg(all(test") {
            let end = format!("{}}}", &line[..line.len() - trimmed.len()]);
            // An item ends with a semicolon on its first line, or with a brace.
            let is_attribute = |line: &&str| line.trim_start().starts_with("#[");
            let item = lines.by_ref().find(|line| !is_attribute(line)).unwrap_or_default();
            if !item.trim_end().ends_with([';', '}']) {
                let _ = lines.by_ref().find(|line| line.starts_with(&end));
            }
        } else if !trimmed.starts_with("//") {
            code.push_str(line);
            code.push('\n');
        }
    }
    code
}

/// Returns the names that follow a path to the root of the crate: one, or a group in braces.
fn names_after(code: &str, path: &str) -> Vec<String> {
    let is_part = |character: char| character.is_alphanumeric() || "_:".contains(character);
    let mut names = Vec::new();
    for (position, _) in code.match_indices(path) {
        if code[..position].ends_with(is_part) {
            continue;
        }
        let rest = &code[position + path.len()..];
        match rest.strip_prefix('{') {
            None => names.push(name(rest)),
            Some(group) => {
                let mut depth = 0;
                let separators = group.match_indices(['{', '}', ',']);
                names.push(name(group));
                for (position, separator) in separators {
                    match separator {
                        "{" => depth += 1,
                        "}" if depth == 0 => break,
                        "}" => depth -= 1,
                        _ if depth == 0 => names.push(name(&group[position + 1..])),
                        _ => {}
                    }
                }
            }
        }
    }
    // A type of the root, or the end of a group.
    names.retain(|name| name.starts_with(|first: char| first.is_ascii_lowercase()));
    names
}

fn name(text: &str) -> String {
    let text = text.trim_start();
    text.chars().take_while(|character| character.is_alphanumeric() || *character == '_').collect()
}

/// Returns the modules of a cycle, if there is one.
fn cycle(edges: &Edges) -> Option<Vec<String>> {
    let mut left: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in edges {
        left.entry(from).or_default().insert(to);
        left.entry(to).or_default();
    }
    loop {
        let leaves: Vec<&str> =
            left.iter().filter(|(_, to)| to.is_empty()).map(|(from, _)| *from).collect();
        if leaves.is_empty() {
            let names: Vec<String> = left.into_keys().map(str::to_owned).collect();
            return (!names.is_empty()).then_some(names);
        }
        left.retain(|from, _| !leaves.contains(from));
        for to in left.values_mut() {
            to.retain(|to| !leaves.contains(to));
        }
    }
}

/// Returns the edges between the modules of the tools.
fn edges_of_tools() -> Edges {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut edges = Edges::new();
    add_files(&source, &source, &mut edges);
    let is_tool = |module: &String| ALLOWED.iter().any(|(tool, _)| tool == module);
    edges.retain(|(from, to)| is_tool(from) && is_tool(to));
    edges
}

fn edges(list: &[(&str, &[&str])]) -> Edges {
    let of = |(from, to): &(&str, &[&str])| {
        let from = (*from).to_owned();
        to.iter().map(|to| (from.clone(), (*to).to_owned())).collect::<Vec<_>>()
    };
    list.iter().flat_map(of).collect()
}

#[test]
fn tools_import_shared_modules_and_no_other_tool() {
    let (found, allowed) = (edges_of_tools(), edges(&ALLOWED));
    let others: Vec<_> = found.difference(&allowed).collect();
    assert!(others.is_empty(), "not in the list: {others:?}");
    let unused: Vec<_> = allowed.difference(&found).collect();
    assert!(unused.is_empty(), "in the list, but not in the code: {unused:?}");
}

#[test]
fn tools_have_no_cycle() {
    assert_eq!(cycle(&edges_of_tools()), None);
}

#[test]
fn cycles_are_found() {
    assert_eq!(cycle(&edges(&[("a", &["b", "c"]), ("b", &["c"])])), None);
    let cyclic = edges(&[("a", &["b"]), ("b", &["c"]), ("c", &["b", "d"])]);
    assert_eq!(cycle(&cyclic), Some(["a", "b", "c"].map(str::to_owned).to_vec()));
}

#[test]
fn edges_are_those_of_production_code() {
    let code = "\
use crate::{config::{self, Config}, logs};
use super::super::serve;
use super::flags::Flags;
// use crate::comment;
fn f() { crate::metrics::count(other::crate::name()) }
#[cfg(test)]
use crate::first_test;
#[cfg(test)]
#[path = \"x.rs\"]
mod fuzz;
    #[cfg(test)]
    fn g() {
        crate::second_test::f();
    }
fn h(_: crate::Type, _: crate::cli::Type) {}
#[cfg(test)]
mod tests {
    use crate::third_test;
}
";
    let found: Vec<String> = edges_of("cli/bench", code).into_iter().map(|(_, to)| to).collect();
    assert_eq!(found, ["config", "logs", "metrics", "serve"]);
}
