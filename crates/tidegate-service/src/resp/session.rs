//! Session of one connection: the commands that have arrived, in order.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesOrdered;

use super::RespShared;
use super::client::Client;
use super::decide::{Started, decide, finish, start};
use super::frame::{Parsed, Parser};
use super::reply::RespReply;
use super::request::CommandQuery;
use crate::state::{ActiveConfig, ServerState};
use tidegate_net::listener::{CommandBudget, Input, Peer, Session, SessionStep};

/// Maximum number of commands that are decided together.
const MAX_GROUP: usize = 1_024;
/// Length of the replies from which on they are sent first.
const MAX_REPLY_BYTES: usize = 64 * 1024;
/// Length of the input that is checked for UTF-8 in one step: about the commands of a poll.
const MAX_TEXT_BYTES: usize = 8 * 1024;

/// Session of one client.
pub(super) struct RespSession {
    parser: Parser,
    client: Client,
}

impl RespSession {
    pub(super) fn new(
        state: Arc<ServerState>,
        shared: &Arc<RespShared>,
        peer: Peer,
        is_remote: bool,
    ) -> Self {
        shared.counters.open();
        let client = Client::new(state, shared, peer, is_remote);
        let limits = client.limits(&client.state.active_guard());
        Self { parser: Parser::new(limits), client }
    }
}

#[cfg(test)]
impl RespSession {
    pub(super) fn metrics(&self) -> &super::RespCounters {
        &self.client.shared.counters
    }

    pub(super) fn auth_failures(&self) -> &crate::auth::AuthFailures {
        &self.client.state.metrics.auth_failures
    }
}

impl Drop for RespSession {
    fn drop(&mut self) {
        self.client.shared.counters.close();
    }
}

impl Session for RespSession {
    const BUFFERS_FULL: &'static [u8] = b"-ERR the buffers of all connections are full: send \
        shorter commands, or try again later\r\n";

    fn max_input(&self) -> usize {
        self.parser.limits.max_input()
    }

    async fn handle(
        &mut self,
        input: &mut Input,
        replies: &mut Vec<u8>,
        budget: &mut CommandBudget,
    ) -> SessionStep {
        // A reload in the middle of a pipeline takes effect after it.
        let active = self.client.state.active_guard();
        self.parser.limits = self.client.limits(&active);
        // The commands of an `EXEC` come before the rest of the input.
        let executing = self.client.executing.take();
        let commands = executing.as_ref().map_or(input.bytes(), |queued| &queued.commands);
        let (handled, step) =
            Box::pin(self.handle_commands(&active, commands, replies, budget)).await;
        self.parser.shrink();
        let Some(mut queued) = executing else {
            input.consume(handled);
            return step;
        };
        queued.commands = queued.commands.slice(handled..);
        self.client.executing = (!queued.commands.is_empty()).then_some(queued);
        if matches!(step, SessionStep::Yield | SessionStep::Close) {
            step
        } else {
            SessionStep::Flush
        }
    }
}

impl RespSession {
    /// Handles commands in their order. Those whose decisions wait for the store are decided
    /// together, so that they share calls to Redis. Returns the number of bytes that were handled.
    async fn handle_commands(
        &mut self,
        active: &ActiveConfig,
        input: &[u8],
        replies: &mut Vec<u8>,
        budget: &mut CommandBudget,
    ) -> (usize, SessionStep) {
        let Self { parser, client } = self;
        let mut group = Group::default();
        let mut handled = 0;
        let mut text = None;
        let step = loop {
            if replies.len() >= MAX_REPLY_BYTES || group.len() >= MAX_GROUP {
                break SessionStep::Flush;
            }
            let rest = &input[handled..];
            let (length, is_inline) = match parser.parse(rest) {
                Ok(Parsed::Incomplete) => break SessionStep::Read,
                Ok(Parsed::Command { length, is_inline }) => (length, is_inline),
                Err(error) => {
                    group.finish(client, replies).await;
                    break client.reject(&error, replies);
                }
            };
            if !budget.take() {
                if group.len() == 0 {
                    break SessionStep::Yield;
                }
                // Not the end of the group, which would be smaller.
                tokio::task::yield_now().await;
                *budget = CommandBudget::default();
            }
            let at = handled..handled + length;
            handled = at.end;
            if is_inline {
                // The next inline command replaces the arguments of this one.
                group.finish(client, replies).await;
                let arguments = parser.inline_arguments();
                if let Some(request) = client.request(active, arguments) {
                    let reply = decide(active, request).await;
                    client.write(&reply, replies);
                    continue;
                }
                if client.run_override(active, arguments, replies).await {
                    continue;
                }
                let step = client.handle(active, arguments, replies);
                parser.limits = client.limits(active);
                if step != SessionStep::Read {
                    break step;
                }
                continue;
            }
            // Checked once for all commands, not for a part of one that is still arriving.
            let text = *text.get_or_insert_with(|| text_at_start(input));
            let arguments = match text.get(at) {
                Some(text) => parser.text_arguments(text),
                None => parser.arguments(rest),
            };
            match client.request(active, arguments) {
                Some(Ok(request)) => {
                    if !group.admits(&request) {
                        group.finish(client, replies).await;
                    }
                    match start(active, &request) {
                        Started::Decided(reply) if group.len() == 0 => {
                            client.write(&reply, replies);
                        }
                        started => {
                            group.add(&request, finish(active, started, request.clone()));
                        }
                    }
                }
                Some(Err(error)) => {
                    group.finish(client, replies).await;
                    client.write(&RespReply::Error(error), replies);
                }
                None => {
                    group.finish(client, replies).await;
                    if client.run_override(active, arguments, replies).await {
                        continue;
                    }
                    let step = client.handle(active, arguments, replies);
                    parser.limits = client.limits(active);
                    if step != SessionStep::Read {
                        break step;
                    }
                }
            }
        };
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

/// Requests that are decided together. Of different ones on one key, the order would be lost.
struct Group<'a, F: Future>(Option<PendingGroup<'a, F>>);

struct PendingGroup<'a, F: Future> {
    replies: FuturesOrdered<F>,
    /// Hash of the only request on each key.
    requests: HashMap<&'a str, u64>,
}

impl<F: Future> Default for Group<'_, F> {
    fn default() -> Self {
        Self(None)
    }
}

impl<'a, F: Future<Output = RespReply>> Group<'a, F> {
    fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |pending| pending.replies.len())
    }

    /// Returns whether a request can be decided with the others.
    fn admits(&self, request: &CommandQuery<'a>) -> bool {
        let Some(pending) = &self.0 else { return true };
        pending.requests.get(request.key).is_none_or(|known| {
            request.is_repeatable() && *known == request.identity(pending.requests.hasher())
        })
    }

    fn add(&mut self, request: &CommandQuery<'a>, reply: F) {
        let pending = self.0.get_or_insert_with(|| PendingGroup {
            replies: FuturesOrdered::new(),
            requests: HashMap::new(),
        });
        let identity = request.identity(pending.requests.hasher());
        pending.requests.insert(request.key, identity);
        pending.replies.push_back(reply);
    }

    /// Waits for all decisions, and writes the replies in the order of the commands.
    async fn finish(&mut self, client: &Client, replies: &mut Vec<u8>) {
        let Some(mut pending) = self.0.take() else { return };
        if pending.replies.len() > 1
            && let Some(redis) = client.state.backend.redis()
        {
            redis.store().expect_batch();
        }
        while let Some(reply) = pending.replies.next().await {
            client.write(&reply, replies);
        }
    }
}
