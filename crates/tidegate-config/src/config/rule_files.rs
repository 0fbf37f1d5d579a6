//! Files of Envoy's rules: single files, folders, and patterns with `*` and `?`.
//!
//! Names that start with a dot are skipped, such as `..data` of a Kubernetes `ConfigMap`.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use crate::warning::ConfigWarning;

/// Maximum number of files, far above the needs of real rules.
const MAX_FILES: usize = 1_000;
/// Maximum number of names in one folder.
const MAX_NAMES: usize = 100_000;

/// Files to load, and what to watch.
#[derive(Debug, Default)]
pub(super) struct RuleFiles {
    pub(super) files: Vec<PathBuf>,
    /// Folders whose names were read: a file that is added to one of them may belong to the rules.
    pub(super) folders: BTreeSet<PathBuf>,
    pub(super) warnings: Vec<ConfigWarning>,
    /// Contents of the files, one after the other.
    pub(super) texts: String,
}

impl RuleFiles {
    /// Adds the files of one entry of `envoy.files`, relative to `base`. The names of a folder and
    /// those that match a pattern are sorted.
    pub(super) fn add(&mut self, base: &Path, entry: &str) -> Result<(), String> {
        if entry.trim().is_empty() {
            let message = "envoy.files: this entry is empty: write a file, a folder (`.` for the \
                           folder of this file), or a pattern";
            return Err(message.to_owned());
        }
        if Path::new(entry).components().any(|part| part.as_os_str() == "**") {
            return Err(format!("{entry:?}: ** is not supported: write one entry for each level"));
        }
        let path = base.join(entry);
        if is_pattern(entry) && !path.exists() {
            self.add_matches(base, entry)
        } else if path.is_dir() {
            self.add_folder(path)
        } else {
            self.add_file(path)
        }
    }

    fn add_folder(&mut self, folder: PathBuf) -> Result<(), String> {
        let mut is_empty = true;
        for name in names_in(&folder)? {
            let file = folder.join(&name);
            let is_yaml =
                matches!(Path::new(&name).extension(), Some(ext) if ext == "yaml" || ext == "yml");
            if is_yaml && is_loadable(&file) {
                self.add_file(file)?;
                is_empty = false;
            } else if file.is_file() {
                self.warnings.push(ConfigWarning {
                    file: file.display().to_string(),
                    line: None,
                    message: "is not loaded: of a folder, only names that end in .yaml or .yml are"
                        .to_owned(),
                });
            }
        }
        if is_empty {
            return Err(format!(
                "{}: this folder has no files that end in .yaml or .yml",
                folder.display()
            ));
        }
        self.watch(folder);
        Ok(())
    }

    /// Adds the files that match a pattern. A folder that matches is not a file.
    fn add_matches(&mut self, base: &Path, pattern: &str) -> Result<(), String> {
        let mut found = vec![base.to_owned()];
        let mut is_behind_pattern = false;
        for part in Path::new(pattern).components() {
            let text = part.as_os_str().to_string_lossy();
            found = match part {
                Component::Normal(_) if is_pattern(&text) => {
                    is_behind_pattern = true;
                    let mut matching = Vec::new();
                    for folder in found.into_iter().filter(|folder| is_folder(folder)) {
                        let names = names_in(&folder)?;
                        let names = names.into_iter().filter(|name| matches(&text, name));
                        matching.extend(names.map(|name| folder.join(name)));
                        self.watch(folder);
                    }
                    matching
                }
                _ => {
                    // A folder that matches may get its file later.
                    let folders =
                        found.iter().filter(|folder| is_behind_pattern && folder.is_dir());
                    folders.for_each(|folder| self.watch(folder.clone()));
                    found.into_iter().map(|folder| folder.join(part)).collect()
                }
            };
        }
        found.retain(|file| file.symlink_metadata().is_ok() && is_loadable(file));
        if found.is_empty() {
            return Err(format!("{}: no file matches this pattern", base.join(pattern).display()));
        }
        found.into_iter().try_for_each(|file| self.add_file(file))
    }

    fn add_file(&mut self, file: PathBuf) -> Result<(), String> {
        if !self.files.contains(&file) {
            self.files.push(file);
        }
        if self.files.len() > MAX_FILES {
            return Err(format!("there are more than {MAX_FILES} files"));
        }
        Ok(())
    }

    fn watch(&mut self, folder: PathBuf) {
        // The path of the current folder is empty if the configuration is named without a folder.
        let is_empty = folder.as_os_str().is_empty();
        self.folders.insert(if is_empty { PathBuf::from(".") } else { folder });
    }
}

fn names_in(folder: &Path) -> Result<Vec<String>, String> {
    names(folder).map_err(|error| format!("{}: cannot be read: {error}", folder.display()))
}

