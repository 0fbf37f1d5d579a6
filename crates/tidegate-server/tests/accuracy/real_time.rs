//! A killed server and a failover, in real time: three instances with the wrappers of
//! `tidegate serve` around Redis, and requests that are sent on schedule.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate::{Charge, DenyCache, Fallback, Fleet, Limiter, MemoryStore, RedisStore, Source};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep_until};

use crate::Place;
use crate::form::Form;
use crate::oracle::{Figures, Observed, observed_figures};
use crate::sentinel::{NAME, Sentinels};
use crate::support::{Cluster, Redis, TEST_TIMEOUT};
use crate::traffic::{LOADS, Traffic};
use tidegate_tools::simulate::load::LoadKind;

pub(crate) const LIMIT: u64 = 30;
pub(crate) const WINDOW: Duration = Duration::from_secs(2);
const INSTANCES: usize = 3;
/// Number of runs, each with new servers.
const RUNS: usize = 3;
/// Time of the outage after the start: in the middle of a boundary and of the attack.
const MOMENT: Duration = Duration::from_secs(6);
/// Time until a killed server is started again. A cluster does not fail over that soon.
const DOWNTIME: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outage {
    /// The server is killed, and started again without its counts.
    Killed,
    /// The server is killed, and a replica is promoted.
    Failover,
}

impl Outage {
    pub(crate) const ALL: [Self; 2] = [Self::Killed, Self::Failover];
}

/// Figures of one form under one load, for each run.
pub(crate) struct Measured {
    pub(crate) form: Form,
    pub(crate) load: LoadKind,
    pub(crate) place: Place,
    pub(crate) runs: Vec<Figures>,
}

/// Results of an outage, with the share of the requests that the fallback decided.
pub(crate) struct Outcome {
    pub(crate) rows: Vec<Measured>,
    pub(crate) local: Vec<(Place, f64)>,
}

type Instance = Limiter<Fallback<DenyCache<RedisStore>>>;

enum Servers {
    Single(Redis),
    Replicated(Sentinels),
    /// A cluster, and the index of the node to kill.
    Cluster(Cluster, usize),
}

impl Servers {
    fn start(place: Place, outage: Outage) -> Self {
        match (place, outage) {
            (Place::Cluster, _) => {
                let cluster = Cluster::start();
                let victim = cluster.owner_of("{any}");
                Self::Cluster(cluster, victim)
            }
            (_, Outage::Killed) => Self::Single(Redis::start()),
            (_, Outage::Failover) => Self::Replicated(Sentinels::start()),
        }
    }

    async fn instance(&self) -> Instance {
        let builder = match self {
            Self::Single(redis) => RedisStore::builder(&redis.url()),
            Self::Replicated(sentinels) => RedisStore::sentinel(NAME, sentinels.urls()),
            Self::Cluster(cluster, _) => RedisStore::cluster(cluster.urls()),
        };
        let store = builder.timeout(Duration::from_millis(100)).connect().await;
        let cached = DenyCache::new(store.expect("our own server answers"));
        let fallback = Fallback::builder(cached).fleet(Fleet::new()).local(MemoryStore::new());
        Limiter::new(fallback.build())
    }

    /// Returns a name for a client, whose count is on the node to kill.
    fn client_name(&self, base: &str, store: &RedisStore, form: Form) -> String {
        let Self::Cluster(cluster, victim) = self else { return base.to_owned() };
        let quota = form.quota(LIMIT, WINDOW);
        let mut names = (0..1_000).map(|number| format!("{base}-{number}"));
        let is_on_victim = |name: &String| {
            let charge = Charge::new(name, &quota).with_policy("accuracy");
            cluster.owner_of(&store.redis_key(&charge)) == *victim
        };
        names.find(is_on_victim).expect("a name within a thousand")
    }

    fn break_down(&mut self, outage: Outage) {
        let server = match self {
            Self::Single(redis) => redis,
            Self::Replicated(sentinels) => sentinels.server_mut(0),
            Self::Cluster(cluster, victim) => cluster.node_mut(*victim),
        };
        server.kill();
        if outage == Outage::Killed {
            std::thread::sleep(DOWNTIME);
            server.restart();
        }
    }

    /// Asserts that the outage was the one that the table names.
    fn assert_happened(&self, outage: Outage) {
        if outage == Outage::Failover {
            match self {
                Self::Single(_) => {}
                Self::Replicated(sentinels) => assert!(sentinels.promoted(0).is_some()),
                Self::Cluster(cluster, victim) => {
                    assert_eq!(cluster.other_primaries(*victim), 3, "a replica is promoted");
                }
            }
        }
    }
}

