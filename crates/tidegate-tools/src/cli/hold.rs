//! `tidegate hold`: runs a command while units of a limit are held.

use std::ffi::OsString;
use std::fs::File;
use std::future::poll_fn;
use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitCode;
use std::task::Poll;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use rustix::process::{Pid, Signal, getpgrp, kill_process};
use tidegate::{Charge, Error, Hold, HoldTerms, Limiter, Permit, Quota, Store, StoreError};
use tidegate_config::duration::{self, readable};
use tokio::process::{Child, Command};
use tokio::signal;
use tokio::signal::unix::SignalKind;

use super::redis::RedisFlags;
use crate::tool::style;

/// Interval of the attempts to get units that are in use.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Interval of the checks whether the permit is lost.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest lease, and the time after which a renewal is late: they are three seconds apart.
const MIN_LEASE: Duration = Duration::from_secs(5);
/// Exit codes of shells for a command that cannot be run, or is not found.
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// Exit code of shells for a command that a signal has ended, without the number of the signal.
const SIGNALLED: i32 = 128;

/// Run a command while it holds units of a limit: a semaphore for all hosts that use one Redis.
///
/// At most --limit units of a key are held at the same time. They are free again when the command
/// has ended. If this process is killed, they are free after --ttl, and the command goes on without
/// them. So it does, with a warning, if Redis answers no renewal for that long.
///
/// Exit code: that of the command, or 128 + N if signal N has ended it. If the units are in use,
/// the command is not run and the code is 1, or that of --conflict-exit-code. 126 and 127: the
/// command cannot be run, or does not exist. 2: an error, such as a Redis that does not answer
/// within --wait.
///
/// SIGINT, SIGQUIT, SIGTERM and SIGHUP are passed to the command.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  A job of cron that runs on one of several hosts, and never twice at the same time:
    tidegate hold nightly-report --limit 1 --redis redis://127.0.0.1:6379 -- ./report

  At most five exports per customer; the others wait for up to a minute:
    tidegate hold customer-7 --limit 5 --wait 1m --redis redis://127.0.0.1:6379 -- ./export 7

  Distinguish units in use from a failure of the command:
    tidegate hold deploy --limit 1 --conflict-exit-code 75 --redis $REDIS -- ./deploy
    [ $? -eq 75 ] && echo 'another deployment is running'")]
pub struct HoldCommand {
    /// Key to count by: a job, a customer
    #[arg(value_name = "KEY")]
    key: String,

    /// Units that are held at the same time, at most
    #[arg(long, value_name = "N", env = "TIDEGATE_LIMIT")]
    limit: u64,

    /// Units that the command holds
    #[arg(long, value_name = "C", env = "TIDEGATE_COST", default_value_t = 1)]
    cost: u64,

    /// Policy name to count under, such as one of a service with `algorithm: concurrency`
    #[arg(long, value_name = "NAME", env = "TIDEGATE_POLICY", default_value = "concurrency")]
    policy: String,

    /// Lease: time for which the units are held without a renewal. They are renewed every three
    /// seconds, for a day at most
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_TTL")]
    #[arg(default_value = "10s", value_parser = lease)]
    ttl: Duration,

    /// Time to wait for units that are in use [default: not at all]
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_WAIT", value_parser = duration::parse)]
    wait: Option<Duration>,

    /// Exit code if the units are in use
    #[arg(long, value_name = "N", env = "TIDEGATE_CONFLICT_EXIT_CODE", default_value_t = 1)]
    conflict_exit_code: u8,

    #[command(flatten)]
    redis: RedisFlags,

    /// Timeout of a call to Redis
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_TIMEOUT")]
    #[arg(default_value = "1s", value_parser = duration::parse)]
    timeout: Duration,

    /// Command with its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn is_temporary(error: &StoreError) -> bool {
    matches!(error.reason(), StoreError::Timeout(_) | StoreError::Unreachable(_))
}

fn lease(text: &str) -> Result<Duration, String> {
    let lease = duration::parse(text)?;
    if (MIN_LEASE..=Hold::MAX_TTL).contains(&lease) {
        return Ok(lease);
    }
    let (shortest, longest) = (readable(MIN_LEASE), readable(Hold::MAX_TTL));
    Err(format!("a lease is from {shortest} to {longest}"))
}

