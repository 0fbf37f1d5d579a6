//! Calls of scripts on one node: by EVALSHA, in one pipeline, and what follows NOSCRIPT.
//!
//! A script that a node does not know is loaded once, however many calls need it. If it is unknown
//! after that, something in between, such as a proxy, sends EVALSHA and SCRIPT LOAD to different
//! servers: the text is then sent by EVAL, which that server caches. The node is remembered, so
//! that no further load is tried there for a while.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::timeout_at;

use super::{ClockSource, SCRIPT_COUNT, Script};
use crate::store::StoreError;
use crate::store::redis::client::NodeClient;
use crate::store::redis::client::connection::RedisConnection;
use crate::store::redis::client::error::{AttemptError, ServerError, refuses_time};
use crate::store::redis::client::resp::{Command, Value};
use crate::store::redis::client::restrictions::Restriction;
use crate::store::redis::routing::TopologyState;
use crate::store::redis::routing::slots::slot_of;
use crate::store::redis::routing::step::{CallError, CallTarget, Delivery, NextStep, Retries};

/// Call of one script, or the release of a unit in flight.
pub(crate) struct ScriptCall {
    /// `None` for a release, which is a ZREM.
    pub(crate) script: Option<&'static Script>,
    /// Number of keys, keys, and arguments; for a release the key and the member.
    pub(crate) arguments: Command,
    /// Whether ASKING precedes it, because the node is importing its slot.
    pub(crate) asking: bool,
}

/// Result of one call.
pub(crate) type ScriptResult = Result<Value, AttemptError>;

/// Scripts of one node.
#[derive(Default)]
pub(crate) struct LoadedScripts {
    /// Value of `completed` after the last load of each script. Locked during a load, which all
    /// calls that find the script missing share.
    last_loads: tokio::sync::Mutex<[u64; SCRIPT_COUNT]>,
    /// Number of loads that were started.
    started: AtomicU64,
    /// Number of loads that have completed.
    completed: AtomicU64,
    /// Time until which no script is loaded, because a load did not help.
    text_until: Mutex<Option<Instant>>,
}

/// Number of bytes of a call's first words, without the script, at most.
const HEAD_BYTES: usize = 32;
const NO_SCRIPT: AttemptError = AttemptError::Server(ServerError::NoScript);
/// Time for which scripts are sent as text to a node on which a load did not help.
const TEXT_TTL: Duration = Duration::from_secs(60);

