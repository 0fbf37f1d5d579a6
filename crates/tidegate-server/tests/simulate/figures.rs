//! Pictures of the documents: drawn again, they are the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Folder, text};

/// Maximum size of a picture: a clone stays small.
const MAX_BYTES: usize = 24 * 1024;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn is_picture(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "svg")
}

/// Returns the commands of the list, each with the picture that it draws.
fn commands() -> Vec<(Vec<String>, String)> {
    let list = fs::read_to_string(repository().join("docs/figures/figures.txt")).expect("a list");
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    let commands = lines.map(|line| {
        let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        assert_eq!(words.remove(0), "tidegate", "{line}");
        let picture = words.pop().expect("a picture");
        assert!(picture.starts_with("docs/figures/") && is_picture(Path::new(&picture)), "{line}");
        (words, picture)
    });
    commands.collect()
}

/// Compares the pictures with those of this binary. `RENEW=1` replaces them (`make docs-figures`).
#[test]
fn figures_of_the_documents_are_those_of_the_simulation() {
    let is_renewed = std::env::var_os("RENEW").is_some();
    let folder = Folder::new();
    let drawn = folder.path("figure.svg");
    for (arguments, picture) in commands() {
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(&arguments)
            .arg(&drawn)
            .current_dir(repository())
            .env_clear()
            .output()
            .expect("the binary starts");
        assert_eq!(output.status.code(), Some(0), "{picture}: {}", text(&output.stderr));
        let drawn = fs::read(&drawn).expect("a picture");
        assert!(drawn.len() <= MAX_BYTES, "{picture} has {} bytes", drawn.len());
        let path = repository().join(&picture);
        if is_renewed {
            fs::write(&path, &drawn).expect("written");
        }
        let committed = fs::read(&path).unwrap_or_default();
        assert!(drawn == committed, "{picture} is out of date: run `make docs-figures`");
    }
}

/// Every picture is in the list, and in a document.
#[test]
fn no_figure_is_left_over() {
    let docs = repository().join("docs");
    let pages: String = fs::read_dir(&docs)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .map(|path| fs::read_to_string(path).expect("a page"))
        .collect();
    let listed: Vec<String> = commands().into_iter().map(|(_, picture)| picture).collect();
    assert!(!listed.is_empty());
    for entry in fs::read_dir(docs.join("figures")).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("UTF-8");
        if is_picture(&path) {
            assert!(listed.contains(&format!("docs/figures/{name}")), "{name} has no command");
            assert!(pages.contains(&format!("(figures/{name})")), "{name} is in no document");
        }
    }
}