impl HoldCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let terms = HoldTerms::new(self.ttl, Hold::MAX_TTL)?;
        let quota = Quota::concurrency(self.limit)?.with_holds(terms);
        let charge = Charge::new(&self.key, &quota).with_policy(&self.policy).with_cost(self.cost);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let Some(store) = self.redis.connect(self.timeout).await? else {
                bail!(
                    "--redis URL is missing: without it, counts are in the memory of this process \
                     alone, and no other process would see that the units are held"
                );
            };
            let permit = self.acquire(&Limiter::new(store), &charge).await?;
            if !permit.is_allowed() {
                let decision = permit.decision();
                let in_use = decision.limit - decision.remaining;
                let (limit, wait) = (decision.limit, readable(decision.retry_after));
                anstream::eprintln!(
                    "{}denied{}   {in_use} of {limit} in flight, free in {wait} at the latest",
                    style::DENIED,
                    style::RESET
                );
                return Ok(ExitCode::from(self.conflict_exit_code));
            }
            let code = self.run_command(&permit).await;
            if let Err(error) = permit.release().await {
                let lease = readable(self.ttl);
                style::print_warning(format_args!(
                    "the units are not released, and are free in {lease}: {error}"
                ));
            }
            code
        })
    }

    /// Acquires the units, if they are free within the time to wait.
    async fn acquire<S: Store>(
        &self,
        limiter: &Limiter<S>,
        charge: &Charge<'_>,
    ) -> anyhow::Result<Permit<S>> {
        let (start, mut has_warned) = (Instant::now(), false);
        loop {
            // A new id: the units of a lost answer are released by theirs.
            let hold = Hold::random().with_ttl(self.ttl)?;
            let answer = limiter.hold(&charge.with_hold(&hold)).await;
            let left = self.wait.unwrap_or_default().saturating_sub(start.elapsed());
            match answer {
                Ok(permit) if permit.is_allowed() => return Ok(permit),
                answer if left.is_zero() => return Ok(answer?),
                Err(Error::Store(error)) if is_temporary(&error) => {
                    if !std::mem::replace(&mut has_warned, true) {
                        style::print_warning(format_args!("{error}: trying again"));
                    }
                }
                // A release is not announced.
                answer => drop(answer?),
            }
            tokio::time::sleep(POLL_INTERVAL.min(left)).await;
        }
    }

    /// Runs the command to its end, and returns its exit code.
    async fn run_command<S: Store>(&self, permit: &Permit<S>) -> anyhow::Result<ExitCode> {
        let (program, arguments) = self.command.split_first().context("no command")?;
        // Before the start of the command, so that none is lost.
        let mut signals = Signals::new()?;
        let mut child = match Command::new(program).args(arguments).spawn() {
            Ok(child) => child,
            Err(error) => {
                let name = program.display();
                anstream::eprintln!("{}error:{} {name}: {error}", style::ERROR, style::RESET);
                let is_missing = error.kind() == ErrorKind::NotFound;
                return Ok(ExitCode::from(if is_missing { NOT_FOUND } else { NOT_EXECUTABLE }));
            }
        };
        let mut checks = tokio::time::interval(CHECK_INTERVAL);
        let (mut is_late, mut is_lost) = (false, false);
        let status = loop {
            tokio::select! {
                status = child.wait() => break status?,
                received = signals.next() => pass(received, &child),
                _ = checks.tick() => {
                    let left = permit.held_for();
                    if left.is_zero() && !std::mem::replace(&mut is_lost, true) {
                        style::print_warning(
                            "the units are lost, because they could not be renewed in time: \
                             another command may hold them now",
                        );
                    }
                    let was_late = std::mem::replace(&mut is_late, left + MIN_LEASE < self.ttl);
                    if is_late && !was_late && !is_lost {
                        let left = readable(left);
                        style::print_warning(format_args!(
                            "a renewal was not answered: trying again, still held for {left}"
                        ));
                    }
                }
            }
        };
        let code = status.code().or(status.signal().map(|number| SIGNALLED + number));
        let code = code.and_then(|code| u8::try_from(code).ok());
        Ok(ExitCode::from(code.unwrap_or(u8::MAX)))
    }
}

/// Signals that are passed to the command.
struct Signals([(Signal, signal::unix::Signal); 4]);

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self([
            (Signal::INT, signal::unix::signal(SignalKind::interrupt())?),
            (Signal::QUIT, signal::unix::signal(SignalKind::quit())?),
            (Signal::TERM, signal::unix::signal(SignalKind::terminate())?),
            (Signal::HUP, signal::unix::signal(SignalKind::hangup())?),
        ]))
    }

    async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            let mut received = self.0.iter_mut().filter_map(|(passed, signal)| {
                signal.poll_recv(context).is_ready().then_some(*passed)
            });
            received.next().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

/// Passes a signal to the command. A terminal sends those of its keys to both processes.
fn pass(received: Signal, child: &Child) {
    let is_of_key = matches!(received, Signal::INT | Signal::QUIT);
    if is_of_key && is_in_foreground() {
        return;
    }
    let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(id) = id {
        // It may have ended.
        let _ = kill_process(id, received);
    }
}

/// Returns whether this process gets the signals of the keys of a terminal.
fn is_in_foreground() -> bool {
    let terminal = File::open("/dev/tty");
    terminal.is_ok_and(|terminal| rustix::termios::tcgetpgrp(terminal) == Ok(getpgrp()))
}