impl LoadedScripts {
    /// Returns the number of loads.
    pub(crate) fn total(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    fn sends_text(&self) -> bool {
        let until = *self.text_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Sends text from now on. Returns whether it did not before.
    fn send_text(&self) -> bool {
        let mut until = self.text_until.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let starts = until.is_none_or(|until| until <= now);
        *until = Some(now + TEXT_TTL);
        starts
    }
}

impl NodeClient {
    /// Sends these calls in one pipeline, and returns the result of each. Calls of a script that is
    /// missing are sent again: after a load until the deadline, then with the text. The caller ends
    /// the wait for replies.
    pub(crate) async fn run(
        &self,
        on: &RedisConnection,
        calls: &[ScriptCall],
        deadline: Instant,
    ) -> Vec<ScriptResult> {
        let loads_before = self.scripts().completed.load(Ordering::Acquire);
        let results = self.send_calls(on, calls.iter(), false).await;
        if !results.iter().any(is_missing) {
            return results;
        }
        Box::pin(self.run_missing(on, calls, results, loads_before, deadline)).await
    }

    /// Sends those calls again whose script was missing.
    async fn run_missing(
        &self,
        on: &RedisConnection,
        calls: &[ScriptCall],
        mut results: Vec<ScriptResult>,
        loads_before: u64,
        deadline: Instant,
    ) -> Vec<ScriptResult> {
        // Error of a load that the server has refused.
        let mut refused = None;
        for with_text in [false, true] {
            let missing: Vec<usize> =
                (0..calls.len()).filter(|call| is_missing(&results[*call])).collect();
            if missing.is_empty() {
                break;
            }
            if !with_text {
                if self.scripts().sends_text() {
                    continue;
                }
                match self.load_all(calls, &missing, loads_before, deadline).await {
                    Ok(()) => {}
                    // Some proxies do not know SCRIPT LOAD, but do know EVAL.
                    Err(error @ AttemptError::Server(_)) => {
                        refused = Some(error);
                        continue;
                    }
                    Err(error) => {
                        let error = error.into_unsent();
                        for call in missing {
                            results[call] = Err(error.clone());
                        }
                        break;
                    }
                }
            }
            let again = missing.iter().map(|call| &calls[*call]);
            let resent = self.send_calls(on, again, with_text).await;
            if with_text && resent.iter().any(Result::is_ok) && self.scripts().send_text() {
                tracing::warn!(
                    node = %self.address(),
                    "a script is unknown right after SCRIPT LOAD, as behind a proxy that sends it \
                     to another server than EVALSHA: its text is sent by EVAL"
                );
            }
            for (call, result) in missing.into_iter().zip(resent) {
                results[call] = match result {
                    // The user may not call EVAL, so the reason that matters is that of the load.
                    Err(AttemptError::Server(ServerError::Other(reason)))
                        if with_text && reason.contains("NOPERM") =>
                    {
                        Err(refused.clone().unwrap_or(NO_SCRIPT))
                    }
                    result => result,
                };
            }
        }
        results
    }

    /// Loads the scripts of these calls.
    async fn load_all(
        &self,
        calls: &[ScriptCall],
        missing: &[usize],
        loads_before: u64,
        deadline: Instant,
    ) -> Result<(), AttemptError> {
        for call in missing {
            if let Some(script) = calls[*call].script {
                self.load(script, loads_before, deadline).await?;
            }
        }
        Ok(())
    }

    /// Sends calls once: by EVALSHA, or by EVAL with the text.
    async fn send_calls<'a>(
        &self,
        on: &RedisConnection,
        calls: impl Iterator<Item = &'a ScriptCall> + Clone,
        with_text: bool,
    ) -> Vec<ScriptResult> {
        let (mut pipeline, mut commands) = (Vec::new(), 0);
        for ScriptCall { script, arguments, asking } in calls.clone() {
            if *asking {
                Command::new("ASKING").encode(&[], &mut pipeline);
            }
            if let Some(script) = script {
                let first_words = script.first_words(with_text);
                pipeline.reserve(HEAD_BYTES + first_words[1].len() + arguments.len());
                arguments.encode(&first_words, &mut pipeline);
            } else {
                arguments.encode(&["ZREM"], &mut pipeline);
            }
            commands += 1 + usize::from(*asking);
        }
        match self.send(on, &pipeline, commands).await {
            Ok(replies) => {
                let mut replies = replies.into_iter();
                let reply = |call: &ScriptCall| {
                    // Skips the reply to ASKING.
                    let reply = replies.nth(usize::from(call.asking)).unwrap_or(Value::Nil);
                    reply.into_result().map_err(|error| AttemptError::new(self.address(), &error))
                };
                calls.map(reply).collect()
            }
            Err(error) => calls.map(|_| Err(error.clone())).collect(),
        }
    }

    /// Loads a script that a call found missing, unless another call has loaded it since.
    async fn load(
        &self,
        script: &Script,
        loads_before_call: u64,
        deadline: Instant,
    ) -> Result<(), AttemptError> {
        let scripts = self.scripts();
        let Ok(mut last_loads) = timeout_at(deadline.into(), scripts.last_loads.lock()).await
        else {
            return Err(AttemptError::Late);
        };
        let last_load = &mut last_loads[script.index()];
        if *last_load > loads_before_call {
            return Ok(());
        }
        scripts.started.fetch_add(1, Ordering::Relaxed);
        self.query(Command::new("SCRIPT").arg("LOAD").arg(script.text()), deadline).await?;
        *last_load = scripts.completed.fetch_add(1, Ordering::AcqRel) + 1;
        Ok(())
    }
}

fn is_missing(result: &ScriptResult) -> bool {
    matches!(result, Err(AttemptError::Server(ServerError::NoScript)))
}

/// Call of a script on one of the store's own keys.
pub(crate) struct OwnCall<'a> {
    pub(crate) script: &'static Script,
    pub(crate) key: &'a str,
    /// Number of keys, keys, and arguments, without an estimated time.
    pub(crate) arguments: Command,
    /// Whether the script needs the time.
    pub(crate) needs_time: bool,
}

impl OwnCall<'_> {
    /// Calls the script, and decodes the reply.
    pub(crate) async fn run<T>(
        &self,
        topology: &TopologyState,
        read: impl FnOnce(Value) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let (slot, timeout) = (slot_of(self.key), topology.timeout());
        let deadline = Instant::now() + timeout;
        let mut retries = Retries::until(deadline, timeout, Delivery::Shared);
        let mut target = CallTarget { node: topology.route(slot)?, delivery: Delivery::Shared };
        let mut time_refusal: Option<String> = None;
        loop {
            let clock = match time_refusal {
                _ if !self.needs_time => ClockSource::Server,
                Some(_) => ClockSource::Estimated,
                None => target.node.clock(),
            };
            let sent = self.send(&target, clock, deadline);
            let error = match target.node.within(deadline, sent).await {
                Ok(reply) => {
                    if let Some(reason) = time_refusal {
                        target.node.restrict(Restriction::TimeInScripts, &reason);
                    }
                    return read(reply);
                }
                Err(AttemptError::Server(ServerError::Other(reason)))
                    if self.needs_time && clock == ClockSource::Server && refuses_time(&reason) =>
                {
                    time_refusal = Some(reason);
                    continue;
                }
                Err(error) => error,
            };
            let step = NextStep::after(error, topology, &target.node, slot);
            target = retries
                .follow(step, target, slot, topology)
                .await
                .map_err(CallError::into_store_error)?;
        }
    }

    async fn send(
        &self,
        CallTarget { node, delivery }: &CallTarget,
        clock: ClockSource,
        deadline: Instant,
    ) -> ScriptResult {
        let connection = node.connection(deadline).await?;
        let mut arguments = self.arguments.clone();
        if clock == ClockSource::Estimated {
            let now = node.estimate(&connection, deadline).await?.now;
            arguments.push(format!("{} {}", now / 1_000_000, now % 1_000_000).as_bytes());
        }
        let asking = *delivery == Delivery::Asking;
        let call = ScriptCall { script: Some(self.script.with_clock(clock)), arguments, asking };
        node.run(&connection, &[call], deadline).await.remove(0)
    }
}
