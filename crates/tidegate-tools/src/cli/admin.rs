//! Flags of commands that ask the admin listener of a running service, and their requests.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use clap::Args;
use http::{Method, StatusCode, header};
use http_body_util::Full;

use crate::tool::client::{
    ClientOptions, Endpoint, ServiceKind, Trust, problem_detail, read_body, read_token,
};
use tidegate_config::Secret;

/// Variable with the token, which must not be an argument: all users see those.
const TOKEN_VARIABLE: &str = "TIDEGATE_ADMIN_TOKEN";
const TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(super) struct AdminFlags {
    /// URL of the admin listener: http://HOST:PORT, https:// for TLS, or unix:PATH
    #[arg(long, value_name = "URL", env = "TIDEGATE_ADMIN", global = true)]
    #[arg(default_value = "http://127.0.0.1:8082")]
    pub(super) admin: String,

    /// File with the token of the admin listener [default: the variable `TIDEGATE_ADMIN_TOKEN`]
    #[arg(long, value_name = "FILE", env = "TIDEGATE_ADMIN_TOKEN_FILE", global = true)]
    token_file: Option<PathBuf>,

    /// File with the certificates to trust, in place of those of the system
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CA", global = true)]
    pub(super) ca: Option<PathBuf>,
}

impl AdminFlags {
    pub(super) fn token(&self) -> anyhow::Result<Option<Secret>> {
        if let Some(file) = &self.token_file {
            return read_token(file).map(Some);
        }
        match std::env::var(TOKEN_VARIABLE) {
            Ok(token) if !token.is_empty() => Ok(Some(Secret::new(token))),
            Ok(_) | Err(std::env::VarError::NotPresent) => Ok(None),
            Err(_) => bail!("{TOKEN_VARIABLE} is not UTF-8"),
        }
    }

    /// Sends a request, and returns the body of a response that reports success.
    pub(super) async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> anyhow::Result<Bytes> {
        let sent = async {
            let token = self.token()?;
            let endpoint = Endpoint::parse(
                ServiceKind::Admin,
                &ClientOptions {
                    address: &self.admin,
                    token: token.as_ref(),
                    trust: Trust::Authorities(self.ca.as_deref()),
                    timeout: TIMEOUT,
                },
            )?;
            let mut connection = endpoint.open().await.context("does the service run?")?;
            let request = endpoint.request(method, endpoint.call_path(path)?.as_str());
            let request = request.header(header::CONNECTION, "close");
            let request = request.header(header::CONTENT_TYPE, "application/json");
            let request = request.body(Full::from(body.unwrap_or_default()))?;
            let response = connection.send_request(request).await?;
            let status = response.status();
            let body = read_body(response.into_body()).await?;
            if status.is_success() {
                return Ok(body);
            }
            let detail = problem_detail(&body).unwrap_or_else(|| status.to_string());
            let hint = match status {
                StatusCode::UNAUTHORIZED => {
                    "; give the token with --token-file FILE or TIDEGATE_ADMIN_TOKEN"
                }
                _ => "",
            };
            bail!("{detail}{hint}")
        };
        match tokio::time::timeout(TIMEOUT, sent).await {
            Ok(answer) => answer.with_context(|| format!("--admin {}", self.admin)),
            Err(_) => bail!("--admin {}: no answer within {TIMEOUT:?}", self.admin),
        }
    }
}
