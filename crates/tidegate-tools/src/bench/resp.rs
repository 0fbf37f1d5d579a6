//! [`RespTarget`]: `TG.ACQUIRE` of a running service, in the Redis protocol.

use std::sync::{Mutex, PoisonError};

use anyhow::bail;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

use super::keys::KeySpace;
use super::target::{Answer, LoadTarget, RequestError, within};
use super::template::Template;
use crate::tool::client::{ClientOptions, Endpoint, ServiceKind, ServiceStream};
use crate::tool::text::printable;

type Connection = BufReader<Box<dyn ServiceStream>>;

/// Client of the Redis protocol. A connection has one request at a time.
pub(crate) struct RespTarget {
    endpoint: Endpoint,
    /// Sent first on each connection.
    auth: Option<Vec<u8>>,
    acquire: Template,
    idle: Mutex<Vec<Connection>>,
}

impl RespTarget {
    /// Creates a client that sends these arguments, with the placeholder in place of the key. A
    /// first request, which spends nothing, shows whether the service accepts it.
    pub(crate) async fn connect(
        options: &ClientOptions<'_>,
        arguments: &[String],
        keys: &KeySpace,
    ) -> anyhow::Result<Self> {
        let command = |name: &str| {
            let arguments = arguments.iter().map(String::as_str);
            let command = encoded(std::iter::once(name).chain(arguments));
            Template::new(command, &keys.placeholder())
        };
        let target = Self {
            endpoint: Endpoint::parse(ServiceKind::Resp, options)?,
            auth: options.token.map(|token| encoded(["AUTH", token.reveal()])),
            acquire: command("TG.ACQUIRE"),
            idle: Mutex::default(),
        };
        match target.call(&command("TG.PEEK"), &keys.key(0)).await {
            Ok(_) => Ok(target),
            Err(error) => bail!("--resp {}: {}", options.address, error.message),
        }
    }

    async fn call(&self, command: &Template, key: &str) -> Result<Answer, RequestError> {
        within(self.endpoint.timeout, async {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self.open().await?,
            };
            let fields = exchange(&mut connection, &command.with_key(key)).await?;
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
            match fields.first().map(String::as_str) {
                Some(":1") => Ok(Answer::Allowed),
                Some(":0") => Ok(Answer::Denied),
                _ => Err(RequestError::new("not-resp", "this is not an answer of Tidegate")),
            }
        })
        .await
    }

    async fn open(&self) -> Result<Connection, RequestError> {
        let connected = self.endpoint.connect().await;
        let stream = connected.map_err(|error| RequestError::connect(&error))?;
        let mut connection = BufReader::new(stream);
        if let Some(auth) = &self.auth {
            exchange(&mut connection, auth).await?;
        }
        Ok(connection)
    }
}

impl LoadTarget for RespTarget {
    async fn acquire(&self, key: &str) -> Result<Answer, RequestError> {
        self.call(&self.acquire, key).await
    }
}

/// Sends a command, and returns the elements of its answer, an array or one text.
async fn exchange(
    connection: &mut Connection,
    command: &[u8],
) -> Result<Vec<String>, RequestError> {
    let closed = |error: std::io::Error| RequestError::new("connection-closed", error);
    connection.write_all(command).await.map_err(closed)?;
    connection.flush().await.map_err(closed)?;
    let mut fields = Vec::new();
    let mut left = 1_u64;
    while left > 0 {
        let mut line = String::new();
        if connection.read_line(&mut line).await.map_err(closed)? == 0 {
            return Err(RequestError::new("connection-closed", "the service closed it"));
        }
        left -= 1;
        let line = line.trim_end();
        match line.split_at_checked(1) {
            Some(("*", count)) if fields.is_empty() => left = count.parse().unwrap_or_default(),
            Some((":" | "+", _)) => fields.push(line.to_owned()),
            Some(("-", message)) => {
                let kind = message.split(' ').next().unwrap_or_default().to_owned();
                return Err(RequestError::new(kind, printable(message)));
            }
            _ => return Err(RequestError::new("not-resp", "this is not the Redis protocol")),
        }
    }
    Ok(fields)
}

/// Encodes a command as an array of texts.
fn encoded<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let arguments: Vec<String> = arguments
        .into_iter()
        .map(|argument| format!("${}\r\n{argument}\r\n", argument.len()))
        .collect();
    format!("*{}\r\n{}", arguments.len(), arguments.concat()).into_bytes()
}
