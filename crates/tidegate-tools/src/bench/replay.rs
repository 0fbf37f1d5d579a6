//! [`Replay`]: the requests of an access log, at their own or a faster pace.

use std::time::Duration;

use super::web::encode;
use crate::simulate::TrafficRequest as _;
use crate::simulate::log::{LogArgs, LogReader};

/// Log to replay.
#[derive(Debug)]
pub(crate) struct Replay {
    pub logs: LogArgs,
    /// Seconds of the log per second of the load.
    pub speed: f64,
}

/// Requests of an opened log.
pub(super) struct ReplayedRequests {
    reader: LogReader,
    speed: f64,
    first: Option<u64>,
    /// Attributes of the last request.
    pub(super) key: String,
}

impl Replay {
    pub(super) fn open(&self) -> anyhow::Result<ReplayedRequests> {
        let reader = self.logs.open()?;
        Ok(ReplayedRequests { reader, speed: self.speed, first: None, key: String::new() })
    }
}

impl ReplayedRequests {
    /// Moves to the next request, and returns its due time after the start.
    pub(super) fn next(&mut self) -> anyhow::Result<Option<Duration>> {
        let Some(record) = self.reader.advance()? else { return Ok(None) };
        self.key.clear();
        encode(record.attributes(), &mut self.key);
        let time = record.time();
        let first = *self.first.get_or_insert(time);
        let offset = Duration::from_micros(time.saturating_sub(first));
        Ok(Some(offset.div_f64(self.speed)))
    }
}