/// Requests of one form under one load, and the observed decisions of each client.
struct Stream {
    form: Form,
    load: LoadKind,
    names: Vec<String>,
    observed: Mutex<Vec<Vec<Observed>>>,
    local: Mutex<usize>,
}

/// Measures all forms and loads together, on Redis and on a cluster, several times.
pub(crate) async fn measure(outage: Outage) -> Outcome {
    let mut outcome = Outcome { rows: Vec::new(), local: Vec::new() };
    for place in [Place::Redis, Place::Cluster] {
        let (mut local, mut requests) = (0, 0);
        let first = outcome.rows.len();
        for number in 0..RUNS {
            let streams = run(place, outage).await;
            for (index, stream) in streams.iter().enumerate() {
                let mut figures = Figures::default();
                for observed in &*stream.observed.lock().expect("no panic") {
                    let window = u64::try_from(WINDOW.as_micros()).expect("short");
                    figures.add(&observed_figures(observed, LIMIT, window));
                    requests += observed.len();
                }
                local += *stream.local.lock().expect("no panic");
                if number == 0 {
                    let Stream { form, load, .. } = **stream;
                    outcome.rows.push(Measured { form, load, place, runs: Vec::new() });
                }
                outcome.rows[first + index].runs.push(figures);
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        outcome.local.push((place, local as f64 / requests as f64));
    }
    outcome
}

async fn run(place: Place, outage: Outage) -> Vec<Arc<Stream>> {
    let mut servers = block_in_place(|| Servers::start(place, outage));
    let mut instances = Vec::new();
    for _ in 0..INSTANCES {
        instances.push(servers.instance().await);
    }
    wait_for_fleet(&instances).await;
    let streams = block_in_place(|| streams(&servers, instances[0].store().store().store()));
    let start = next_start();
    let mut tasks = JoinSet::new();
    for stream in &streams {
        tasks.spawn(drive(Arc::clone(stream), instances.clone(), start));
    }
    sleep_until(start + MOMENT).await;
    block_in_place(|| servers.break_down(outage));
    while let Some(task) = tasks.join_next().await {
        task.expect("no panic");
    }
    block_in_place(|| servers.assert_happened(outage));
    streams
}

/// Waits until each instance knows its share. Before that, its local decisions would be too strict.
async fn wait_for_fleet(instances: &[Instance]) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !instances.iter().all(|instance| instance.store().fleet().size() == INSTANCES) {
        assert!(Instant::now() < deadline, "the instances do not find each other");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn streams(servers: &Servers, store: &RedisStore) -> Vec<Arc<Stream>> {
    let mut streams = Vec::new();
    for form in Form::ALL {
        for load in LOADS {
            let clients = Traffic::with_quota(load, LIMIT, WINDOW).clients;
            let name =
                |client| servers.client_name(&format!("{form:?}-{load:?}-{client}"), store, form);
            streams.push(Arc::new(Stream {
                form,
                load,
                names: (0..clients).map(name).collect(),
                observed: Mutex::new(vec![Vec::new(); clients]),
                local: Mutex::new(0),
            }));
        }
    }
    streams
}

/// Returns the next start of a window of the wall clock, which is also that of Redis.
fn next_start() -> Instant {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let period = (2 * WINDOW).as_micros();
    let wait = 2 * period - since_epoch.as_micros() % period;
    Instant::now() + Duration::from_micros(u64::try_from(wait).expect("short"))
}

/// Sends the requests of a stream on schedule, to each instance in turn.
async fn drive(stream: Arc<Stream>, instances: Vec<Instance>, start: Instant) {
    let traffic = Traffic::with_quota(stream.load, LIMIT, WINDOW);
    let mut calls = JoinSet::new();
    for (request, instance) in traffic.requests.iter().zip(instances.iter().cycle()) {
        sleep_until(start + Duration::from_micros(request.time - traffic.start)).await;
        let (stream, instance, client) = (Arc::clone(&stream), instance.clone(), request.client);
        calls.spawn(async move {
            let quota = stream.form.quota(LIMIT, WINDOW);
            let charge = Charge::new(&stream.names[client], &quota).with_policy("accuracy");
            let sent = micros(start.elapsed());
            let decision = instance.acquire(&charge).await.expect("`local` always decides");
            let responded = micros(start.elapsed());
            let observed = Observed { sent, responded, is_allowed: decision.allowed };
            stream.observed.lock().expect("no panic")[client].push(observed);
            let is_local = decision.source == Source::Local;
            *stream.local.lock().expect("no panic") += usize::from(is_local);
        });
    }
    while let Some(call) = calls.join_next().await {
        call.expect("no panic");
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("short")
}
