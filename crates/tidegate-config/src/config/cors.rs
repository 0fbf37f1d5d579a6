//! The `gateway.cors` section: headers for scripts in browsers.

use std::net::Ipv6Addr;

use crate::yaml::Document;
use http::{HeaderName, HeaderValue};
use serde_saphyr::Spanned;

use super::raw;
use crate::yaml::ConfigError;

/// Maximum number of origins, and of exposed headers.
const MAX_ENTRIES: usize = 100;
/// Headers that the gateway adds, in the spelling of their specifications.
const OWN_HEADERS: [&str; 6] = [
    "RateLimit",
    "RateLimit-Policy",
    "Retry-After",
    "X-RateLimit-Limit",
    "X-RateLimit-Remaining",
    "X-RateLimit-Reset",
];
const DEFAULT_PORTS: [(&str, u16); 2] = [("http", 80), ("https", 443)];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorsConfig {
    pub allowed: AllowedOrigins,
    pub allow_credentials: bool,
    /// Value of `Access-Control-Expose-Headers`.
    pub expose_headers: HeaderValue,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowedOrigins {
    Any,
    /// Origins as browsers send them.
    Listed(Vec<HeaderValue>),
}

pub(super) fn validate(
    document: &Document<'_>,
    raw: &raw::RawCors,
) -> Result<CorsConfig, ConfigError> {
    let allowed = origins(document, &raw.allow_origins)?;
    if allowed == AllowedOrigins::Any && raw.allow_credentials.get() {
        let message = "browsers reject * with allow_credentials: list the origins instead";
        return Err(document.error_at(&raw.allow_origins, message));
    }
    Ok(CorsConfig {
        allowed,
        allow_credentials: raw.allow_credentials.get(),
        expose_headers: exposed(document, raw)?,
    })
}

fn origins(
    document: &Document<'_>,
    list: &Spanned<Vec<Spanned<String>>>,
) -> Result<AllowedOrigins, ConfigError> {
    if !(1..=MAX_ENTRIES).contains(&list.value.len()) {
        let message = format!("list 1 to {MAX_ENTRIES} origins, such as https://app.example.com");
        return Err(document.error_at(list, &message));
    }
    if let Some(any) = list.value.iter().find(|entry| entry.value == "*") {
        if list.value.len() > 1 {
            return Err(document.error_at(any, "* allows every origin: remove the others"));
        }
        return Ok(AllowedOrigins::Any);
    }
    let parse = |entry: &Spanned<String>| {
        origin(&entry.value).ok_or_else(|| {
            let message = format!(
                "{:?} is not an origin: write it like https://app.example.com or \
                 http://localhost:3000, without a path, or * for all",
                entry.value
            );
            document.error_at(entry, &message)
        })
    };
    Ok(AllowedOrigins::Listed(list.value.iter().map(parse).collect::<Result<_, _>>()?))
}

/// Returns an origin as browsers send it: in lower case, and without the default port.
fn origin(text: &str) -> Option<HeaderValue> {
    let text = text.to_ascii_lowercase();
    let (scheme, authority) = text.split_once("://")?;
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_lowercase())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let host_end = authority.find(']').map_or_else(|| authority.find(':'), |end| Some(end + 1));
    let (host, port) = authority.split_at(host_end.unwrap_or(authority.len()));
    let is_name = !host.is_empty()
        && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_host = is_name || address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
    if !is_scheme || !is_host {
        return None;
    }
    let port = if port.is_empty() { None } else { Some(port_number(port.strip_prefix(':')?)?) };
    let is_default = port.is_some_and(|port| DEFAULT_PORTS.contains(&(scheme, port)));
    let port = port.filter(|_| !is_default).map_or_else(String::new, |port| format!(":{port}"));
    HeaderValue::try_from(format!("{scheme}://{host}{port}")).ok()
}

/// Parses digits. The parser of numbers also accepts a sign.
fn port_number(text: &str) -> Option<u16> {
    text.parse().ok().filter(|_| text.bytes().all(|digit| digit.is_ascii_digit()))
}

fn exposed(document: &Document<'_>, raw: &raw::RawCors) -> Result<HeaderValue, ConfigError> {
    let Some(list) = &raw.expose_headers else {
        return join(document, OWN_HEADERS.into_iter());
    };
    if list.value.len() > MAX_ENTRIES {
        let message = format!("list at most {MAX_ENTRIES} headers");
        return Err(document.error_at(list, &message));
    }
    for entry in &list.value {
        if HeaderName::try_from(entry.value.as_str()).is_err() {
            let message = format!("{:?} is not the name of a header", entry.value);
            return Err(document.error_at(entry, &message));
        }
        if entry.value == "*" && raw.allow_credentials.get() {
            let message = "browsers ignore * with allow_credentials: list the headers instead";
            return Err(document.error_at(entry, message));
        }
    }
    join(document, list.value.iter().map(|entry| entry.value.as_str()))
}

fn join<'a>(
    document: &Document<'_>,
    names: impl Iterator<Item = &'a str>,
) -> Result<HeaderValue, ConfigError> {
    let names: Vec<&str> = names.collect();
    HeaderValue::try_from(names.join(", ")).map_err(|error| document.error(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_have_the_form_that_browsers_send() {
        for (text, expected) in [
            ("https://app.example.com", "https://app.example.com"),
            ("HTTPS://App.Example.com:443", "https://app.example.com"),
            ("http://localhost:80", "http://localhost"),
            ("http://localhost:0080", "http://localhost"),
            ("https://localhost:80", "https://localhost:80"),
            ("http://localhost:8080", "http://localhost:8080"),
            ("http://[::1]:3000", "http://[::1]:3000"),
            ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ] {
            assert_eq!(origin(text).expect(text), expected);
        }
        for text in [
            "app.example.com",
            "https://app.example.com/",
            "https://app.example.com/path",
            "https://user@app.example.com",
            "https://*.example.com",
            "https://bücher.example",
            "https://a b",
            "https://",
            "://a",
            "1://a",
            "https://a:",
            "https://a:123456",
            "https://a:+443",
            "https://a:443:443",
            "https://[zz]",
            "https://[::1",
            "https://[::1]443",
            "https://::1",
            "https://a[::1]",
            "null",
            "",
        ] {
            assert_eq!(origin(text), None, "{text}");
        }
    }
}
