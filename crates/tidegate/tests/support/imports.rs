//! Arrows between the first-level modules of a crate: the test of each crate has the list of
//! allowed ones, and [`check`] compares it with the code.
#![allow(dead_code, reason = "the test of a crate uses one of the checks")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// First-level modules, each with those that it imports.
pub(crate) type Allowed<'a> = [(&'a str, &'a [&'a str])];

type Edges = BTreeSet<(String, String)>;

/// Checks the production code below `source`, the folder `src` of a crate. Panics if a module
/// imports one that the list does not have, if the list has an import that the code has not, and
/// if there is a cycle.
pub(crate) fn check(source: &Path, allowed: &Allowed<'_>) {
    compare(&edges_below(source), allowed);
}

/// Does the same as [`check`] for imports between the modules of the list alone.
pub(crate) fn check_among(source: &Path, allowed: &Allowed<'_>) {
    let is_listed = |module: &String| allowed.iter().any(|(listed, _)| listed == module);
    let mut found = edges_below(source);
    found.retain(|(from, to)| is_listed(from) && is_listed(to));
    compare(&found, allowed);
}

fn compare(found: &Edges, allowed: &Allowed<'_>) {
    let listed = edges(allowed);
    let others: Vec<_> = found.difference(&listed).collect();
    assert!(others.is_empty(), "imports that are not in the list: {others:?}");
    let unused: Vec<_> = listed.difference(found).collect();
    assert!(unused.is_empty(), "imports in the list, but not in the code: {unused:?}");
    let cycle = cycle(found);
    assert!(cycle.is_empty(), "a cycle of imports, or modules that lead to it: {cycle:?}");
}

/// Returns the edges of a list.
pub(crate) fn edges(list: &Allowed<'_>) -> Edges {
    let of = |(from, to): &(&str, &[&str])| {
        let from = (*from).to_owned();
        to.iter().map(|to| (from.clone(), (*to).to_owned())).collect::<Vec<_>>()
    };
    list.iter().flat_map(of).collect()
}

/// Returns the edges of all files below `src`.
fn edges_below(source: &Path) -> Edges {
    let root = ["lib.rs", "main.rs"].map(|name| fs::read_to_string(source.join(name)));
    let root: String = root.into_iter().flatten().collect();
    let mut edges = Edges::new();
    add_files(source, source, &exports(&root), &mut edges);
    edges
}

fn add_files(source: &Path, folder: &Path, exports: &Exports, edges: &mut Edges) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let relative = path.strip_prefix(source).expect("below src").to_str().expect("UTF-8");
        if path.is_dir() {
            add_files(source, &path, exports, edges);
        } else if let Some(module) = relative.strip_suffix(".rs")
            && !["lib", "main"].contains(&module)
            && !is_test(relative)
        {
            let text = fs::read_to_string(&path).expect("a source file");
            edges.extend(edges_of(module, &text, exports));
        }
    }
}

/// Returns whether a path below `src` belongs to tests.
fn is_test(path: &str) -> bool {
    path.split(['/', '.']).any(|name| name == "tests" || name.ends_with("_tests"))
}

/// Names that the root of the crate exports, with the module of each.
pub(crate) type Exports = BTreeMap<String, String>;

/// Returns the types that the root of a crate exports from its modules.
pub(crate) fn exports(root: &str) -> Exports {
    let code = production_code(root);
    let statements = code.split(';').filter_map(|statement| statement.split_once("pub use "));
    let mut exports = Exports::new();
    for (_, path) in statements {
        let path = path.strip_prefix("crate::").unwrap_or(path);
        let names = path.split(|character: char| !is_of_name(character));
        let types = names.filter(|name| name.starts_with(char::is_uppercase));
        exports.extend(types.map(|name| (name.to_owned(), first_name(path))));
    }
    exports
}

/// Returns the edges of a module, such as `bench/keys`, to other first-level modules.
pub(crate) fn edges_of(module: &str, text: &str, exports: &Exports) -> Edges {
    let code = production_code(text);
    let first = module.split('/').next().expect("a name");
    let from_root = "super::".repeat(module.split('/').count());
    let names = names_after(&code, "crate::").into_iter().chain(names_after(&code, &from_root));
    // A type that the root exports is that of its module. Other types are those of the root.
    let modules = names.map(|name| exports.get(&name).cloned().unwrap_or(name));
    modules
        .filter(|name| name != first && name.starts_with(|first: char| first.is_ascii_lowercase()))
        .map(|name| (first.to_owned(), name))
        .collect()
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
    let mut names = Vec::new();
    for (position, _) in code.match_indices(path) {
        if code[..position].ends_with(|before: char| is_of_name(before) || before == ':') {
            continue;
        }
        let rest = &code[position + path.len()..];
        match rest.strip_prefix('{') {
            None => names.push(first_name(rest)),
            Some(group) => {
                let mut depth = 0;
                let separators = group.match_indices(['{', '}', ',']);
                names.push(first_name(group));
                for (position, separator) in separators {
                    match separator {
                        "{" => depth += 1,
                        "}" if depth == 0 => break,
                        "}" => depth -= 1,
                        _ if depth == 0 => names.push(first_name(&group[position + 1..])),
                        _ => {}
                    }
                }
            }
        }
    }
    names
}

fn is_of_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn first_name(text: &str) -> String {
    text.trim_start().chars().take_while(|character| is_of_name(*character)).collect()
}

/// Returns the modules of all cycles and those that lead to them; none without a cycle.
pub(crate) fn cycle(edges: &Edges) -> Vec<String> {
    let mut left: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in edges {
        left.entry(from).or_default().insert(to);
        left.entry(to).or_default();
    }
    loop {
        let leaves: Vec<&str> =
            left.iter().filter(|(_, to)| to.is_empty()).map(|(from, _)| *from).collect();
        if leaves.is_empty() {
            return left.into_keys().map(str::to_owned).collect();
        }
        left.retain(|from, _| !leaves.contains(from));
        for to in left.values_mut() {
            to.retain(|to| !leaves.contains(to));
        }
    }
}
