//! Detects a URL with the wrong scheme: `rediss://` for a port without TLS, or `redis://` for one with
//! TLS. Neither side reports it, so the port is asked in the other way. Nothing secret is sent.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore};

/// Reason for the error of a `rediss://` URL.
pub(crate) const NO_TLS: &str = "the server speaks no TLS on this port, and the URL is rediss://: \
                                 use redis://, or the server's TLS port";
/// Reason for the error of a `redis://` URL.
pub(crate) const ONLY_TLS: &str = "the server speaks TLS on this port, and the URL is redis://: \
                                   use rediss://, or the server's port without TLS";

/// Duration of a TLS handshake after which the port is asked without TLS. A Redis without TLS waits
/// for the rest of a command and answers nothing. It is shorter than any connect timeout.
const PLAIN_PROBE_AFTER: Duration = Duration::from_millis(250);
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);

/// Result of a TLS handshake.
pub(crate) enum Handshake {
    Done(Box<TlsStream<TcpStream>>),
    /// The server speaks no TLS.
    Plain,
}

/// Performs the TLS handshake, unless the server turns out to speak no TLS. The server's
/// certificate must have this name.
pub(crate) async fn handshake(
    config: &Arc<ClientConfig>,
    name: ServerName<'static>,
    (host, port): (&str, u16),
    stream: TcpStream,
) -> io::Result<Handshake> {
    let plain = async {
        sleep(PLAIN_PROBE_AFTER).await;
        if !speaks_plain(host, port).await {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        done = TlsConnector::from(Arc::clone(config)).connect(name, stream) => match done {
            Ok(stream) => Ok(Handshake::Done(Box::new(stream))),
            Err(_) if speaks_plain(host, port).await => Ok(Handshake::Plain),
            Err(error) => Err(error),
        },
        () = plain => Ok(Handshake::Plain),
    }
}

/// Returns whether the port answers a command without TLS.
async fn speaks_plain(host: &str, port: u16) -> bool {
    let first = first_byte_of_answer(host, port, b"PING\r\n").await;
    first.is_some_and(|byte| matches!(byte, b'+' | b'-'))
}

/// Returns whether the port answers the first message of a TLS handshake.
pub(crate) async fn speaks_tls(host: &str, port: u16) -> bool {
    // The types of the records handshake and alert.
    let is_record = |byte| matches!(byte, 0x16 | 0x15);
    match client_hello(host) {
        Some(hello) => first_byte_of_answer(host, port, &hello).await.is_some_and(is_record),
        None => false,
    }
}

/// Returns the first message of a TLS handshake. No certificate matters so early.
fn client_hello(host: &str) -> Option<Vec<u8>> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .ok()?
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).ok()?;
    let mut hello = Vec::new();
    ClientConnection::new(Arc::new(config), name).ok()?.write_tls(&mut hello).ok()?;
    Some(hello)
}

async fn first_byte_of_answer(host: &str, port: u16, message: &[u8]) -> Option<u8> {
    let ask = async {
        let mut stream = TcpStream::connect((host, port)).await.ok()?;
        stream.write_all(message).await.ok()?;
        stream.read_u8().await.ok()
    };
    timeout(PROBE_TIMEOUT, ask).await.ok()?
}
