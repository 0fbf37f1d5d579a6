//! Envoy's rate limit service over the network, called by a real gRPC client.

#[path = "../support/mod.rs"]
mod support;

/// Charges, refunds and peeks of requests.
mod charges;
/// Decisions while the store is unavailable.
mod failures;
/// Rules in several files, folders and patterns.
mod files;
/// Units that requests hold until they end.
mod holds;
/// Metrics, logs and the admin API, as an operator sees them.
mod operator;
/// Calls that cannot be decided.
mod rejections;
/// Shadow mode, dynamic metadata, shared counts and what is left.
mod responses;
/// Rules, descriptors and hits of envoyproxy/ratelimit.
mod rules;

use support::{Service, with_free_ports};
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::DescriptorStatus;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tidegate_api::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate_api::envoy::r#type::v3::RateLimitUnit;
use tonic::Status;
use tonic::transport::Channel;

const RULES: &str = include_str!("../data/envoy-ratelimit.yaml");
const FILES: &str = "envoy: {files: [ratelimit.yaml]}\n";

/// Starts the service with the sample rules of ratelimit, and a client.
async fn start(config: &str) -> (Service, Client) {
    start_on(config, RULES).await
}

/// Waits if the minute ends soon: rules use fixed windows of the clock, none of which may end
/// during a test.
async fn wait_for_time_in_the_minute() {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("after 1970")
        .as_secs();
    if now % 60 >= 50 {
        tokio::time::sleep(std::time::Duration::from_secs(60 - now % 60)).await;
    }
}

/// Starts the service with these rules.
async fn start_on(config: &str, rules: &str) -> (Service, Client) {
    wait_for_time_in_the_minute().await;
    let folder = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(folder.path().join("ratelimit.yaml"), rules).expect("written");
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, with_free_ports(config)).expect("written");
    let service = Service::start_on(folder, &file, &[]);
    let client = Client(RateLimitServiceClient::new(channel(&service).await));
    (service, client)
}

struct Client(RateLimitServiceClient<Channel>);

impl Client {
    async fn try_send(&mut self, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        self.0.should_rate_limit(request).await.map(tonic::Response::into_inner)
    }

    /// Sends one descriptor of the domain `edge`.
    async fn send(&mut self, entries: &[(&str, &str)]) -> DescriptorStatus {
        let mut response = self.send_all(vec![descriptor(entries)]).await;
        assert_eq!(response.statuses.len(), 1);
        assert_eq!(response.overall_code, response.statuses[0].code);
        response.statuses.remove(0)
    }

    async fn send_all(&mut self, descriptors: Vec<RateLimitDescriptor>) -> RateLimitResponse {
        let request = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 };
        self.try_send(request).await.expect("a response")
    }
}

async fn channel(service: &Service) -> Channel {
    let address = format!("http://{}", service.grpc.as_deref().expect("an address"));
    Channel::from_shared(address).expect("an address").connect().await.expect("the service listens")
}

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry =
        |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
    RateLimitDescriptor {
        entries: entries.iter().map(entry).collect(),
        ..RateLimitDescriptor::default()
    }
}

/// Adds a limit per hour to a descriptor.
fn with_limit(descriptor: RateLimitDescriptor, requests_per_unit: u32) -> RateLimitDescriptor {
    let limit = RateLimitOverride { requests_per_unit, unit: RateLimitUnit::Hour.into() };
    RateLimitDescriptor { limit: Some(limit), ..descriptor }
}
