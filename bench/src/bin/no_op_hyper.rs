//! No-op server on bare hyper: a fixed answer without a router, as the upper bound for the HTTP API.

use std::convert::Infallible;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;

const ANSWER: &str = concat!(
    r#"{"allowed":true,"policy":"p","limit":1000000000,"#,
    r#""remaining":999999999,"retry_after_ms":0}"#
);

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, hyper::Error> {
    // A server that does not read the body would have to close the connection.
    request.into_body().collect().await?;
    Ok(Response::new(Full::new(Bytes::from_static(ANSWER.as_bytes()))))
}

#[tokio::main]
async fn main() -> Result<Infallible, Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).ok_or("HTTP address")?;
    let listener = tokio::net::TcpListener::bind(address).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(async move {
            let server = hyper::server::conn::http1::Builder::new();
            // Errors are those of the client's connection.
            let _ = server.serve_connection(TokioIo::new(stream), service_fn(answer)).await;
        });
    }
}
