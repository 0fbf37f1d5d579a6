//! `tidegate bench`: load for a store or a running service.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use clap::builder::{FalseyValueParser, Resettable};
use serde_json::{Value, json};
use tidegate::{MemoryStore, Quota};
use tidegate_config::duration::readable;

use self::flags::{LoadFlags, LoadPolicyFlags, TargetFlags};
use super::redis::RedisFlags;
use crate::bench::grpc::{GrpcQuery, GrpcTarget};
use crate::bench::http::HttpTarget;
use crate::bench::keys::{KEY, KeySpace};
use crate::bench::report::{BenchReport, TargetSummary};
use crate::bench::resp::RespTarget;
use crate::bench::store::StoreTarget;
use crate::bench::web::{Door, WebTarget};
use crate::bench::{self, LoadMeasurement, LoadPlan};
use crate::simulate::log::LogArgs;
use crate::tool::client::{self, ClientOptions, Trust};
use crate::tool::output;
use tidegate_config::{Config, RedisTopology, Secret, StoreConfig};

mod flags;

/// Load a store or a running service, and measure throughput and latency.
///
/// With --rate, requests are sent at their due times, and latency is measured from these times: a
/// target that stalls shows in all requests that were due meanwhile. Without it, each caller waits
/// for its answer before the next request. The first Ctrl-C ends the load and prints the result so
/// far. Exit code: 0 if requests were answered, 1 if all failed, 2 on an error.
#[derive(Debug, Args)]
#[command(mut_arg("access_log", |flag| flag.env(Resettable::Reset)))]
#[command(mut_arg("redis", |flag| {
    flag.conflicts_with_all(flags::OF_SERVICE).conflicts_with_all(flags::OF_GRPC)
}))]
#[command(after_help = "\
Examples:
  Decisions in memory, as fast as this machine can:
    tidegate bench

  Redis with 20000 requests per second, a few keys with most of them:
    tidegate bench --redis redis://127.0.0.1:6379 --rate 20000 --distribution zipf \\
      --algorithm token-bucket --limit 100 --window 1s

  A running service, with a quota in each request, or a policy of the service:
    tidegate bench --http http://127.0.0.1:8080 --limit 100 --window 60s
    tidegate bench --http http://127.0.0.1:8080 --policy per-user --rate 5000 --arrivals poisson

  Its policies selected by attributes, and Envoy's protocol:
    tidegate bench --http http://127.0.0.1:8080 --attribute path=/api/items \\
      --attribute 'header.x-user-id={key}'
    tidegate bench --grpc 127.0.0.1:8081 --domain shop --descriptor 'path=/checkout,user={key}'

  The Redis protocol, a gateway, and forward-auth:
    tidegate bench --resp 127.0.0.1:8083 --policy per-user
    tidegate bench --gateway http://127.0.0.1:8000 --attribute path=/api/items \
      --attribute 'header.x-user-id={key}'

  The requests of yesterday, sixty times as fast:
    tidegate bench --forward-auth http://127.0.0.1:8080 --access-log access.log --speed 60

  A hundred requests for one key, as JSON:
    tidegate bench --requests 100 --distribution hot --limit 10 --window 1h --json")]
pub struct BenchCommand {
    #[command(flatten)]
    target: TargetFlags,

    #[command(flatten)]
    redis: RedisFlags,

    #[command(flatten)]
    load: LoadFlags,

    #[command(flatten)]
    policy: LoadPolicyFlags,

    #[command(flatten)]
    logs: LogArgs,

