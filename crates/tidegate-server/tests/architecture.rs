//! ARCHITECTURE.md names every source file, once, and no file that does not exist.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn is_source(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind == "rs" || kind == "lua")
}

/// Returns the Rust and Lua files below a folder, relative to it.
fn source_files(folder: &Path) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(current) = folders.pop() {
        for entry in fs::read_dir(&current).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if is_source(&path) {
                let relative = path.strip_prefix(folder).expect("below the folder");
                files.push(relative.to_str().expect("UTF-8").to_owned());
            }
        }
    }
    files.sort();
    files
}

/// Returns the files in the table below the heading of this crate, with their number of mentions.
fn mentioned_files(page: &str, folder: &str) -> BTreeMap<String, usize> {
    let heading = format!("`{folder}`\n");
    let (_, section) = page.split_once(&heading).expect("a section for the crate");
    let section = section.split("\n## ").next().expect("a section");
    let rows = section.lines().filter(|line| line.starts_with('|'));
    let mut files = BTreeMap::new();
    for code in rows.flat_map(|row| row.split('`').skip(1).step_by(2)) {
        if is_source(Path::new(code)) {
            *files.entry(code.to_owned()).or_default() += 1;
        }
    }
    files
}

#[test]
fn tables_name_every_source_file_once() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the page");
    for folder in ["crates/tidegate/src", "crates/tidegate-server/src"] {
        let files = source_files(&root().join(folder));
        let mentioned = mentioned_files(&page, folder);
        assert!(files.len() > 50, "{folder} has {} files", files.len());
        let missing: Vec<_> = files.iter().filter(|file| !mentioned.contains_key(*file)).collect();
        assert!(missing.is_empty(), "{folder}: not in ARCHITECTURE.md: {missing:?}");
        let unknown: Vec<_> = mentioned.keys().filter(|file| !files.contains(file)).collect();
        assert!(unknown.is_empty(), "{folder}: does not exist: {unknown:?}");
        let twice: Vec<_> = mentioned.iter().filter(|(_, count)| **count > 1).collect();
        assert!(twice.is_empty(), "{folder}: named more than once: {twice:?}");
    }
}
