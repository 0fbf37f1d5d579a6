//! An axum application with the layer, run as several processes on one Redis.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use axum::Router;
use axum::routing::get;
use http::StatusCode;
use tidegate::layer::RateLimitLayer;
use tidegate::{Algorithm, Limiter, Quota, RedisStore};

use crate::site::{Asker, Site};
use crate::support::{LONG, Redis, TEST_TIMEOUT, every_quota};

const REDIS: &str = "TIDEGATE_TEST_REDIS";
const READY: &str = "listening on ";
const LIMIT: u64 = 200;

/// This test program, started as a server.
struct Instance {
    process: Child,
    address: SocketAddr,
}

impl Instance {
    fn start(redis: &Redis) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "fleet::an_instance", "--ignored", "--nocapture"])
            .env(REDIS, redis.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let mut lines =
            BufReader::new(process.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let address = lines.find_map(|line| line.split_once(READY)?.1.parse().ok());
        Self { process, address: address.expect("the server prints its address") }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns a quota per algorithm, except the leaky bucket, which would delay the requests by days.
fn quotas() -> Vec<Quota> {
    let all = every_quota(LIMIT, LONG).into_iter();
    all.filter(|quota| quota.algorithm() != Algorithm::LeakyBucket).collect()
}

async fn app(redis: &str) -> Router {
    let store =
        RedisStore::builder(redis).timeout(TEST_TIMEOUT).connect().await.expect("connected");
    let limiter = Limiter::new(store);
    quotas().into_iter().enumerate().fold(Router::new(), |app, (number, quota)| {
        let layer = RateLimitLayer::new(limiter.clone(), quota).policy(&number.to_string());
        app.route(&format!("/{number}"), get(async || "hello").layer(layer))
    })
}

#[tokio::test]
#[ignore = "a server for the test below, which starts it"]
async fn an_instance() {
    let site =
        Site::start(app(&std::env::var(REDIS).expect("started by the test below")).await).await;
    println!("{READY}{}", site.address);
    // Until the test closes standard input, or ends.
    let _ = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn several_processes_on_one_redis_admit_exactly_the_limit_in_total() {
    let redis = Redis::start();
    let instances: Vec<Instance> = (0..4).map(|_| Instance::start(&redis)).collect();
    for number in 0..quotas().len() {
        let path = format!("/{number}");
        let tasks: Vec<_> = (0..16)
            .map(|task: usize| {
                let asker = Asker::of(instances[task % instances.len()].address);
                let path = path.clone();
                tokio::spawn(async move {
                    let mut admitted = 0;
                    for _ in 0..20 {
                        let answer = asker.get(&path, &[]).await;
                        assert!(
                            [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS]
                                .contains(&answer.status),
                            "{answer:?}"
                        );
                        admitted += u64::from(answer.status == StatusCode::OK);
                    }
                    admitted
                })
            })
            .collect();
        let mut admitted = 0;
        for task in tasks {
            admitted += task.await.expect("no panic");
        }
        assert_eq!(admitted, LIMIT, "{path}");
    }
    redis.assert_every_key_expires();
}
