//! Commands between `MULTI` and `EXEC`. They are kept as they were received, and `EXEC` runs them
//! as a pipeline: each decides on its own, and those of other clients may come in between.

use std::sync::Arc;

use axum::body::Bytes;

use super::frame::Arguments;
use super::reply::{RespVersion, Writer};
use tidegate_net::listener::{BufferBudget, BufferShare};

/// Maximum length of the commands of a transaction, with their framing: some 2,500 decisions.
const MAX_QUEUED_BYTES: usize = 128 * 1024;

/// Commands that wait for `EXEC`.
#[derive(Debug)]
pub(super) struct Transaction {
    commands: Vec<u8>,
    share: BufferShare,
    count: usize,
    is_aborted: bool,
}

/// Commands of an `EXEC` that are still to be run.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) commands: Bytes,
    #[expect(dead_code, reason = "held")]
    share: BufferShare,
}

impl Transaction {
    pub(super) fn new(budget: &Arc<BufferBudget>) -> Self {
        let share = BufferShare::new(budget);
        Self { commands: Vec::new(), share, count: 0, is_aborted: false }
    }

    /// Adds a command. One that is too long aborts the transaction.
    pub(super) fn push(&mut self, arguments: Arguments<'_, '_>) -> Result<(), String> {
        if self.is_aborted {
            return Ok(());
        }
        let mut writer = Writer { bytes: &mut self.commands, protocol: RespVersion::Resp2 };
        writer.array(arguments.len());
        arguments.from(0).for_each(|argument| writer.bulk(argument));
        self.count += 1;
        if self.commands.len() > MAX_QUEUED_BYTES {
            return Err(format!(
                "ERR the transaction has more than {MAX_QUEUED_BYTES} bytes: send several, or a \
                 pipeline without MULTI"
            ));
        }
        if !self.share.resize(self.commands.capacity()) {
            return Err(
                "ERR the buffers of all connections are full: send a shorter transaction, \
                        or try again later"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// Forgets all commands: `EXEC` will fail.
    pub(super) fn abort(&mut self) {
        self.commands = Vec::new();
        self.share.release();
        self.is_aborted = true;
    }

    /// Returns the number of the commands, and the commands.
    pub(super) fn finish(self) -> Result<(usize, Queued), String> {
        if self.is_aborted {
            let error = "EXECABORT Transaction discarded because of previous errors.";
            return Err(error.to_owned());
        }
        Ok((self.count, Queued { commands: self.commands.into(), share: self.share }))
    }
}
