//! No-op servers: axum and tonic with a fixed answer, as the upper bound for Tidegate.

use axum::Router;
use axum::routing::post;
use tonic::{Request, Response, Status};

use tidegate_bench::proto::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use tidegate_bench::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

struct NoOp;

#[tonic::async_trait]
impl RateLimitService for NoOp {
    async fn should_rate_limit(
        &self,
        _: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        Ok(Response::new(RateLimitResponse { overall_code: 1, ..RateLimitResponse::default() }))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut addresses = std::env::args().skip(1);
    let (http, grpc) =
        (addresses.next().ok_or("HTTP address")?, addresses.next().ok_or("gRPC address")?);
    let answer = concat!(
        r#"{"allowed":true,"policy":"p","limit":1000000000,"#,
        r#""remaining":999999999,"retry_after_ms":0}"#
    );
    let fixed = post(move |body: String| async move {
        let _ = body;
        answer
    });
    let router = Router::new().route("/v1/acquire", fixed.clone()).route("/v1/peek", fixed);
    let listener = tokio::net::TcpListener::bind(http).await?;
    let http = tokio::spawn(async move { axum::serve(listener, router).await });
    tonic::transport::Server::builder()
        .add_service(RateLimitServiceServer::new(NoOp))
        .serve(grpc.parse()?)
        .await?;
    http.await??;
    Ok(())
}
