//! Group commit on a cluster of three nodes, compared with a single server.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tempfile::TempDir;
use tidegate::{Limiter, RedisStore};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use super::Redis;
use super::callers::{self, CallerKeys};
use super::decisions::{LIMIT, WINDOW, store};
use super::naive::Structure;

pub(crate) const CASE: &str = "random/512";
pub(crate) const SINGLE: &str = "one server";
pub(crate) const CLUSTER: &str = "cluster of three nodes";

const NODES: usize = 3;
const SLOTS: usize = 16_384;
const CALLERS: usize = 512;

/// Primaries on loopback that share the slots.
struct Cluster {
    nodes: Vec<Redis>,
    /// The nodes keep their configurations in it.
    _folder: TempDir,
}

impl Cluster {
    fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut nodes = Vec::new();
        for number in 0..NODES {
            let config = folder.path().join(format!("nodes-{number}.conf"));
            let config = config.to_string_lossy();
            nodes.push(Redis::start_with(&[
                "--cluster-enabled",
                "yes",
                "--cluster-config-file",
                &config,
            ])?);
        }
        for (number, node) in nodes.iter().enumerate() {
            let mut connection = node.connection()?;
            let mut command = ::redis::cmd("CLUSTER");
            command.arg("SET-CONFIG-EPOCH").arg(number + 1).exec(&mut connection)?;
            let slots: Vec<_> = (SLOTS * number / NODES..SLOTS * (number + 1) / NODES).collect();
            ::redis::cmd("CLUSTER").arg("ADDSLOTS").arg(slots).exec(&mut connection)?;
            let mut command = ::redis::cmd("CLUSTER");
            command.arg("MEET").arg("127.0.0.1").arg(nodes[0].port()).exec(&mut connection)?;
        }
        let cluster = Self { nodes, _folder: folder };
        cluster.wait_until_ready()?;
        Ok(cluster)
    }

    /// Waits until each node knows the owners of all slots.
    fn wait_until_ready(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        for node in &self.nodes {
            let mut connection = node.connection()?;
            loop {
                let info: String = ::redis::cmd("CLUSTER").arg("INFO").query(&mut connection)?;
                let nodes: String = ::redis::cmd("CLUSTER").arg("NODES").query(&mut connection)?;
                let connected = nodes.lines().filter(|line| line.contains(" connected ")).count();
                if info.contains("cluster_state:ok") && connected == NODES {
                    break;
                }
                ensure!(Instant::now() < deadline, "the cluster is not ready: {info}{nodes}");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        Ok(())
    }
}

/// A deployment: its servers, and the library's store on it.
struct Deployment<'a> {
    name: &'static str,
    servers: &'a [Redis],
}

impl Deployment<'_> {
    async fn connect(&self) -> Result<Limiter<RedisStore>> {
        let builder = match self.servers {
            [server] => store(server),
            servers => {
                RedisStore::cluster(servers.iter().map(Redis::url)).timeout(Duration::from_secs(5))
            }
        };
        Ok(Limiter::new(builder.connect().await?))
    }

    fn sum(&self, number: impl Fn(&Redis) -> Result<f64>) -> Result<f64> {
        self.servers.iter().map(number).sum()
    }
}

pub(crate) fn run(plan: Plan) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (single, cluster) = (Redis::start()?, Cluster::start()?);
    let deployments = [
        Deployment { name: SINGLE, servers: std::slice::from_ref(&single) },
        Deployment { name: CLUSTER, servers: &cluster.nodes },
    ];
    let quota = Structure::LogPacked.quota(LIMIT, WINDOW)?;
    let mut results = Results::new("cluster", plan);
    // A round before the first one loads the scripts and creates keys.
    for round in 0..=plan.rounds() {
        for turn in 0..deployments.len() {
            let deployment = &deployments[(turn + round) % deployments.len()];
            for server in deployment.servers {
                server.reset_statistics()?;
            }
            let before = deployment.sum(Redis::cpu_seconds)?;
            let result = runtime.block_on(async {
                let limiter = deployment.connect().await?;
                callers::run(&limiter, &quota, CallerKeys::Random, CALLERS, plan.turn()).await
            })?;
            ensure!(
                (result.allowed - result.decisions).abs() < 0.5,
                "{}: {} of {} decisions denied",
                deployment.name,
                result.decisions - result.allowed,
                result.decisions
            );
            if round == 0 {
                continue;
            }
            let micros = (deployment.sum(Redis::cpu_seconds)? - before) * 1e6 / result.decisions;
            let calls = deployment.sum(Redis::script_calls)? / result.decisions;
            results.add(CASE, deployment.name, "per_second", result.per_second);
            results.add(CASE, deployment.name, "median_micros", result.median_micros);
            results.add(CASE, deployment.name, "redis_micros", micros);
            results.add(CASE, deployment.name, "redis_calls", calls);
        }
    }
    for deployment in &deployments {
        let of =
            |metric| results.spread(CASE, deployment.name, metric).map_or(f64::NAN, |s| s.median);
        println!(
            "{}: {:.0} decisions/s, {:.3} calls and {:.2} µs of Redis per decision",
            deployment.name,
            of("per_second"),
            of("redis_calls"),
            of("redis_micros")
        );
    }
    results.save()
}
