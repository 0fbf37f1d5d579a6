//! Which folders a change of a file can be seen in, if there are links on the way to it.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Links that lead in a circle lead nowhere.
const MAX_LINKS: usize = 40;

/// The folder of the file and of each link on the way to it.
pub(super) fn folders(file: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut next = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    for _ in 0..MAX_LINKS {
        let (folder, there) = first_link(&next);
        found.insert(folder);
        match there {
            Some(there) => next = there,
            None => break,
        }
    }
    found
}

/// The folder of the first link on a path, and the path with that link followed; without any, the
/// folder of the file.
fn first_link(path: &Path) -> (PathBuf, Option<PathBuf>) {
    let mut folder = PathBuf::new();
    let mut parts = path.components();
    while let Some(part) = parts.next() {
        if part == Component::ParentDir {
            // What stands before it is no link: those are followed first.
            folder.pop();
            continue;
        }
        let here = folder.join(part);
        if let Ok(target) = std::fs::read_link(&here) {
            let there = folder.join(target).join(parts.as_path());
            // By its parts, because a join with nothing leaves a slash at the end.
            return (folder, Some(there.components().collect()));
        }
        folder = here;
    }
    folder.pop();
    (folder, None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn every_folder_on_the_way_to_a_file_is_found() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let root = root.path().canonicalize().expect("it is there");
        let place = |name: &str| root.join(name);
        for folder in ["etc", "etc/..1", "real", "real/deep"] {
            std::fs::create_dir(place(folder)).expect("a folder");
        }
        std::fs::write(place("real/plain.yaml"), "").expect("written");
        symlink("..1", place("etc/..data")).expect("a link");
        symlink("..data/t.yaml", place("etc/t.yaml")).expect("a link");
        symlink("../../real/plain.yaml", place("etc/..1/t.yaml")).expect("a link");
        symlink("circle", place("circle")).expect("a link");
        let found = |name: &str| {
            let under_root =
                |folder: PathBuf| Some(folder.strip_prefix(&root).ok()?.display().to_string());
            folders(&place(name)).into_iter().filter_map(under_root).collect::<Vec<_>>()
        };
        assert_eq!(found("real/plain.yaml"), ["real"]);
        assert_eq!(found("real/nowhere.yaml"), ["real"]);
        assert_eq!(found("real/deep/../plain.yaml"), ["real"]);
        assert_eq!(found("etc/t.yaml"), ["etc", "etc/..1", "real"]);
        assert_eq!(found("circle"), [""]);
        assert!(!folders(Path::new("relative.yaml")).is_empty());
    }
}
