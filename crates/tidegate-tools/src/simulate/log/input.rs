//! Bytes of a log file: opened, decompressed and split into lines.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Size of a read.
const BLOCK_BYTES: usize = 256 * 1024;
/// Maximum length of a line. Longer ones are bad lines.
pub(super) const MAX_LINE_BYTES: usize = 64 * 1024;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

const BZIP2_MAGIC: [u8; 3] = *b"BZh";
const XZ_MAGIC: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];
/// First bytes of a text in UTF-16, as PowerShell writes it, little and big endian.
const UTF16_MARKS: [[u8; 2]; 2] = [[0xff, 0xfe], [0xfe, 0xff]];

pub(super) type LogSource = Box<dyn Read + Send>;

/// Returns the files that a path names: itself, those of a folder, or those of a pattern.
pub(super) fn expand(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let text = path.to_str().unwrap_or_default();
    let pattern = if path.is_dir() {
        format!("{}/**/*", glob::Pattern::escape(text))
    } else if text.contains(['*', '?', '[']) && !path.exists() {
        text.to_owned()
    } else {
        return Ok(vec![path.to_owned()]);
    };
    let is_shown = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        path.is_file() && !name.is_some_and(|name| name.starts_with('.'))
    };
    let files = glob::glob(&pattern)?.filter_map(Result::ok).filter(is_shown);
    let files: Vec<PathBuf> = files.collect();
    anyhow::ensure!(!files.is_empty(), "no file has such a name");
    Ok(files)
}

/// Opens a file, or the standard input for `-`, and returns its bytes, decompressed. The bytes that
/// are read are added to `read`.
pub(super) fn open(path: &Path, read: &Arc<AtomicU64>) -> io::Result<LogSource> {
    let is_stdin = path.as_os_str() == "-";
    let source: LogSource =
        if is_stdin { Box::new(io::stdin()) } else { Box::new(File::open(path)?) };
    decompressed(CountingReader { source, read: Arc::clone(read) })
}

/// Recognizes the compression by the first bytes.
fn decompressed(mut source: impl Read + Send + 'static) -> io::Result<LogSource> {
    let mut start = Vec::with_capacity(XZ_MAGIC.len());
    (&mut source).take(XZ_MAGIC.len() as u64).read_to_end(&mut start)?;
    let has = |magic: &[u8]| start.starts_with(magic);
    let (gzip, zstd, bzip2, xz) =
        (has(&GZIP_MAGIC), has(&ZSTD_MAGIC), has(&BZIP2_MAGIC), has(&XZ_MAGIC));
    let utf16 = UTF16_MARKS.iter().position(|mark| has(mark));
    let source = BufReader::with_capacity(BLOCK_BYTES, io::Cursor::new(start).chain(source));
    Ok(if gzip {
        Box::new(MultiGzDecoder::new(source))
    } else if zstd {
        Box::new(ZstdReader { source, decoder: FrameDecoder::new(), is_in_frame: false })
    } else if bzip2 {
        Box::new(MultiBzDecoder::new(source))
    } else if xz {
        Box::new(XzReader::new(source, true))
    } else if let Some(endian) = utf16 {
        Box::new(Utf16Reader { source, is_big_endian: endian == 1, text: Vec::new() })
    } else {
        Box::new(source)
    })
}

/// Reader that converts UTF-16 to UTF-8.
struct Utf16Reader<R> {
    source: R,
    is_big_endian: bool,
    /// Converted bytes that are not read yet.
    text: Vec<u8>,
}

impl<R: Read> Read for Utf16Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.text.is_empty() {
            let mut units = Vec::with_capacity(4_096);
            let mut pair = [0; 2];
            // A pair of surrogates is not split.
            while units.len() < 4_096
                || units.last().is_some_and(|it| (0xd800..0xdc00).contains(it))
            {
                if self.source.read(&mut pair[..1])? == 0 {
                    break;
                }
                self.source.read_exact(&mut pair[1..])?;
                let endian =
                    if self.is_big_endian { u16::from_be_bytes } else { u16::from_le_bytes };
                units.push(endian(pair));
            }
            self.text = String::from_utf16_lossy(&units).into_bytes();
        }
        let length = self.text.len().min(buffer.len());
        buffer[..length].copy_from_slice(&self.text[..length]);
        self.text.drain(..length);
        Ok(length)
    }
}

