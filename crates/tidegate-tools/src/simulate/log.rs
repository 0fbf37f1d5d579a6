//! Access logs as traffic: several files, merged by the times of their lines.
//!
//! A format is a list of fields. It is described by directives of nginx or Apache, by the names of
//! columns, or by those of JSON members; [`detect`] recognizes it, and [`line`] makes a [`Record`]
//! of the parts that it finds in a line.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::builder::FalseyValueParser;
use tidegate_api::duration;
use tidegate_config::duration::parse as parse_duration;

use self::detect::Detector;
use self::file::{FileOptions, LogFile};
use self::filter::RequestFilter;
pub use self::record::Record;
use super::address;
use crate::tool::progress::ProgressBar;
use crate::tool::style;
use crate::tool::text::float;

mod columns;
mod detect;
mod field;
mod file;
mod filter;
mod format;
mod guess;
mod input;
mod line;
mod members;
mod record;
mod reorder;
mod scan;
mod time;

/// Maximum number of bad lines that are shown.
const MAX_EXAMPLES: usize = 5;

/// Help of `--log-format`.
const FORMAT_HELP: &str = "\
    Format of the lines: directives of nginx ('$remote_addr - [$time_local] …'), Apache ('%h %l \
    %u %t …') or Envoy, or a name: combined, vhost_combined, json, csv, logfmt, caddy, traefik, \
    envoy, haproxy, alb, cloudfront, s3, cloudflare, iis, docker, cri … [default: by the first \
    lines]";

/// Access logs to read.
#[derive(Debug, Default, clap::Args)]
pub struct LogArgs {
    /// Read access logs: files, folders, patterns such as 'access.log*', or - for the standard
    /// input. They may be compressed with gzip, zstd, bzip2 or xz; several are merged by time
    #[arg(long = "access-log", value_name = "FILE", env = "TIDEGATE_SIMULATE_ACCESS_LOG")]
    #[arg(id = "access_log", num_args = 1..)]
    files: Vec<PathBuf>,

    #[arg(long, help = FORMAT_HELP, value_name = "FORMAT", env = "TIDEGATE_SIMULATE_LOG_FORMAT")]
    #[arg(default_value = "auto", hide_default_value = true)]
    log_format: String,

    /// Member of JSON, or column, of an attribute, of the time or of the target
    #[arg(long = "field", value_name = "time=.PATH", value_parser = field)]
    fields: Vec<(String, String)>,

    /// Leave out requests before this time, such as 2026-11-16T07:00:00Z
    #[arg(long, value_name = "TIME", env = "TIDEGATE_FROM")]
    from: Option<String>,

    /// Leave out requests at this time and later
    #[arg(long, value_name = "TIME", env = "TIDEGATE_UNTIL")]
    until: Option<String>,

    /// Leave out other requests: status=401, path=/api/*, header.user-agent!=kube-probe*
    #[arg(long = "where", value_name = "NAME=VALUE")]
    conditions: Vec<String>,

    /// Time by which lines of a pipe may be late; files are sorted wholly
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_SORT_WINDOW")]
    #[arg(default_value = "5s", value_parser = parse_duration)]
    sort_window: Duration,

    /// Go on if more than 1 % of the lines of a pipe are later than that
    #[arg(long, env = "TIDEGATE_ALLOW_LATE", value_parser = FalseyValueParser::new())]
    allow_late: bool,

    /// Stop at the first line that is not a request
    #[arg(long, env = "TIDEGATE_STRICT", value_parser = FalseyValueParser::new())]
    strict: bool,
}

/// Parses `NAME=.PATH`.
fn field(text: &str) -> Result<(String, String), String> {
    let (name, path) = text.split_once('=').ok_or("write it like time=.start_time")?;
    Ok((name.to_owned(), path.to_owned()))
}

