//! A worker process of the fleet: some of the instances, in one thread.

use std::io::{BufRead as _, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::redis::aio::MultiplexedConnection;
use anyhow::{Context, Result, ensure};
use tidegate::{Charge, Limiter, Quota, RedisStore};

use super::{Counts, OURS, SHARED_USERS, Task};
use crate::process::own_cpu_seconds;
use crate::redis::call::user_name;
use crate::redis::connect_multiplexed;
use crate::redis::decisions::{LIMIT, WINDOW};
use crate::redis::naive::Structure;
use crate::redis::random::Random;

/// Name of the command that starts a worker.
pub(crate) const COMMAND: &str = "fleet-worker";

/// Number of requests of which one is for a shared user.
const SHARED_EVERY: u64 = 64;
const RANDOM_USERS: u64 = 1_000_000;

/// Connection of an instance, which its callers share.
#[derive(Clone)]
enum Client {
    Tidegate(Limiter<RedisStore>, Arc<Quota>),
    Naive(MultiplexedConnection, Structure, Arc<str>),
}

impl Client {
    async fn connect(task: &Task) -> Result<Self> {
        let structure = Structure::from_name(&task.structure)?;
        if task.candidate == OURS {
            let store = RedisStore::builder(&task.url).timeout(Duration::from_secs(5));
            let quota = Arc::new(structure.quota(LIMIT, WINDOW)?);
            return Ok(Self::Tidegate(Limiter::new(store.connect().await?), quota));
        }
        let mut connection = ::redis::Client::open(task.url.as_str())?.get_connection()?;
        let hash = structure.load_naive_script(&mut connection)?;
        Ok(Self::Naive(connect_multiplexed(&task.url).await?, structure, hash.into()))
    }

    async fn acquire(&mut self, name: &str) -> Result<bool> {
        match self {
            Self::Tidegate(limiter, quota) => {
                Ok(limiter.acquire(&Charge::new(name, quota)).await?.allowed)
            }
            Self::Naive(connection, structure, hash) => {
                let mut command = ::redis::cmd("EVALSHA");
                command.arg(&**hash).arg(1).arg(structure.naive_key(name));
                command.arg(LIMIT).arg(WINDOW.as_secs() * 1_000_000);
                let (allowed, _remaining): (u64, u64) = command.query_async(connection).await?;
                Ok(allowed == 1)
            }
        }
    }
}

/// Connects the instances, waits for a line of standard input, runs, and prints the counts.
pub(crate) fn run(task: &str) -> Result<()> {
    let task = Arc::new(serde_json::from_str::<Task>(task).context("the task of a worker")?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut clients = Vec::new();
    for number in 0..task.instances {
        let mut client = runtime.block_on(Client::connect(&task))?;
        // The first decision of an instance may load the script.
        let name = user_name("start", task.seed + number as u64);
        ensure!(runtime.block_on(client.acquire(&name))?, "the first decision was denied");
        clients.push(client);
    }
    println!("ready");
    std::io::stdout().flush()?;
    std::io::stdin().lock().read_line(&mut String::new())?;
    let cpu_seconds = own_cpu_seconds()?;
    let mut counts = runtime.block_on(run_callers(&task, &clients))?;
    counts.cpu_seconds = own_cpu_seconds()? - cpu_seconds;
    println!("{}", serde_json::to_string(&counts)?);
    Ok(())
}

async fn run_callers(task: &Arc<Task>, clients: &[Client]) -> Result<Counts> {
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(task.seconds);
    let callers: Vec<_> = clients
        .iter()
        .flat_map(|client| std::iter::repeat_n(client, task.callers))
        .enumerate()
        .map(|(number, client)| {
            let random = Random::new(task.seed + number as u64);
            tokio::spawn(run_caller(client.clone(), Arc::clone(task), random, end))
        })
        .collect();
    let mut counts = Counts::default();
    for caller in callers {
        counts.add(&caller.await??);
    }
    counts.seconds = start.elapsed().as_secs_f64();
    Ok(counts)
}

async fn run_caller(
    mut client: Client,
    task: Arc<Task>,
    mut random: Random,
    end: Instant,
) -> Result<Counts> {
    let mut counts = Counts::default();
    while Instant::now() < end {
        let (count, name) = if random.below(SHARED_EVERY) == 0 {
            let number = random.below(SHARED_USERS as u64);
            let count = counts.shared.get_mut(usize::try_from(number)?);
            (count.context("a shared user")?, user_name(&task.shared, number))
        } else {
            (&mut counts.random, user_name("user", random.below(RANDOM_USERS)))
        };
        count[0] += 1;
        count[1] += u64::from(client.acquire(&name).await?);
    }
    Ok(counts)
}
