//! An axum service that admits ten requests per minute from each client.
//!
//! ```sh
//! cargo run -p tidegate --example axum
//! for i in $(seq 12); do curl -si http://127.0.0.1:3000/ | head -1; done
//! ```
//!
//! With `REDIS_URL`, all processes on the same Redis share their counts. Start each on a different
//! port:
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1:6379 cargo run -p tidegate --example axum -- 3001
//! ```

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::get;
use tidegate::layer::RateLimitLayer;
use tidegate::{KeySource, Limiter, MemoryStore, Quota, QuotaError, RedisStore, Store};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let app = match std::env::var("REDIS_URL") {
        Ok(url) => app(Limiter::new(RedisStore::connect(&url).await?))?,
        Err(_) => app(Limiter::new(MemoryStore::new()))?,
    };
    let port = std::env::args().nth(1).map_or(Ok(3000), |port| port.parse())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    println!("try: curl -i http://{}/", listener.local_addr()?);
    // The limit counts by the addresses of the peers.
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

fn app<S: Store>(limiter: Limiter<S>) -> Result<Router, QuotaError> {
    let quota = Quota::sliding_log(10, Duration::from_secs(60))?;
    let layer = RateLimitLayer::new(limiter, quota)
        .policy("per-client")
        .by(KeySource::client_ip())
        .peer(|head| head.extensions.get::<ConnectInfo<SocketAddr>>().map(|peer| peer.ip()))
        .exempt_preflight()
        .refund_on(|status| status.is_server_error());
    Ok(Router::new().route("/", get(async || "hello\n")).layer(layer))
}
