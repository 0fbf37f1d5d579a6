//! Directories to watch for changes of a file, including those of symlinks on its path.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Maximum number of symlinks to follow; more are treated as a cycle.
const MAX_LINKS: usize = 40;

/// Returns the directories of the file and of each symlink on the way to it.
pub(super) fn folders(file: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut path = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    for _ in 0..MAX_LINKS {
        let (folder, resolved) = first_link(&path);
        found.insert(folder);
        match resolved {
            Some(resolved) => path = resolved,
            None => break,
        }
    }
    found
}

/// Returns the directory of the first symlink on a path, and the path with that link resolved.
/// Without a symlink, returns the directory of the file.
fn first_link(path: &Path) -> (PathBuf, Option<PathBuf>) {
    let mut folder = PathBuf::new();
    let mut parts = path.components();
    while let Some(part) = parts.next() {
        if part == Component::ParentDir {
            // `folder` contains no symlink, because those are resolved first.
            folder.pop();
            continue;
        }
        let prefix = folder.join(part);
        if let Ok(target) = std::fs::read_link(&prefix) {
            let resolved = folder.join(target).join(parts.as_path());
            // Collecting the components removes the trailing slash of a join with an empty path.
            return (folder, Some(resolved.components().collect()));
        }
        folder = prefix;
    }
    folder.pop();
    (folder, None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn finds_the_directory_of_every_symlink_on_the_path() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let root = root.path().canonicalize().expect("the directory exists");
        for folder in ["etc", "etc/..1", "real", "real/deep"] {
            std::fs::create_dir(root.join(folder)).expect("a directory");
        }
        std::fs::write(root.join("real/plain.yaml"), "").expect("a written file");
        symlink("..1", root.join("etc/..data")).expect("a symlink");
        symlink("..data/t.yaml", root.join("etc/t.yaml")).expect("a symlink");
        symlink("../../real/plain.yaml", root.join("etc/..1/t.yaml")).expect("a symlink");
        symlink("circle", root.join("circle")).expect("a symlink");
        let found = |name: &str| {
            let under_root =
                |folder: PathBuf| Some(folder.strip_prefix(&root).ok()?.display().to_string());
            folders(&root.join(name)).into_iter().filter_map(under_root).collect::<Vec<_>>()
        };
        assert_eq!(found("real/plain.yaml"), ["real"]);
        assert_eq!(found("real/nowhere.yaml"), ["real"]);
        assert_eq!(found("real/deep/../plain.yaml"), ["real"]);
        assert_eq!(found("etc/t.yaml"), ["etc", "etc/..1", "real"]);
        assert_eq!(found("circle"), [""]);
        assert!(!folders(Path::new("relative.yaml")).is_empty());
    }
}
