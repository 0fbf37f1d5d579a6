//! An axum application that listens on the loopback, and an HTTP client for it.

use std::net::{Ipv4Addr, SocketAddr};

use axum::Router;
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A running server. It stops on drop.
pub(crate) struct Site {
    pub(crate) address: SocketAddr,
    serving: JoinHandle<()>,
}

/// A complete response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

#[derive(Clone)]
pub(crate) struct Asker {
    client: Client<HttpConnector, Full<Bytes>>,
    address: SocketAddr,
}

impl Site {
    pub(crate) async fn start(app: Router) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let app = app.into_make_service_with_connect_info::<SocketAddr>();
        let serving =
            tokio::spawn(async move { axum::serve(listener, app).await.expect("serves") });
        Self { address, serving }
    }

    pub(crate) fn asker(&self) -> Asker {
        Asker::of(self.address)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Asker {
    pub(crate) fn of(address: SocketAddr) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), address }
    }

    /// Sends a GET request with these headers.
    pub(crate) async fn get(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.ask("GET", path, headers).await
    }

    pub(crate) async fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        let mut request =
            Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self
            .client
            .request(request.body(Full::default()).expect("a request"))
            .await
            .expect("an answer");
        let (head, body) = response.into_parts();
        let body = body.collect().await.expect("a body").to_bytes();
        Answer {
            status: head.status,
            headers: head.headers,
            body: String::from_utf8(body.into()).expect("text"),
        }
    }
}

impl Answer {
    /// A header's value; empty if it is absent.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).expect("JSON")
    }
}
