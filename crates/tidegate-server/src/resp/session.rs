//! Session of one connection: the commands that have arrived, in order.

use std::collections::HashMap;
use std::hash::RandomState;
use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesOrdered;
use tidegate::Action;

use super::client::Client;
use super::decide::{decide, decide_at_once};
use super::frame::{Parsed, Parser};
use super::reply::Reply;
use super::request::Request;
use crate::listener::{BufferBudget, Input, Peer, Session, Step, Turn};
use crate::state::{ActiveConfig, ServerState};

/// Maximum number of commands that are decided together.
const MAX_GROUP: usize = 1_024;
/// Length of the replies from which on they are sent first.
const MAX_REPLY_BYTES: usize = 64 * 1024;
/// Length of the input that is checked for UTF-8 at once: about the commands of a turn.
const MAX_TEXT_BYTES: usize = 8 * 1024;

/// Session of one client.
pub(super) struct RespSession {
    parser: Parser,
    client: Client,
}

impl RespSession {
    pub(super) fn new(
        state: Arc<ServerState>,
        budget: &Arc<BufferBudget>,
        peer: Peer,
        is_remote: bool,
    ) -> Self {
        state.metrics.resp.open();
        let client = Client::new(state, budget, peer, is_remote);
        let limits = client.limits(&client.state.active_guard());
        Self { parser: Parser::new(limits), client }
    }
}

#[cfg(test)]
impl RespSession {
    pub(super) fn metrics(&self) -> &super::RespCounters {
        &self.client.state.metrics.resp
    }

    pub(super) fn auth_failures(&self) -> &crate::auth::AuthFailures {
        &self.client.state.metrics.auth_failures
    }
}

impl Drop for RespSession {
    fn drop(&mut self) {
        self.client.state.metrics.resp.close();
    }
}

impl Session for RespSession {
    const BUFFERS_FULL: &'static [u8] = b"-ERR the buffers of all connections are full: send \
        shorter commands, or try again later\r\n";

    fn max_input(&self) -> usize {
        self.parser.limits.max_input()
    }

    async fn handle(&mut self, input: &mut Input, replies: &mut Vec<u8>, turn: &mut Turn) -> Step {
        // A reload in the middle of a pipeline takes effect after it.
        let active = self.client.state.active_guard();
        self.parser.limits = self.client.limits(&active);
        // The commands of an `EXEC` come before the rest of the input.
        let executing = self.client.executing.take();
        let commands = executing.as_ref().map_or(input.bytes(), |queued| &queued.commands);
        let (handled, step) = if self.client.state.backend.redis().is_none() {
            self.handle_in_order(&active, commands, replies, turn)
        } else {
            Box::pin(self.handle_jointly(&active, commands, replies, turn)).await
        };
        self.parser.shrink();
        let Some(mut queued) = executing else {
            input.consume(handled);
            return step;
        };
        queued.commands = queued.commands.slice(handled..);
        self.client.executing = (!queued.commands.is_empty()).then_some(queued);
        if matches!(step, Step::Yield | Step::Close) { step } else { Step::Flush }
    }
}

impl RespSession {
    /// Decides one command after the other: memory answers at once. Returns the number of bytes
    /// that were handled.
    fn handle_in_order(
        &mut self,
        active: &ActiveConfig,
        input: &[u8],
        replies: &mut Vec<u8>,
        turn: &mut Turn,
    ) -> (usize, Step) {
        let Self { parser, client } = self;
        let mut handled = 0;
        let mut text = None;
        loop {
            if replies.len() >= MAX_REPLY_BYTES {
                return (handled, Step::Flush);
            }
            let rest = &input[handled..];
            let (length, is_inline) = match parser.parse(rest) {
                Ok(Parsed::Incomplete) => return (handled, Step::Read),
                Ok(Parsed::Command { length, is_inline }) => (length, is_inline),
                Err(error) => return (handled, client.reject(&error, replies)),
            };
            if !turn.takes_command() {
                return (handled, Step::Yield);
            }
            // Checked once for all commands, not for a part of one that is still arriving.
            let text = *text.get_or_insert_with(|| text_at_start(input));
            let arguments = match text.get(handled..handled + length) {
                _ if is_inline => parser.inline_arguments(),
                Some(text) => parser.text_arguments(text),
                None => parser.arguments(rest),
            };
            handled += length;
            match client.request(active, arguments) {
                Some(Ok(request)) => client.write(&decide_at_once(active, &request), replies),
                Some(Err(error)) => client.write(&Reply::Error(error), replies),
                None => {
                    let step = client.handle(active, arguments, replies);
                    parser.limits = client.limits(active);
                    if step != Step::Read {
                        return (handled, step);
                    }
                }
            }
        }
    }