/// Counts of the lines.
#[derive(Debug, Default)]
pub struct LineCounts {
    pub lines: u64,
    /// Lines that are not a request.
    pub bad: u64,
    /// First bad lines, with their place and reason.
    pub examples: Vec<String>,
    /// Lines of what was not HTTP, such as TLS sent to a plain port.
    pub not_http: u64,
    /// Requests that the conditions leave out.
    pub left_out: u64,
    /// Lines that were sorted into their place.
    pub reordered: u64,
    /// Lines that were too late for that, and were decided at the time of the lines around them.
    pub late: u64,
    /// Columns besides those that every request has. They may be attributes.
    pub other_columns: Vec<String>,
}

/// Progress through the files: regular ones are read twice.
pub(super) struct LogProgress {
    bar: ProgressBar,
    /// Bytes that were read, before decompression.
    read: Arc<AtomicU64>,
    /// Bytes that will be read, if that is known.
    total: Option<u64>,
}

impl LogProgress {
    fn count(&mut self, requests: u64) {
        self.bar.count(requests, || {
            Some(float(self.read.load(Ordering::Relaxed)) / float(self.total?.max(1)))
        });
    }
}

/// Opened access logs: an iterator of their requests in the order of their times.
pub struct LogReader {
    files: Vec<LogFile>,
    /// Times of the next requests, and the indexes of their files.
    heads: BinaryHeap<Reverse<(u64, usize)>>,
    current: Option<usize>,
    filter: RequestFilter,
    allow_late: bool,
    requests: u64,
    left_out: u64,
    progress: LogProgress,
}

impl LogArgs {
    /// Returns whether there is a file.
    pub fn is_given(&self) -> bool {
        !self.files.is_empty()
    }

    /// Opens the files, so that a missing one is reported before anything is decided. Regular files
    /// are read once to learn their formats and the order of their lines.
    pub fn open(&self) -> anyhow::Result<LogReader> {
        let stdin_count = self.files.iter().filter(|file| file.as_os_str() == "-").count();
        ensure!(stdin_count <= 1, "--access-log - is given {stdin_count} times");
        let options = Arc::new(FileOptions {
            detector: Detector::new(&self.log_format, &self.fields)?,
            strict: self.strict,
            window: duration::micros(self.sort_window),
        });
        let filter =
            RequestFilter::new(self.from.as_deref(), self.until.as_deref(), &self.conditions)?;
        let context = |path: &Path| format!("--access-log {}", path.display());
        let (mut paths, mut seen) = (Vec::new(), HashSet::new());
        for argument in &self.files {
            let expanded = input::expand(argument).with_context(|| context(argument))?;
            let is_named = expanded.len() == 1;
            for path in expanded {
                if path.is_file() && !path.canonicalize().is_ok_and(|real| seen.insert(real)) {
                    let name = path.display();
                    style::print_warning(format_args!("{name} is given twice: it is read once"));
                } else {
                    paths.push((path, is_named));
                }
            }
        }
        let size = |(path, _): &(PathBuf, bool)| {
            path.metadata().ok().filter(Metadata::is_file).map(|file| 2 * file.len())
        };
        let total = paths.iter().map(size).sum();
        let mut progress = LogProgress { bar: ProgressBar::start(), read: Arc::default(), total };
        let mut files: Vec<LogFile> = Vec::with_capacity(paths.len());
        let mut surveys = HashMap::new();
        for (path, is_named) in paths {
            let (file, survey) = match LogFile::open(&path, files.len(), &options, &mut progress) {
                Ok(opened) => opened,
                // Folders have other files, too.
                Err(error) if !is_named && error.downcast_ref::<std::io::Error>().is_none() => {
                    style::print_warning(format_args!("{error:#}: it is left out"));
                    continue;
                }
                Err(error) => return Err(error).with_context(|| context(&path)),
            };
            let name = &file.name;
            if let Some(other) = survey.and_then(|survey| surveys.insert(survey, name.clone())) {
                style::print_warning(format_args!("{name} has the same lines as {other}"));
            }
            files.push(file);
        }
        let columns = files.iter().flat_map(LogFile::other_columns);
        let given = self.fields.iter().map(|(name, _)| name.as_str());
        filter.check(&columns.chain(given).collect::<Vec<_>>())?;
        let mut reader = LogReader {
            files,
            heads: BinaryHeap::new(),
            current: None,
            filter,
            allow_late: self.allow_late,
            requests: 0,
            left_out: 0,
            progress,
        };
        for index in 0..reader.files.len() {
            reader.advance_file(index)?;
        }
        Ok(reader)
    }
}

