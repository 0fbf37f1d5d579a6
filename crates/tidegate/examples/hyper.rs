//! A plain hyper server that admits five requests per ten seconds for each API key.
//!
//! ```sh
//! cargo run -p tidegate --example hyper
//! for i in $(seq 6); do curl -si -H 'x-api-key: k1' http://127.0.0.1:3000/ | head -1; done
//! ```

use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tidegate::tower::RateLimitLayer;
use tidegate::{Limiter, MemoryStore, Quota};
use tokio::net::TcpListener;
use tower::Layer as _;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let quota = Quota::sliding_log(5, Duration::from_secs(10))?;
    let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota).by("header.x-api-key");
    // Each connection gets a clone; all clones share the counts.
    let service = layer.layer(tower::service_fn(hello));

    let port = std::env::args().nth(1).unwrap_or_else(|| "3000".to_owned());
    let listener = TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    println!("try: curl -i -H 'x-api-key: k1' http://{}/", listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        let service = TowerToHyperService::new(service.clone());
        tokio::spawn(async move {
            if let Err(error) =
                http1::Builder::new().serve_connection(TokioIo::new(stream), service).await
            {
                eprintln!("{error}");
            }
        });
    }
}

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hello\n")))
}