    /// Decides all commands together, so that they share calls to Redis.
    async fn handle_jointly(
        &mut self,
        active: &ActiveConfig,
        input: &[u8],
        replies: &mut Vec<u8>,
        turn: &mut Turn,
    ) -> (usize, Step) {
        let Self { parser, client } = self;
        let mut group = Group::new();
        let mut handled = 0;
        let mut step = Step::Flush;
        for _ in 0..MAX_GROUP {
            if replies.len() >= MAX_REPLY_BYTES {
                break;
            }
            let rest = &input[handled..];
            let (length, is_inline) = match parser.parse(rest) {
                Ok(Parsed::Incomplete) => {
                    step = Step::Read;
                    break;
                }
                Ok(Parsed::Command { length, is_inline }) => (length, is_inline),
                Err(error) => {
                    group.finish(client, replies).await;
                    return (handled, client.reject(&error, replies));
                }
            };
            handled += length;
            if !turn.takes_command() {
                // Not the end of the group, which would be smaller.
                tokio::task::yield_now().await;
                *turn = Turn::default();
            }
            if is_inline {
                // The next inline command replaces the arguments of this one.
                group.finish(client, replies).await;
                let arguments = parser.inline_arguments();
                match client.request(active, arguments) {
                    Some(request) => {
                        let reply = decide_or_reject(active, request).await;
                        client.write(&reply, replies);
                    }
                    None => {
                        let step = client.handle(active, arguments, replies);
                        parser.limits = client.limits(active);
                        if step != Step::Read {
                            return (handled, step);
                        }
                    }
                }
                continue;
            }
            let arguments = parser.arguments(rest);
            if let Some(request) = client.request(active, arguments) {
                if !group.admits(&request) {
                    group.finish(client, replies).await;
                }
                group.add(&request);
                group.pending.push_back(decide_or_reject(active, request));
                continue;
            }
            group.finish(client, replies).await;
            let step = client.handle(active, arguments, replies);
            parser.limits = client.limits(active);
            if step != Step::Read {
                return (handled, step);
            }
        }
        group.finish(client, replies).await;
        (handled, step)
    }
}

/// Returns the bytes at the start of an input that are UTF-8, as nearly all commands.
fn text_at_start(input: &[u8]) -> &str {
    let input = &input[..input.len().min(MAX_TEXT_BYTES)];
    str::from_utf8(input)
        .unwrap_or_else(|error| str::from_utf8(&input[..error.valid_up_to()]).unwrap_or_default())
}

async fn decide_or_reject(active: &ActiveConfig, request: Result<Request<'_>, String>) -> Reply {
    // Lets others run while a large group starts.
    tokio::task::coop::consume_budget().await;
    match request {
        Ok(request) => decide(active, &request).await,
        Err(error) => Reply::Error(error),
    }
}

/// Requests that are decided together. Of different ones on one key, the order would be lost.
struct Group<'a, F: Future<Output = Reply>> {
    pending: FuturesOrdered<F>,
    /// Hash of the only request on each key.
    requests: HashMap<&'a str, u64>,
    hasher: RandomState,
}

impl<'a, F: Future<Output = Reply>> Group<'a, F> {
    fn new() -> Self {
        Self {
            pending: FuturesOrdered::new(),
            requests: HashMap::new(),
            hasher: RandomState::new(),
        }
    }

    /// Returns whether a request can be decided with the others.
    fn admits(&self, request: &Result<Request<'a>, String>) -> bool {
        let Ok(request) = request else { return true };
        let known = self.requests.get(request.key);
        known.is_none_or(|known| {
            let is_repeatable = matches!(request.action, Action::Acquire | Action::Peek);
            is_repeatable && *known == request.identity(&self.hasher)
        })
    }

    fn add(&mut self, request: &Result<Request<'a>, String>) {
        if let Ok(request) = request {
            self.requests.insert(request.key, request.identity(&self.hasher));
        }
    }

    /// Waits for all decisions, and writes the replies in the order of the commands.
    async fn finish(&mut self, client: &Client, replies: &mut Vec<u8>) {
        if self.pending.len() > 1
            && let Some(redis) = client.state.backend.redis()
        {
            redis.store().expect_batch();
        }
        while let Some(reply) = self.pending.next().await {
            client.write(&reply, replies);
        }
        self.requests.clear();
    }
}
