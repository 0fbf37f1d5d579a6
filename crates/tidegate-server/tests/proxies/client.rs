use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::TcpSocket;

use crate::support::{Response, TEST_TIMEOUT, read_response};

/// Client with the address 127.0.0.`0`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client(pub(crate) u8);

impl Client {
    pub(crate) fn get(self, proxy: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Response {
        self.send(proxy, "GET", path, headers, "").expect("the service listens")
    }

    pub(crate) fn post(
        self,
        proxy: SocketAddr,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Response {
        self.send(proxy, "POST", path, headers, body).expect("the service listens")
    }

    pub(crate) fn send(
        self,
        proxy: SocketAddr,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> io::Result<Response> {
        let mut request =
            format!("{method} {path} HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n");
        for (name, value) in headers {
            let _ = write!(request, "{name}: {value}\r\n");
        }
        let _ = write!(request, "Content-Length: {}\r\n\r\n{body}", body.len());
        self.try_send_bytes(proxy, request.as_bytes())
    }

    /// Sends a request as it is.
    pub(crate) fn send_bytes(self, proxy: SocketAddr, request: &[u8]) -> Response {
        self.try_send_bytes(proxy, request).expect("the service listens")
    }

    fn try_send_bytes(self, proxy: SocketAddr, request: &[u8]) -> io::Result<Response> {
        // std cannot bind the source address of a connection.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let stream = runtime.block_on(async {
            let socket = TcpSocket::new_v4()?;
            socket.bind((Ipv4Addr::new(127, 0, 0, self.0), 0).into())?;
            socket.connect(proxy).await?.into_std()
        });
        let mut stream = stream?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(TEST_TIMEOUT))?;
        stream.write_all(request)?;
        Ok(read_response(&mut stream))
    }
}
