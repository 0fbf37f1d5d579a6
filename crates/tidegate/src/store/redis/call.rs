//! One call of a script: routed, followed to where it is sent on, and never sent twice if it may
//! have run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};
use tokio::time::sleep_until;

use super::fault::{Fault, Said};
use super::link::{Connection, Link};
use super::queue::Turn;
use super::script::Script;
use super::server_clock::ServerClock;
use super::topology::Known;
use crate::store::StoreError;

/// A script on keys of one slot.
pub(super) struct Call<'a> {
    pub(super) script: &'a Script,
    pub(super) slot: u16,
    pub(super) started: Instant,
    pub(super) timeout: Duration,
}

/// Why a call brought nothing.
pub(super) enum Setback {
    Failed(StoreError),
    /// These keys are not in one place now. One by one they can be decided.
    Apart,
}

/// What a reply means.
pub(super) enum Reply<T> {
    Answer(T),
    /// It came too late by the server's clock, and did nothing.
    Late,
}

/// How often a call is sent on before somebody goes round in circles.
const MOST_REDIRECTS: u32 = 16;
/// How often a node that does not write just now is asked again.
const MOST_REFUSALS: u32 = 3;
/// How often keys that are on their way are asked for together.
const MOST_TRIES_TOGETHER: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(2);

impl Setback {
    pub(super) fn into_store_error(self) -> StoreError {
        match self {
            Self::Failed(error) => error,
            Self::Apart => {
                StoreError::Refused("the keys are on their way to another node".to_owned())
            }
        }
    }
}

impl From<StoreError> for Setback {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl Call<'_> {
    pub(super) fn deadline(&self) -> Instant {
        self.started + self.timeout
    }

    /// Runs it. `command` gets the server's clock, to carry its times; `read` gets the reply, and
    /// returns the server's time.
    ///
    /// Every wait in here ends at the deadline. The turn is for the first attempt: what goes on
    /// from there holds up nobody.
    pub(super) async fn run<T>(
        &self,
        known: &Known,
        mut turn: Option<Turn>,
        command: impl Fn(&ServerClock) -> Cmd,
        read: impl Fn(Value) -> Result<(Option<i64>, Reply<T>), StoreError>,
    ) -> Result<T, Setback> {
        let deadline = self.deadline();
        let mut next: Option<(Arc<Link>, bool)> = None;
        let (mut redirects, mut refusals, mut tries) = (0, 0, 0);
        loop {
            let (link, asking) = match next.take() {
                Some(told) => told,
                None => (known.route(self.slot)?, false),
            };
            let loads = link.loads_of(self.script);
            let attempted = self.attempt(&link, asking, &command).await;
            drop(turn.take());
            let fault = match attempted {
                Ok((value, connection, sent)) => {
                    let received = Instant::now();
                    let (now, reply) = read(value)?;
                    if let Some(now) = now {
                        connection.clock().heard(now, sent, received);
                    }
                    match reply {
                        Reply::Answer(answer) => return Ok(answer),
                        // Time is up; or the server's clock was set, and is known now. It surely
                        // did not run.
                        Reply::Late if received < deadline => {
                            next = Some((link, asking));
                            continue;
                        }
                        Reply::Late => Fault::TimedOut,
                    }
                }
                Err(fault) => fault,
            };
            let go_on = match &fault {
                Fault::Said(Said::NoScript) => {
                    link.load(self.script, loads, deadline)
                        .await
                        .map_err(|fault| self.failed(fault))?;
                    next = Some((link, asking));
                    true
                }
                Fault::Said(Said::Moved(address)) => {
                    next = Some((known.moved(self.slot, address), false));
                    redirects += 1;
                    redirects <= MOST_REDIRECTS
                }
                Fault::Said(Said::Ask(address)) => {
                    next = Some((known.asked_of(address), true));
                    redirects += 1;
                    redirects <= MOST_REDIRECTS
                }
                Fault::Said(Said::TryAgain) => {
                    tries += 1;
                    if tries > MOST_TRIES_TOGETHER || !self.pause(tries).await {
                        return Err(Setback::Apart);
                    }
                    true
                }
                Fault::Said(Said::CrossSlot) => {
                    known.stir();
                    return Err(Setback::Apart);
                }
                Fault::Said(Said::NotNow(_)) => {
                    refusals += 1;
                    known.does_not_write(&link)
                        && refusals <= MOST_REFUSALS
                        && self.pause(refusals + 1).await
                }
                Fault::Retired => {
                    refusals += 1;
                    refusals <= MOST_REFUSALS && self.pause(refusals).await
                }
                Fault::Said(Said::No(_)) => false,
                Fault::Down(_) | Fault::TimedOut | Fault::Lost(_) => {
                    known.stir();
                    false
                }
            };
            if !go_on {
                return Err(self.failed(fault));
            }
        }
    }

    /// Sends it to a node, once: the reply, what it came on, and when it left.
    async fn attempt(
        &self,
        link: &Link,
        asking: bool,
        command: impl Fn(&ServerClock) -> Cmd,
    ) -> Result<(Value, Arc<Connection>, Instant), Fault> {
        let deadline = self.deadline();
        let connection = link.connection(deadline).await?;
        let command = command(connection.clock());
        let sent = Instant::now();
        let reply = if asking {
            link.send_asking(&connection, command, deadline).await?
        } else {
            link.send(&connection, &command, deadline).await?
        };
        Ok((reply, connection, sent))
    }

    /// Twice as long each time; false if that would be too long.
    async fn pause(&self, turn: u32) -> bool {
        let until = Instant::now() + FIRST_PAUSE * 2_u32.pow(turn - 1);
        if until >= self.deadline() {
            return false;
        }
        sleep_until(until.into()).await;
        true
    }

    fn failed(&self, fault: Fault) -> Setback {
        Setback::Failed(fault.into_store_error(self.timeout))
    }
}
