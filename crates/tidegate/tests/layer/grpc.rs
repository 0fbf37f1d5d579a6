//! The layer in front of a tonic server, with a tonic client.

use std::net::Ipv4Addr;
use std::time::Duration;

use tidegate::layer::{QuotaRequestLimiter, RateLimitLayer};
use tidegate::{KeySource, Limiter, MemoryStore, Quota};
use tokio::task::JoinHandle;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Response, Status};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_types::StatusExt as _;

const DAY: Duration = Duration::from_secs(86_400);

/// The gRPC health service behind a layer. It stops on drop.
struct Grpc {
    client: HealthClient<Channel>,
    serving: JoinHandle<()>,
}

impl Grpc {
    async fn start(layer: RateLimitLayer<QuotaRequestLimiter>) -> Self {
        let (_reporter, health) = tonic_health::server::health_reporter();
        let incoming = TcpIncoming::bind((Ipv4Addr::LOCALHOST, 0).into()).expect("a free port");
        let address = incoming.local_addr().expect("bound");
        let serving =
            Server::builder().layer(layer).add_service(health).serve_with_incoming(incoming);
        let serving = tokio::spawn(async move { serving.await.expect("serves") });
        let channel =
            Endpoint::from_shared(format!("http://{address}")).expect("a URL").connect().await;
        Self { client: HealthClient::new(channel.expect("connected")), serving }
    }

    async fn check(
        &self,
        user: &str,
        service: &str,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let mut request = tonic::Request::new(HealthCheckRequest { service: service.to_owned() });
        request.metadata_mut().insert("x-user-id", user.parse().expect("text"));
        self.client.clone().check(request).await
    }
}

impl Drop for Grpc {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn layer(limit: u64) -> RateLimitLayer<QuotaRequestLimiter> {
    let quota = Quota::sliding_log(limit, DAY).expect("valid");
    let limiter = Limiter::new(MemoryStore::builder().max_keys(2).build());
    RateLimitLayer::new(limiter, quota)
        .policy("per-user")
        .by(KeySource::header("x-user-id").expect("valid"))
}

#[tokio::test]
async fn a_denied_call_is_resource_exhausted_with_retry_info() {
    let grpc = Grpc::start(layer(1)).await;
    let allowed = grpc.check("ann", "").await.expect("passes");
    let metadata = allowed.metadata().get("ratelimit").expect("the header").to_str().expect("text");
    assert!(metadata.starts_with(r#""per-user";r=0;t="#), "{metadata}");

    let denied = grpc.check("ann", "").await.expect_err("denied");
    assert_eq!(denied.code(), Code::ResourceExhausted);
    assert!(denied.message().contains("\"per-user\""), "{denied:?}");
    let wait =
        denied.get_details_retry_info().and_then(|info| info.retry_delay).expect("RetryInfo");
    assert!(wait <= DAY && wait + Duration::from_secs(60) > DAY, "{wait:?}");
    let header =
        denied.metadata().get("ratelimit-policy").expect("the header").to_str().expect("text");
    assert_eq!(header, r#""per-user";q=1;w=86400"#);
    assert!(denied.metadata().get("retry-after").is_some());
    assert!(grpc.check("bob", "").await.is_ok(), "another key");
}

#[tokio::test]
async fn a_store_failure_is_unavailable_and_a_bad_key_an_invalid_argument() {
    // The known keys are at their limit, so that they are not evicted for another one.
    let grpc = Grpc::start(layer(1)).await;
    for known in ["ann", "bob"] {
        assert!(grpc.check(known, "").await.is_ok());
    }
    assert_eq!(grpc.check("third", "").await.expect_err("no room").code(), Code::Unavailable);
    assert_eq!(
        grpc.check(&"x".repeat(600), "").await.expect_err("no key").code(),
        Code::InvalidArgument
    );
}

#[tokio::test]
async fn failed_calls_are_refunded_by_their_grpc_status() {
    let grpc =
        Grpc::start(layer(1).refund_on(|status| status == http::StatusCode::NOT_FOUND)).await;
    for _ in 0..3 {
        assert_eq!(
            grpc.check("ann", "no such service").await.expect_err("unknown").code(),
            Code::NotFound
        );
    }
    assert!(grpc.check("ann", "").await.is_ok());
    assert_eq!(grpc.check("ann", "").await.expect_err("spent").code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn calls_are_refunded_by_the_status_in_their_trailers() {
    let grpc = Grpc::start(layer(1).refund_on(|status| status.is_success())).await;
    let succeed = async {
        for _ in 0..5 {
            // The trailers do not wait for the refund.
            while grpc.check("ann", "").await.is_err() {
                tokio::task::yield_now().await;
            }
        }
        while grpc.check("ann", "no such service").await.expect_err("fails").code()
            != Code::NotFound
        {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), succeed).await.expect("successes are free");
    assert_eq!(grpc.check("ann", "").await.expect_err("spent").code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn the_peer_address_comes_from_tonic() {
    let peer = |head: &http::request::Parts| {
        head.extensions.get::<TcpConnectInfo>()?.remote_addr().map(|peer| peer.ip())
    };
    let grpc = Grpc::start(layer(1).by(KeySource::client_ip()).peer(peer)).await;
    assert!(grpc.check("ann", "").await.is_ok());
    assert_eq!(
        grpc.check("bob", "").await.expect_err("same address").code(),
        Code::ResourceExhausted
    );
}

#[tokio::test]
async fn calls_one_after_the_other_are_never_denied_in_flight() {
    let grpc = Grpc::start(layer(100).in_flight(1)).await;
    for _ in 0..20 {
        assert!(grpc.check("ann", "").await.is_ok());
        let failed = grpc.check("ann", "no such service").await.expect_err("unknown");
        assert_eq!(failed.code(), Code::NotFound, "the trailers are unchanged");
    }
}
