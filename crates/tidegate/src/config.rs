//! Policies from a file: the `policies` of the service's own configuration, for a service that
//! limits itself.
//!
//! ```
//! use tidegate::Policies;
//!
//! let policies = Policies::from_yaml(
//!     "limits.yaml",
//!     "
//! policies:
//!   - name: per-user
//!     match: {path: '/api/**'}
//!     key: [header.x-user-id]
//!     limit: 100
//!     window: 60s
//! ",
//! )?;
//! assert!(policies.get("per-user").is_some());
//!
//! let wrong = Policies::from_yaml("limits.yaml", "policies:\n  - {name: a, limt: 5, window: 60s}\n").unwrap_err();
//! assert!(wrong.to_string().starts_with("limits.yaml:2:15: unknown field `limt`"));
//! # Ok::<(), tidegate::config::ConfigError>(())
//! ```

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_saphyr::Spanned;

mod document;
pub mod duration;
mod message;
mod number;
mod policy;
mod secrets;

pub use document::{ConfigError, Document};
pub use number::Whole;
pub use policy::{OneOrMany, RawPolicy};

use crate::policy::{AttributeNames, Policies, PolicyError};

/// The file of the service. What is not about limits is its own affair: known by name, and not
/// looked at.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    listen: IgnoredAny,
    store: IgnoredAny,
    client_ip: IgnoredAny,
    auth: IgnoredAny,
    tls: IgnoredAny,
    headers: IgnoredAny,
    envoy: IgnoredAny,
    gateway: IgnoredAny,
    attributes: Vec<Spanned<String>>,
    policies: Vec<RawPolicy>,
}

impl Policies {
    /// The policies of a file, as `tidegate serve` and `tidegate gateway` have them; the rest of it
    /// is not looked at.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let name = path.as_ref().display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::unreadable(&name, &error.to_string()))?;
        Self::from_yaml(&name, &text)
    }

    /// The same of a text; `name` is what errors call it.
    pub fn from_yaml(name: &str, text: &str) -> Result<Self, ConfigError> {
        let document = Document::new(name, text);
        let file: File = document.parse()?;
        Self::from_raw(&document, &file.attributes, file.policies)
    }

    /// Validates the declared attributes and the policies of a document.
    pub fn from_raw(
        document: &Document<'_>,
        attributes: &[Spanned<String>],
        policies: Vec<RawPolicy>,
    ) -> Result<Self, ConfigError> {
        let mut declared = AttributeNames::default();
        for name in attributes {
            declared
                .declare(&name.value)
                .map_err(|error| document.at(name, &format!("attributes: {error}")))?;
        }
        let mut names = BTreeSet::new();
        if let Some(twice) = policies
            .iter()
            .map(|policy| &policy.name)
            .find(|name| !names.insert(name.value.clone()))
        {
            return Err(document.at(twice, &PolicyError::Twice(twice.value.clone()).to_string()));
        }
        let policies = policies.into_iter().map(|policy| policy.validate(document, &declared));
        let policies = policies.collect::<Result<_, _>>()?;
        let set = Self::new(policies).map_err(|error| document.plain(&error.to_string()))?;
        Ok(set.with_attribute_names(&declared))
    }
}
