//! [`ShowKeys`]: whether operators see the keys of a policy or only their hashes.

use crate::enum_names::enum_names;

/// Names of headers, query parameters and other attributes that hold credentials, in lower case,
/// with dashes and without `x-` at the start.
const CREDENTIALS: [&str; 8] = [
    "authorization",
    "proxy-authorization",
    "cookie",
    "api-key",
    "apikey",
    "auth-token",
    "access-token",
    "token",
];

/// Form in which the keys of a policy are shown, such as in the hot keys of the service. The keys
/// that are counted, also in Redis, stay as they are.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Policy, Quota, ShowKeys};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let policy = Policy::builder("per-token", quota).key(["header.authorization"]);
/// assert_eq!(policy.clone().build()?.show_keys(), ShowKeys::Hashed);
/// assert_eq!(policy.show_keys(ShowKeys::Plain).build()?.show_keys(), ShowKeys::Plain);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShowKeys {
    /// As they are counted.
    Plain,
    /// As hashes: for keys that are credentials.
    Hashed,
}

enum_names!(ShowKeys, "show_keys", Plain = "plain", Hashed = "hashed");

impl ShowKeys {
    /// Returns the form for a key of these attributes. It is [`Hashed`](Self::Hashed) if one of
    /// them usually holds credentials: a cookie, or an attribute with a name such as
    /// `authorization`, `x-api-key` or `access_token`.
    ///
    /// ```
    /// use tidegate::ShowKeys;
    ///
    /// assert_eq!(ShowKeys::default_for(["ip", "cookie.session"]), ShowKeys::Hashed);
    /// assert_eq!(ShowKeys::default_for(["header.x-user-id"]), ShowKeys::Plain);
    /// ```
    #[must_use]
    pub fn default_for<'a>(attributes: impl IntoIterator<Item = &'a str>) -> Self {
        if attributes.into_iter().any(is_credential) { Self::Hashed } else { Self::Plain }
    }
}

fn is_credential(attribute: &str) -> bool {
    let name = match attribute.split_once('.') {
        Some(("cookie", _)) => return true,
        Some(("header" | "query" | "descriptor", name)) => name,
        _ => attribute,
    };
    let name = name.to_ascii_lowercase().replace('_', "-");
    CREDENTIALS.contains(&name.strip_prefix("x-").unwrap_or(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_names_of_credentials_are_recognized() {
        for name in [
            "header.authorization",
            "header.proxy-authorization",
            "header.cookie",
            "cookie.theme",
            "header.x-api-key",
            "query.api_key",
            "query.ApiKey",
            "descriptor.authorization",
            "access_token",
        ] {
            assert_eq!(ShowKeys::default_for([name]), ShowKeys::Hashed, "{name}");
        }
        for name in ["ip", "path", "header.x-user-id", "query.user", "tenant", "x.cookie"] {
            assert_eq!(ShowKeys::default_for([name]), ShowKeys::Plain, "{name}");
        }
    }
}