    /// Print one JSON object
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

/// Kind of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chosen<'a> {
    Store,
    Http(&'a str),
    Grpc(&'a str),
    Resp(&'a str),
    Web(Door, &'a str),
}

impl BenchCommand {
    pub fn run(mut self) -> anyhow::Result<ExitCode> {
        let keys = self.load.keys()?;
        let logs = self.logs.is_given().then(|| std::mem::take(&mut self.logs));
        let load = self.load.load(Arc::clone(&keys), logs)?;
        let chosen = self.chosen()?;
        ensure!(
            load.replay.is_none() || matches!(chosen, Chosen::Web(..)),
            "--access-log is only for --gateway and --forward-auth"
        );
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let (target, measured) = runtime.block_on(async {
            match chosen {
                Chosen::Store => self.load_store(&load).await,
                Chosen::Http(url) => self.load_http(url, &load, &keys).await,
                Chosen::Grpc(address) => self.load_grpc(address, &load, &keys).await,
                Chosen::Resp(address) => self.load_resp(address, &load, &keys).await,
                Chosen::Web(door, url) => self.load_web(door, url, &load).await,
            }
        })?;
        // Requests without an answer must not delay the exit.
        runtime.shutdown_background();
        let report = BenchReport { target, load, measured };
        output::print(self.json.then(|| report.to_json()), |output| report.write(output))?;
        Ok(if report.all_failed() { ExitCode::from(1) } else { ExitCode::SUCCESS })
    }

    fn chosen(&self) -> anyhow::Result<Chosen<'_>> {
        let TargetFlags { http, grpc, resp, gateway, forward_auth, .. } = &self.target;
        let given = [
            http.as_deref().map(Chosen::Http),
            grpc.as_deref().map(Chosen::Grpc),
            resp.as_deref().map(Chosen::Resp),
            gateway.as_deref().map(|url| Chosen::Web(Door::Gateway, url)),
            forward_auth.as_deref().map(|url| Chosen::Web(Door::ForwardAuth, url)),
        ];
        let chosen = given.into_iter().flatten().next().unwrap_or(Chosen::Store);
        self.target.check(chosen)?;
        Ok(chosen)
    }

    async fn load_store(
        &self,
        load: &LoadPlan,
    ) -> anyhow::Result<(TargetSummary, LoadMeasurement)> {
        let config = self.target.config.as_deref().map(Config::load).transpose()?;
        let quota = self.policy.quota(config.as_ref())?;
        let cost = self.policy.cost;
        ensure!(
            cost >= 1 && cost <= quota.burst(),
            "--cost {cost} is out of range: it must be from 1 to the limit of {}",
            quota.burst()
        );
        let store = config.map_or(StoreConfig::Memory(Box::default()), |config| config.store);
        let store = if self.target.memory { StoreConfig::Memory(Box::default()) } else { store };
        let requests = describe(&quota);
        match self.redis.apply(store)? {
            StoreConfig::Memory(settings) => {
                let store = MemoryStore::builder().max_keys(settings.max_keys).build();
                let target = StoreTarget::new(store, quota, cost);
                let summary = TargetSummary::new("memory", "memory", requests);
                Ok((summary, bench::run(load, target).await?))
            }
            StoreConfig::Redis(redis) => {
                self.redis.print_warning();
                let prefix = &self.target.prefix;
                let redis = redis.with_prefix(prefix).with_timeout(self.load.timeout);
                let store = redis.builder().connect().await.context("--redis")?;
                let target = StoreTarget::new(store, quota, cost);
                let measured = bench::run(load, target).await?;
                let note = format!(
                    "the keys of this run start with {prefix}:{{{}; each has an expiry, so they \
                     need no clean-up",
                    load.keys.prefix
                );
                let name = match redis.topology() {
                    RedisTopology::Single => "Redis",
                    RedisTopology::Cluster => "Redis Cluster",
                    RedisTopology::Sentinel => "Redis with Sentinel",
                };
                let summary = TargetSummary::new("redis", name, requests);
                Ok((TargetSummary { note: Some(note), ..summary }, measured))
            }
        }
    }

    async fn load_http(
        &self,
        url: &str,
        load: &LoadPlan,
        keys: &KeySpace,
    ) -> anyhow::Result<(TargetSummary, LoadMeasurement)> {
        let (body, requests) = self.http_body(keys)?;
        let token = self.token()?;
        tidegate_net::raise_file_limit();
        let target = HttpTarget::connect(&self.client(url, token.as_ref()), &body, keys).await?;
        self.load.check_key("--attribute", target.has_key())?;
        let summary = TargetSummary::new("http", url, requests);
        Ok((summary, bench::run(load, target).await?))
    }

    /// Returns the body of all requests with the placeholder of the key, and its description.
    fn http_body(&self, keys: &KeySpace) -> anyhow::Result<(Value, String)> {
        let placeholder = keys.placeholder();
        let attributes = &self.target.attributes;
        let (mut body, description) = match &self.policy.policy {
            Some(policy) => {
                let body = json!({"policy": policy, "key": placeholder});
                (body, format!("policy {policy}"))
            }
            None if !attributes.is_empty() => {
                let pairs = attributes.iter().map(|(name, value)| {
                    (name.clone(), Value::from(value.replace(KEY, &placeholder)))
                });
                let names: Vec<&str> = attributes.iter().map(|(name, _)| name.as_str()).collect();
                let body = json!({"attributes": pairs.collect::<serde_json::Map<_, _>>()});
                (body, format!("attributes {}", names.join(", ")))
            }
            None => {
                let quota = self.policy.quota(None)?;
                let quota_body = self.policy.quota_body(&quota);
                (json!({"key": placeholder, "quota": quota_body}), describe(&quota))
            }
        };
        ensure!(self.policy.cost >= 1, "--cost 0 is out of range: it must be at least 1");
        if self.policy.cost > 1 {
            body["cost"] = json!(self.policy.cost);
        }
        Ok((body, description))
    }

    async fn load_grpc(
        &self,
        address: &str,
        load: &LoadPlan,
        keys: &KeySpace,
    ) -> anyhow::Result<(TargetSummary, LoadMeasurement)> {
        let TargetFlags { domain, descriptors, connections, .. } = &self.target;
        let (Some(domain), false) = (domain, descriptors.is_empty()) else {
            bail!("--grpc needs --domain NAME and --descriptor KEY=VALUE, such as user={KEY}");
        };
        let cost = u32::try_from(self.policy.cost).ok().filter(|cost| *cost >= 1);
        let cost = cost.with_context(|| {
            format!(
                "--cost {} is out of range: it must be from 1 to {}",
                self.policy.cost,
                u32::MAX
            )
        })?;
        let query = GrpcQuery { domain, descriptors, cost };
        let token = self.token()?;
        let client = self.client(address, token.as_ref());
        let target = GrpcTarget::connect(&client, query, keys, *connections).await?;
        self.load.check_key("--descriptor", target.has_key())?;
        let summary = TargetSummary::new("grpc", address, format!("domain {domain}"));
        Ok((summary, bench::run(load, target).await?))
    }

    async fn load_resp(
        &self,
        address: &str,
        load: &LoadPlan,
        keys: &KeySpace,
    ) -> anyhow::Result<(TargetSummary, LoadMeasurement)> {
        let (arguments, requests) = self.policy.resp_arguments(&keys.placeholder())?;
        let token = self.token()?;
        tidegate_net::raise_file_limit();
        let client = self.client(address, token.as_ref());
        let target = RespTarget::connect(&client, &arguments, keys).await?;
        let summary = TargetSummary::new("resp", address, requests);
        Ok((summary, bench::run(load, target).await?))
    }

    async fn load_web(
        &self,
        door: Door,
        url: &str,
        load: &LoadPlan,
    ) -> anyhow::Result<(TargetSummary, LoadMeasurement)> {
        let token = self.token()?;
        tidegate_net::raise_file_limit();
        let client = self.client(url, token.as_ref());
        let (policy, is_replay) = (self.policy.policy.as_deref(), load.replay.is_some());
        let attributes = &self.target.attributes;
        let target = WebTarget::connect(&client, door, policy, attributes, is_replay).await?;
        self.load.check_key("--attribute", target.has_key())?;
        let names: Vec<&str> = attributes.iter().map(|(name, _)| name.as_str()).collect();
        let requests = match load.replay {
            Some(_) => "requests of a log".to_owned(),
            None => format!("attributes {}", names.join(", ")),
        };
        let kind = match door {
            Door::Gateway => "gateway",
            Door::ForwardAuth => "forward-auth",
        };
        let summary = TargetSummary::new(kind, url, requests);
        Ok((summary, bench::run(load, target).await?))
    }

    fn token(&self) -> anyhow::Result<Option<Secret>> {
        self.target.token_file.as_deref().map(client::read_token).transpose()
    }

    fn client<'a>(&'a self, address: &'a str, token: Option<&'a Secret>) -> ClientOptions<'a> {
        let trust = Trust::Authorities(self.target.ca.as_deref());
        ClientOptions { address, token, trust, timeout: self.load.timeout }
    }
}

/// Describes a quota, such as `token-bucket, 100 per 1s, burst 500`.
fn describe(quota: &Quota) -> String {
    let (algorithm, limit, window) = (quota.algorithm(), quota.limit(), readable(quota.window()));
    let burst = match quota.burst() {
        burst if burst == limit => String::new(),
        burst => format!(", burst {burst}"),
    };
    format!("{algorithm}, {limit} per {window}{burst}")
}
