//! ARCHITECTURE.md names every first-level module of every crate once, and nothing that does not
//! exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page() -> String {
    fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the page")
}

/// Returns the paths in a folder, each with its name.
fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(folder).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let name = |path: &Path| path.file_name().expect("a name").to_str().expect("UTF-8").to_owned();
    paths.map(|path| (name(&path), path)).collect()
}

/// Returns the first-level modules of a crate: `store` for `store.rs` and the folder `store`.
fn modules(source: &Path) -> BTreeSet<String> {
    let module = |(name, path): (String, PathBuf)| match name.strip_suffix(".rs") {
        Some("lib" | "main") => None,
        Some(module) => Some(module.to_owned()),
        None => path.is_dir().then_some(name),
    };
    entries(source).into_iter().filter_map(module).collect()
}

/// Returns the texts that are written as code.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns the names in the first column of the table of a crate, with their number of mentions.
fn named_modules(page: &str, name: &str) -> BTreeMap<String, usize> {
    let heading = format!("\n### `crates/{name}`");
    let section = page.split_once(&heading).unwrap_or_else(|| panic!("no section for {name}")).1;
    let section = section.split("\n#").next().expect("a section");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| "));
    let mut modules = BTreeMap::new();
    for module in rows.flat_map(|row| code(row.split(" |").next().unwrap_or_default())) {
        *modules.entry(module.to_owned()).or_default() += 1;
    }
    modules
}

#[test]
fn tables_name_every_first_level_module_once() {
    let page = page();
    let crates = entries(&root().join("crates"));
    assert!(crates.len() >= 2);
    for (name, folder) in crates {
        let modules = modules(&folder.join("src"));
        let named = named_modules(&page, &name);
        let missing: Vec<_> = modules.iter().filter(|m| !named.contains_key(*m)).collect();
        assert!(missing.is_empty(), "{name}: not in ARCHITECTURE.md: {missing:?}");
        let unknown: Vec<_> = named.keys().filter(|m| !modules.contains(*m)).collect();
        assert!(unknown.is_empty(), "{name}: does not exist: {unknown:?}");
        let twice: Vec<_> = named.iter().filter(|(_, count)| **count > 1).collect();
        assert!(twice.is_empty(), "{name}: named more than once: {twice:?}");
    }
}

/// Returns the page without its blocks of code, whose fences are backticks, too.
fn prose(page: &str) -> String {
    page.split("\n```").step_by(2).collect()
}

/// Adds the files and folders below a folder, each with the path above it.
fn collect(folder: &Path, above: &str, found: &mut Vec<String>) {
    for (name, path) in entries(folder) {
        let name = format!("{above}/{name}");
        if path.is_dir() {
            collect(&path, &name, found);
        }
        found.push(name);
    }
}

/// Whether a text is the name of a file or a folder, not of a type or of a key in Redis.
fn is_path(text: &str) -> bool {
    let is_name = text.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c));
    let extension = Path::new(text).extension();
    let is_source = extension.is_some_and(|kind| kind == "rs" || kind == "lua");
    is_name && (is_source || text.contains('/')) && !text.starts_with('.')
}

#[test]
fn files_and_folders_that_the_page_names_exist() {
    let mut sources = Vec::new();
    for (_, folder) in entries(&root().join("crates")) {
        collect(&folder.join("src"), "", &mut sources);
        let tests = folder.join("tests");
        if tests.is_dir() {
            collect(&tests, "/tests", &mut sources);
        }
    }
    let page = prose(&page());
    let paths: Vec<&str> = code(&page).filter(|text| is_path(text)).collect();
    assert!(paths.len() > 20, "{paths:?}");
    for path in paths {
        // The end of a path is enough, so that a file may move to another folder or crate.
        let end = format!("/{path}");
        let is_source = sources.iter().any(|source| source.ends_with(&end));
        assert!(is_source || root().join(path).exists(), "{path} does not exist");
    }
}
