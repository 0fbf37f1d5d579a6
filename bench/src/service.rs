//! The service on Redis: an exact packed log, random keys, everything (clients, service, Redis) on
//! the same cores, against servers of the same protocols that do nothing, asked the same.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::grpc::random_users;
use crate::http::{check_grpc, start_do_nothing};
use crate::load::{Load, wrk};
use crate::process::{Server, free_port, our_binary};
use crate::redis::Redis;

struct Contestant {
    name: &'static str,
    server: Server,
    http: u16,
    grpc: u16,
}

pub(crate) fn run(plan: Plan) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let redis = Redis::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let contestants = [tidegate(folder.path(), &redis)?, do_nothing()?];
    for contestant in &contestants {
        runtime.block_on(check_grpc(contestant.grpc))?;
    }
    let mut results = Results::new("service", plan);
    let load = |protocol: &str, contestant: &Contestant, plan: Plan| {
        if protocol == "http" {
            let script = random_posts(folder.path(), contestant.http)?;
            let url = format!("http://127.0.0.1:{}", contestant.http);
            return wrk(&contestant.server, &script, &url, plan.turn());
        }
        Load::around(&contestant.server, || {
            runtime.block_on(random_users(contestant.grpc, plan.turn()))
        })
    };
    for protocol in ["http", "grpc"] {
        for contestant in &contestants {
            load(protocol, contestant, Plan::Quick)?;
        }
        for round in 0..plan.rounds() {
            for turn in 0..contestants.len() {
                let contestant = &contestants[(turn + round) % contestants.len()];
                redis.reset_statistics()?;
                let before = redis.processor_time()?;
                let load = load(protocol, contestant, plan)?;
                results.add(protocol, contestant.name, "per_second", load.per_second);
                results.add(protocol, contestant.name, "processor_micros", load.processor_micros);
                if contestant.name == "tidegate" {
                    let decisions = load.per_second * plan.turn().as_secs_f64();
                    let micros = (redis.processor_time()? - before) * 1e6;
                    results.add(protocol, contestant.name, "redis_micros", micros / decisions);
                    results.add(
                        protocol,
                        contestant.name,
                        "redis_calls",
                        redis.script_calls()? / decisions,
                    );
                }
            }
        }
        if let (Some(rate), Some(ratio)) = (
            results.spread(protocol, "tidegate", "per_second"),
            results.ratio("per_second", (protocol, "tidegate"), (protocol, "do-nothing")),
        ) {
            println!("{protocol} on Redis: {:.0} a second, {ratio} of doing nothing", rate.median);
        }
    }
    results.save()
}

fn tidegate(folder: &Path, redis: &Redis) -> Result<Contestant> {
    let (http, grpc, admin) = (free_port()?, free_port()?, free_port()?);
    let config = folder.join("tidegate.yaml");
    // A long timeout: what is measured is Redis, not the fallback while it is late.
    std::fs::write(
        &config,
        format!(
            "listen: {{http: '127.0.0.1:{http}', grpc: '127.0.0.1:{grpc}', admin: '127.0.0.1:{admin}'}}\n\
             store: {{redis: '{}', timeout: 2s}}\n\
             policies:\n  \
             - {{name: log, match: {{domain: bench}}, key: [descriptor.user], algorithm: sliding-log, encoding: packed, \
                 limit: 100, window: 60s}}\n",
            redis.url()
        ),
    )?;
    let mut command = Command::new(our_binary("tidegate")?);
    let server =
        Server::start("tidegate", command.arg("serve").arg("--config").arg(config), &[http, grpc])?;
    Ok(Contestant { name: "tidegate", server, http, grpc })
}

fn do_nothing() -> Result<Contestant> {
    let (http, grpc) = (free_port()?, free_port()?);
    Ok(Contestant { name: "do-nothing", server: start_do_nothing(http, grpc)?, http, grpc })
}

/// A script for wrk that asks for somebody else each time. The request is put together by hand,
/// which costs wrk a fraction of what its own `wrk.format` does.
fn random_posts(folder: &Path, port: u16) -> Result<PathBuf> {
    let body = r#"{"policy":"log","key":""#;
    let length = body.len() + 8 + 2;
    let lua = format!(
        "local head = 'POST /v1/acquire HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\nContent-Type: application/json\\r\\n\
         Content-Length: {length}\\r\\n\\r\\n{body}'\n\
         math.randomseed(os.time())\n\
         request = function() return head .. string.format('%08d', math.random(0, 999999)) .. '\"}}' end\n"
    );
    let path = folder.join(format!("random-{port}.lua"));
    std::fs::write(&path, lua)?;
    Ok(path)
}