impl LogReader {
    /// Moves to the next request of all files.
    pub fn advance(&mut self) -> anyhow::Result<Option<&Record>> {
        loop {
            if let Some(index) = self.current.take() {
                self.advance_file(index)?;
            }
            let Some(Reverse((_, index))) = self.heads.pop() else { return Ok(None) };
            self.current = Some(index);
            if self.files[index].current().is_some_and(|request| self.filter.accepts(request)) {
                break;
            }
            self.left_out += 1;
        }
        self.requests += 1;
        Ok(self.current.and_then(|index| self.files[index].current()))
    }

    fn advance_file(&mut self, index: usize) -> anyhow::Result<()> {
        if let Some(time) = self.files[index].advance()? {
            self.heads.push(Reverse((time, index)));
        }
        Ok(())
    }

    /// Returns the name of a file by the index of its records.
    pub fn file_name(&self, index: usize) -> &str {
        self.files.get(index).map_or("", |file| &file.name)
    }

    /// Calls `on_request` with each request.
    pub fn for_each(
        mut self,
        mut on_request: impl FnMut(&Record) -> anyhow::Result<()>,
    ) -> anyhow::Result<LineCounts> {
        while let Some(request) = self.advance()? {
            on_request(request)?;
            self.progress.count(1);
        }
        self.finish()
    }

    /// Returns the counts of all lines, or an error if there was no request, or too many came late.
    pub fn finish(self) -> anyhow::Result<LineCounts> {
        let names: Vec<&str> = self.files.iter().map(|file| file.name.as_str()).collect();
        let names = names.join(", ");
        let mut counts = LineCounts { left_out: self.left_out, ..LineCounts::default() };
        for file in self.files {
            counts.add(file.into_counts());
        }
        let LineCounts { lines, late, .. } = counts;
        ensure!(
            self.allow_late || late * 100 <= lines,
            "{late} of {lines} lines came too late to be sorted into their place: name the files \
             instead of a pipe, set --sort-window, or go on with --allow-late"
        );
        match counts.examples.first() {
            _ if self.requests > 0 => Ok(counts),
            _ if self.left_out > 0 => bail!("--from, --until and --where leave out all requests"),
            Some(example) => bail!("no line is a request: {example}"),
            None if counts.not_http > 0 => bail!("no line of {names} is HTTP"),
            None => bail!("{names} has no lines"),
        }
    }
}

impl LineCounts {
    fn add(&mut self, counts: Self) {
        self.lines += counts.lines;
        self.bad += counts.bad;
        self.not_http += counts.not_http;
        self.reordered += counts.reordered;
        self.late += counts.late;
        self.examples.extend(counts.examples);
        self.examples.truncate(MAX_EXAMPLES);
        for column in counts.other_columns {
            if !self.other_columns.contains(&column) {
                self.other_columns.push(column);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_has_both_readings_of_a_file() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("access.log");
        let line = "203.0.113.9 - - [16/Nov/2026:07:44:08 +0000] \"GET / HTTP/1.1\" 200 5\n";
        std::fs::write(&file, line.repeat(9_000)).expect("written");
        let log_format = "auto".to_owned();
        let logs = LogArgs { files: vec![file], log_format, ..LogArgs::default() };
        let mut reader = logs.open().expect("a log");
        let read = |reader: &LogReader| reader.progress.read.load(Ordering::Relaxed);
        let surveyed = read(&reader);
        assert!(surveyed >= 9_000 * line.len() as u64, "{surveyed}");
        while reader.advance().expect("a line").is_some() {}
        assert_eq!(Some(read(&reader)), reader.progress.total);
        assert!(surveyed < read(&reader), "the requests are the second half");
    }
}
