//! Access logs as traffic: several files, merged by the times of their lines.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::{Context as _, bail};
use clap::builder::FalseyValueParser;

use self::file::LogFile;
use self::record::Record;

mod combined;
mod csv;
mod file;
mod format;
mod input;
mod json;
mod record;
mod reorder;
mod time;

/// Maximum number of bad lines that are shown.
const MAX_EXAMPLES: usize = 5;

/// Format of the lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum LogFileFormat {
    /// By the first lines of each file
    #[default]
    Auto,
    /// The combined or common format of nginx and Apache
    Combined,
    /// One JSON object per line: Caddy, Traefik, the gateway of Tidegate
    Json,
    /// Comma-separated values; the first line has the names of the columns
    Csv,
}

/// Access logs to read.
#[derive(Debug, clap::Args)]
pub(crate) struct AccessLogs {
    /// Replay access logs; - is the standard input. They may be compressed with gzip or zstd, and
    /// several are merged by time
    #[arg(long = "access-log", value_name = "FILE", env = "TIDEGATE_SIMULATE_ACCESS_LOG")]
    #[arg(id = "access_log", num_args = 1..)]
    files: Vec<PathBuf>,

    /// Format of the access logs
    #[arg(long = "access-log-format", value_name = "FORMAT", default_value = "auto")]
    #[arg(env = "TIDEGATE_SIMULATE_ACCESS_LOG_FORMAT")]
    format: LogFileFormat,

    /// Stop at the first line that is not a request
    #[arg(long, env = "TIDEGATE_STRICT", value_parser = FalseyValueParser::new())]
    strict: bool,
}

/// Counts of the lines.
#[derive(Debug, Default)]
pub(crate) struct LineCounts {
    pub(crate) lines: u64,
    /// Lines that are not a request.
    pub(crate) bad: u64,
    /// First bad lines, with their place and reason.
    pub(crate) examples: Vec<String>,
    /// Lines that were sorted into their place.
    pub(crate) reordered: u64,
    /// Lines that were too late for that, and were decided at the time of the lines around them.
    pub(crate) late: u64,
    /// Columns besides those that every request has. They may be attributes.
    pub(crate) other_columns: Vec<String>,
}

/// Progress through the files.
#[derive(Debug, Clone, Default)]
pub(crate) struct BytesRead {
    /// Bytes that were read, before decompression.
    pub(crate) read: Arc<AtomicU64>,
    /// Size of all files, if it is known.
    pub(crate) total: Option<u64>,
}

/// Opened access logs.
pub(crate) struct LogReader {
    files: Vec<LogFile>,
    pub(crate) bytes: BytesRead,
}

impl AccessLogs {
    /// Opens the files, so that a missing one is reported before anything is decided.
    pub(crate) fn open(&self) -> anyhow::Result<LogReader> {
        let stdin_count = self.files.iter().filter(|file| file.as_os_str() == "-").count();
        anyhow::ensure!(stdin_count <= 1, "--access-log - is given {stdin_count} times");
        let mut bytes = BytesRead { total: Some(0), ..BytesRead::default() };
        let mut files = Vec::with_capacity(self.files.len());
        for path in &self.files {
            let (source, size) = input::open(path, &bytes.read)
                .with_context(|| format!("--access-log {}", path.display()))?;
            bytes.total = bytes.total.zip(size).map(|(total, size)| total + size);
            files.push(LogFile::new(path, source, self));
        }
        Ok(LogReader { files, bytes })
    }
}

impl LogReader {
    /// Calls `on_request` with each request of all files, in the order of their times.
    pub(crate) fn for_each(
        mut self,
        mut on_request: impl FnMut(&Record) -> anyhow::Result<()>,
    ) -> anyhow::Result<LineCounts> {
        let mut heads = BinaryHeap::with_capacity(self.files.len());
        for (index, file) in self.files.iter_mut().enumerate() {
            if let Some(time) = file.advance()? {
                heads.push(Reverse((time, index)));
            }
        }
        let mut requests = 0_u64;
        while let Some(mut head) = heads.peek_mut() {
            let Reverse((_, index)) = *head;
            let file = &mut self.files[index];
            if let Some(request) = file.current() {
                on_request(request)?;
                requests += 1;
            }
            match file.advance()? {
                Some(time) => *head = Reverse((time, index)),
                None => _ = std::collections::binary_heap::PeekMut::pop(head),
            }
        }
        let files = self.files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>().join(", ");
        let counts = self.counts();
        match counts.examples.first() {
            _ if requests > 0 => Ok(counts),
            None => bail!("{files} has no lines"),
            Some(example) => bail!("no line is a request: {example}"),
        }
    }

    fn counts(self) -> LineCounts {
        let mut sum = LineCounts::default();
        for counts in self.files.into_iter().map(LogFile::into_counts) {
            sum.lines += counts.lines;
            sum.bad += counts.bad;
            sum.reordered += counts.reordered;
            sum.late += counts.late;
            sum.examples.extend(counts.examples);
            for column in counts.other_columns {
                if !sum.other_columns.contains(&column) {
                    sum.other_columns.push(column);
                }
            }
        }
        sum.examples.truncate(MAX_EXAMPLES);
        sum
    }
}
