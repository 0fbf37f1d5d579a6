//! Sentinels: which server is the primary, as they tell. Each is asked by a task of its own, so one
//! that hangs holds up nobody.
//!
//! They do not all learn of a failover at once. The one that has seen the highest configuration
//! epoch knows best. And even that one looks at the server it promotes but once a second: while the
//! sentinels agree that the primary is down, we look ourselves.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redis::{Pipeline, Value};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::super::access::Address;
use super::super::fault::{Fault, Trouble};
use super::super::link::{Link, ask_once, says_primary};
use super::{Known, Routes};

/// What one sentinel tells.
struct Told {
    primary: Address,
    epoch: u64,
    /// Enough sentinels agree that the primary is down.
    down: bool,
}

/// What the sentinels have told so far.
#[derive(Default)]
struct Council {
    believed: Mutex<Option<Believed>>,
    /// Sentinels that could not tell, in the first round.
    failed: AtomicUsize,
}

struct Believed {
    primary: Address,
    epoch: u64,
    /// When the primary was last seen to be of use.
    good: Instant,
}

const POLL: Duration = Duration::from_millis(250);
const AT_LEAST: Duration = Duration::from_millis(25);
/// How long one sentinel may take to tell.
const ASK: Duration = Duration::from_millis(300);
/// For so long a primary may be of no use before a sentinel of an older epoch is believed: it may
/// have been reset.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) fn follow(known: &Arc<Known>, name: &str) -> Vec<JoinHandle<()>> {
    let council = Arc::new(Council::default());
    let listen = |sentinel: &Arc<Link>| {
        tokio::spawn(listen(
            Arc::clone(known),
            Arc::clone(&council),
            Arc::clone(sentinel),
            name.to_owned(),
        ))
    };
    known.sentinels.iter().map(listen).collect()
}

async fn listen(known: Arc<Known>, council: Arc<Council>, sentinel: Arc<Link>, name: String) {
    let mut stirred = known.stir.watcher();
    let mut first = true;
    loop {
        let asked = Instant::now();
        match ask(&sentinel, &name).await {
            Ok(told) => {
                council.told(&known, told.primary, told.epoch);
                if told.down
                    && let Some(promoted) = promoted(&known, &sentinel, &name).await
                {
                    council.told(&known, promoted, told.epoch + 1);
                }
            }
            Err(trouble) if std::mem::take(&mut first) => {
                let failed = council.failed.fetch_add(1, Ordering::Relaxed) + 1;
                // Another sentinel may know: one that has just been started knows nobody.
                if failed == known.sentinels.len() {
                    known.settle(Err(trouble));
                }
            }
            Err(_) => {}
        }
        first = false;
        stirred.or_after(POLL).await;
        sleep(AT_LEAST.saturating_sub(asked.elapsed())).await;
    }
}

async fn ask(sentinel: &Link, name: &str) -> Result<Told, Trouble> {
    sentinel.ready().await?;
    // In one go, so that both are of one moment. While a failover is under way only the first tells
    // of the new primary.
    let mut both = Pipeline::with_capacity(2);
    both.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    both.cmd("SENTINEL").arg("MASTER").arg(name);
    let replies =
        sentinel.ask_all(&both, Instant::now() + ASK).await.map_err(|fault| match fault {
            Fault::Down(trouble) | Fault::Lost(trouble) => trouble,
            other => Trouble::new(sentinel.address(), &other.into_store_error(ASK).to_string()),
        })?;
    let [primary, details] = replies.as_slice() else {
        return Err(Trouble::new(sentinel.address(), "no answer"));
    };
    match primary {
        Value::Array(parts) => {
            let [host, port] = parts.as_slice() else { return Err(unknown(sentinel, name)) };
            let address = text(host).zip(text(port).and_then(|port| port.parse().ok()));
            let Some((host, port)) = address else { return Err(unknown(sentinel, name)) };
            let epoch =
                field(details, "config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
            let down = field(details, "flags")
                .is_some_and(|flags| flags.split(',').any(|flag| flag == "o_down"));
            Ok(Told { primary: Address::tcp(host, port), epoch, down })
        }
        Value::Nil => Err(unknown(sentinel, name)),
        Value::ServerError(error) => {
            let reason = format!("it does not answer as a sentinel does: {error}");
            Err(Trouble::misconfigured(sentinel.address(), &reason))
        }
        _ => {
            Err(Trouble::misconfigured(sentinel.address(), "it does not answer as a sentinel does"))
        }
    }
}

fn unknown(sentinel: &Link, name: &str) -> Trouble {
    Trouble::misconfigured(
        sentinel.address(),
        &format!("this sentinel knows no primary named {name:?}"),
    )
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

/// A replica that is none any more: it is being promoted.
async fn promoted(known: &Known, sentinel: &Link, name: &str) -> Option<Address> {
    let replicas = sentinel
        .ask(redis::cmd("SENTINEL").arg("REPLICAS").arg(name), Instant::now() + ASK)
        .await
        .ok()?;
    let Value::Array(replicas) = replicas else { return None };
    for replica in &replicas {
        let port = field(replica, "port").and_then(|port| port.parse().ok());
        let Some((host, port)) = field(replica, "ip").zip(port) else { continue };
        let address = Address::tcp(host, port);
        let role = ask_once(&address, &known.access, redis::cmd("ROLE"), ASK).await;
        if role.is_ok_and(|role| says_primary(&role)) {
            return Some(address);
        }
    }
    None
}

/// From a list of names and values.
fn field<'a>(details: &'a Value, name: &str) -> Option<&'a str> {
    let Value::Array(parts) = details else { return None };
    let (pairs, _) = parts.as_chunks::<2>();
    pairs.iter().find(|[key, _]| text(key) == Some(name)).and_then(|[_, value]| text(value))
}

impl Council {
    fn told(&self, known: &Known, primary: Address, epoch: u64) {
        let mut believed = self.believed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(current) = &mut *believed {
            let now = Instant::now();
            let primaries = known.primaries();
            // Roles that were swapped by hand have no newer epoch.
            let demoted = primaries.iter().all(|link| link.is_demoted());
            if !demoted && primaries.iter().any(|link| link.is_up()) {
                current.good = now;
            }
            let newer = demoted || epoch > current.epoch;
            current.epoch = current.epoch.max(if current.primary == primary { epoch } else { 0 });
            if current.primary == primary || !(newer || now - current.good >= PATIENCE) {
                return;
            }
            tracing::info!(from = %current.primary, to = %primary, "the sentinels name another primary");
        }
        let link = known.link_to(&primary);
        known.take_route(Routes::One(Arc::clone(&link)));
        // Not one more write to the old one.
        known.retire_all_but(&link);
        *believed = Some(Believed { primary, epoch, good: Instant::now() });
        known.settle(Ok(()));
    }
}