struct CountingReader<R> {
    source: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.source.read(buffer)?;
        self.read.fetch_add(length as u64, Ordering::Relaxed);
        Ok(length)
    }
}

/// Reader of all frames of a zstd file.
struct ZstdReader<R> {
    source: R,
    decoder: FrameDecoder,
    is_in_frame: bool,
}

impl<R: BufRead> Read for ZstdReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.is_in_frame {
                if self.source.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                self.start_frame()?;
                continue;
            }
            let length = self.decoder.read(buffer)?;
            if length > 0 {
                return Ok(length);
            }
            if self.decoder.is_finished() {
                self.is_in_frame = false;
                continue;
            }
            let strategy = BlockDecodingStrategy::UptoBytes(BLOCK_BYTES);
            let decoded = self.decoder.decode_blocks(&mut self.source, strategy);
            decoded.map_err(io::Error::other)?;
        }
    }
}

impl<R: Read> ZstdReader<R> {
    /// Starts the next frame, or skips one without content.
    fn start_frame(&mut self) -> io::Result<()> {
        match self.decoder.init(&mut self.source) {
            Ok(()) => {
                self.is_in_frame = true;
                Ok(())
            }
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                let length = u64::from(length);
                let skipped = io::copy(&mut (&mut self.source).take(length), &mut io::sink())?;
                if skipped < length { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
            }
            Err(error) => Err(io::Error::other(error)),
        }
    }
}

/// Splits bytes into lines, without an allocation per line.
pub(super) struct LineReader<R> {
    source: BufReader<R>,
    line: Vec<u8>,
}

impl<R: Read> LineReader<R> {
    pub(super) fn new(source: R) -> Self {
        Self { source: BufReader::with_capacity(BLOCK_BYTES, source), line: Vec::new() }
    }

    /// Returns the next line, without its line break. Of one that is too long, it returns the
    /// start, which is longer than [`MAX_LINE_BYTES`], too.
    pub(super) fn next(&mut self) -> io::Result<Option<&[u8]>> {
        self.line.clear();
        let mut limited = (&mut self.source).take(MAX_LINE_BYTES as u64 + 1);
        limited.read_until(b'\n', &mut self.line)?;
        let line = match self.line.strip_suffix(b"\n") {
            None if self.line.is_empty() => return Ok(None),
            None if self.line.len() > MAX_LINE_BYTES => {
                self.source.skip_until(b'\n')?;
                return Ok(Some(&self.line));
            }
            line => line.unwrap_or(&self.line),
        };
        Ok(Some(line.strip_suffix(b"\r").unwrap_or(line)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(bytes: &[u8]) -> Vec<Option<String>> {
        let mut reader = LineReader::new(bytes);
        let mut lines = Vec::new();
        while let Some(line) = reader.next().expect("a slice") {
            let is_whole = line.len() <= MAX_LINE_BYTES;
            lines.push(is_whole.then(|| String::from_utf8_lossy(line).into_owned()));
        }
        lines
    }

    #[test]
    fn lines_end_with_either_line_break_or_the_file() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(lines(b"a\r\n\nb"), [some("a"), some(""), some("b")]);
        assert_eq!(lines(b"a\n"), [some("a")]);
        assert_eq!(lines(b""), []);
    }

    #[test]
    fn gigantic_line_takes_no_memory_and_hides_no_other() {
        for length in [MAX_LINE_BYTES, MAX_LINE_BYTES + 1, 3 * BLOCK_BYTES, 10 * BLOCK_BYTES + 7] {
            let mut bytes = b"a\n".to_vec();
            bytes.resize(length + 2, b'x');
            bytes.extend_from_slice(b"\nb\n");
            let found = lines(&bytes);
            assert_eq!(found.len(), 3, "{length}");
            assert_eq!(found[1].is_some(), length == MAX_LINE_BYTES, "{length}");
            assert_eq!((found[0].as_deref(), found[2].as_deref()), (Some("a"), Some("b")));
        }
    }
}