/// Returns the sorted names in a folder, without those that start with a dot.
pub fn names(folder: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    for entry in std::fs::read_dir(folder)? {
        if names.len() == MAX_NAMES {
            return Err(std::io::Error::other(format!("it has more than {MAX_NAMES} names")));
        }
        if let Ok(name) = entry?.file_name().into_string()
            && !name.starts_with('.')
        {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Returns whether a name is that of a file, or of a broken symlink, which is an error later. Reading
/// a pipe would never end.
fn is_loadable(path: &Path) -> bool {
    path.metadata().map_or(true, |metadata| metadata.is_file())
}

fn is_folder(path: &Path) -> bool {
    path.as_os_str().is_empty() || path.is_dir()
}

fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?'])
}

/// Returns whether a name matches a pattern: `*` matches any text, `?` one character.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut at, mut in_name) = (0, 0);
    // Where to go on if the text behind the last star does not match.
    let mut retry = None;
    while in_name < name.len() {
        match pattern.get(at) {
            Some('*') => {
                retry = Some((at + 1, in_name));
                at += 1;
            }
            Some(expected) if *expected == '?' || *expected == name[in_name] => {
                at += 1;
                in_name += 1;
            }
            _ => match retry {
                Some((after_star, start)) => {
                    retry = Some((after_star, start + 1));
                    (at, in_name) = (after_star, start + 1);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|rest| *rest == '*')
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn patterns_match_names() {
        for (pattern, name, expected) in [
            ("*.yaml", "a.yaml", true),
            ("*.yaml", ".yaml", true),
            ("*.yaml", "a.yml", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("?.yaml", "é.yaml", true),
            ("?.yaml", "ab.yaml", false),
            ("*", "", true),
            ("a", "b", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    /// Returns the files of these entries, relative to the folder, or the error.
    fn files(root: &Path, entries: &[&str]) -> Result<Vec<String>, String> {
        let mut found = RuleFiles::default();
        for entry in entries {
            found.add(root, entry)?;
        }
        let relative = |file: &PathBuf| {
            file.strip_prefix(root).map_or(String::new(), |path| path.display().to_string())
        };
        Ok(found.files.iter().map(relative).collect())
    }

    #[test]
    fn files_folders_and_patterns_are_expanded() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let root = root.path();
        for folder in ["limits", "limits/..1", "limits/sub.yaml", "teams/a", "teams/b", "empty"] {
            std::fs::create_dir_all(root.join(folder)).expect("a directory");
        }
        for file in [
            "one.yaml",
            "limits/..1/k.yaml",
            "limits/z.yml",
            "limits/.hidden.yaml",
            "limits/README",
        ] {
            std::fs::write(root.join(file), "").expect("written");
        }
        symlink("..1", root.join("limits/..data")).expect("a symlink");
        symlink("..data/k.yaml", root.join("limits/k.yaml")).expect("a symlink");
        for file in ["teams/a/limits.yaml", "teams/b/limits.yaml", "teams/b/more.yaml"] {
            std::fs::write(root.join(file), "").expect("written");
        }
        let expanded = |entries: &[&str]| files(root, entries);
        assert_eq!(expanded(&["one.yaml"]).expect("a file"), ["one.yaml"]);
        assert_eq!(expanded(&["limits/"]).expect("a folder"), ["limits/k.yaml", "limits/z.yml"]);
        assert_eq!(
            expanded(&["limits", "limits/z.yml", "one.yaml"]).expect("each file once"),
            ["limits/k.yaml", "limits/z.yml", "one.yaml"]
        );
        assert_eq!(
            expanded(&["teams/*/limits.yaml"]).expect("a pattern"),
            ["teams/a/limits.yaml", "teams/b/limits.yaml"]
        );
        assert_eq!(expanded(&["teams/?/m*.yaml"]).expect("a pattern"), ["teams/b/more.yaml"]);
        assert_eq!(expanded(&["missing.yaml"]).expect("its error comes later"), ["missing.yaml"]);
        for (entry, error) in [
            ("empty", "this folder has no files that end in .yaml or .yml"),
            ("empty/*.yaml", "no file matches this pattern"),
            ("nowhere/*.yaml", "no file matches this pattern"),
            ("**/*.yaml", "** is not supported"),
        ] {
            let message = expanded(&[entry]).expect_err("an error");
            assert!(message.contains(error), "{entry}: {message}");
        }
        let mut found = RuleFiles::default();
        found.add(root, "teams/*/more.yaml").expect("a pattern");
        assert_eq!(
            found.folders,
            ["teams", "teams/a", "teams/b"].map(|folder| root.join(folder)).into(),
            "a file that is added to teams/a would match"
        );
        let mut found = RuleFiles::default();
        found.add(root, "limits").expect("a folder");
        let warned: Vec<String> = found.warnings.iter().map(ToString::to_string).collect();
        assert!(
            warned.len() == 1 && warned[0].contains("limits/README: is not loaded"),
            "{warned:?}"
        );
    }
}
