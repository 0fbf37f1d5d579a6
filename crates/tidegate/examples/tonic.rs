//! A tonic server that admits three requests per minute from each tenant, and a client that prints
//! when to retry.
//!
//! ```sh
//! cargo run -p tidegate --example tonic
//! ```

use std::error::Error;
use std::net::Ipv4Addr;
use std::time::Duration;

use tidegate::layer::RateLimitLayer;
use tidegate::{KeySource, Limiter, MemoryStore, Quota};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt as _;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let quota = Quota::sliding_log(3, Duration::from_secs(60))?;
    let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota)
        .policy("per-tenant")
        .by(KeySource::header("x-tenant")?);

    // Add your own service here; the health service is only an example.
    let (_, health) = tonic_health::server::health_reporter();
    let incoming = TcpIncoming::bind((Ipv4Addr::LOCALHOST, 0).into())?;
    let address = incoming.local_addr()?;
    tokio::spawn(Server::builder().layer(layer).add_service(health).serve_with_incoming(incoming));

    let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
    let mut client = HealthClient::new(channel);
    for _ in 0..4 {
        let mut request = tonic::Request::new(HealthCheckRequest::default());
        request.metadata_mut().insert("x-tenant", "acme".parse()?);
        match client.check(request).await {
            Ok(response) => println!("allowed: {:?}", response.metadata().get("ratelimit")),
            Err(status) => {
                println!("{:?}: {}", status.code(), status.message());
                println!(
                    "retry in {:?}",
                    status.get_details_retry_info().and_then(|info| info.retry_delay)
                );
            }
        }
    }
    Ok(())
}
