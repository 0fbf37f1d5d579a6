//! No-op proxy on bare hyper, without limits, as the upper bound for the gateway: each connection of
//! a client has its own connection to the upstream, and only the Host of a request is changed.

use std::convert::Infallible;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::service::service_fn;
use hyper::{Request, Response, header};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;

async fn forward(
    upstream: &Mutex<SendRequest<Incoming>>,
    host: header::HeaderValue,
    mut request: Request<Incoming>,
) -> hyper::Result<Response<Incoming>> {
    request.headers_mut().insert(header::HOST, host);
    let mut upstream = upstream.lock().await;
    upstream.ready().await?;
    upstream.send_request(request).await
}

async fn serve(client: TcpStream, address: String) -> Result<(), Box<dyn std::error::Error>> {
    let stream = TcpStream::connect(&address).await?;
    stream.set_nodelay(true)?;
    let (upstream, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let upstream = Arc::new(Mutex::new(upstream));
    let host = header::HeaderValue::from_str(&address)?;
    let answer = service_fn(|request| {
        let (upstream, host) = (Arc::clone(&upstream), host.clone());
        async move { forward(&upstream, host, request).await }
    });
    let server = hyper::server::conn::http1::Builder::new();
    // Both in one task, which needs no wake-up from one to the other.
    tokio::select! {
        closed = server.serve_connection(TokioIo::new(client), answer) => closed?,
        ended = connection => ended?,
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<Infallible, Box<dyn std::error::Error>> {
    let mut addresses = std::env::args().skip(1);
    let listen = addresses.next().ok_or("address to listen on")?;
    let upstream = addresses.next().ok_or("address of the upstream")?;
    let listener = TcpListener::bind(listen).await?;
    loop {
        let (client, _) = listener.accept().await?;
        client.set_nodelay(true)?;
        let upstream = upstream.clone();
        tokio::spawn(async move {
            // Errors are those of a connection.
            let _ = serve(client, upstream).await;
        });
    }
}
