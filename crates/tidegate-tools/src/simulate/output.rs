//! [`OutputFile`]: a file that appears only when it is complete.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// File in progress. It is written beside its place, and moved there by [`commit`](Self::commit).
pub struct OutputFile {
    writer: BufWriter<File>,
    /// Place to move it to; `None` for a device or pipe, which is written directly.
    target: Option<PathBuf>,
    temporary: PathBuf,
    flag: &'static str,
}

impl OutputFile {
    /// Creates the file of a flag, if it is given, so that a wrong path is an error before the work
    /// starts.
    pub fn create(flag: &'static str, path: Option<&PathBuf>) -> anyhow::Result<Option<Self>> {
        path.map(|path| Self::new(flag, path)).transpose()
    }

    fn new(flag: &'static str, path: &Path) -> anyhow::Result<Self> {
        let context = || format!("{flag} {}: cannot be written", path.display());
        let is_special = fs::metadata(path).is_ok_and(|file| !file.is_file() && !file.is_dir());
        if is_special {
            let file = OpenOptions::new().write(true).open(path).with_context(context)?;
            let writer = BufWriter::new(file);
            return Ok(Self { writer, target: None, temporary: PathBuf::new(), flag });
        }
        anyhow::ensure!(!path.is_dir(), "{flag} {}: is a folder", path.display());
        // A link keeps pointing to the file.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let name = target.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = name.with_context(|| format!("{flag} {}: has no file name", path.display()))?;
        let temporary = target.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary);
        let writer = BufWriter::new(file.with_context(context)?);
        Ok(Self { writer, target: Some(target), temporary, flag })
    }

    /// Completes the file with this content.
    pub fn complete(mut self, content: &[u8]) -> anyhow::Result<()> {
        let written = self.writer.write_all(content).and_then(|()| self.writer.flush());
        written.context(self.flag)?;
        match self.target.take() {
            Some(target) => fs::rename(&self.temporary, target).context(self.flag),
            None => Ok(()),
        }
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl Drop for OutputFile {
    /// Removes a file that was not completed.
    fn drop(&mut self) {
        if self.target.is_some() {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_appears_when_it_is_complete_and_not_before() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.svg");
        fs::write(&path, "before").expect("written");
        let create = || OutputFile::new("--svg", &path).expect("created");
        let content = || fs::read_to_string(&path).expect("a file");
        let mut abandoned = create();
        abandoned.write_all(b"half").expect("written");
        drop(abandoned);
        assert_eq!(content(), "before");
        let mut complete = create();
        complete.write_all(b"whole").expect("written");
        assert_eq!(content(), "before");
        complete.complete(b"").expect("moved");
        assert_eq!(content(), "whole");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing is left");
    }
}
