//! Policies from a YAML file: the sections `policies`, `attributes` and `paths` of the service's
//! configuration, for an application that embeds the limiter.
//!
//! ```
//! let policies = tidegate_config::parse_policies(
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
//! let text = "policies:\n  - {name: a, limt: 5, window: 60s}\n";
//! let error = tidegate_config::parse_policies("limits.yaml", text).unwrap_err();
//! assert!(error.to_string().starts_with("limits.yaml:2:15: unknown field `limt`"));
//! # Ok::<(), tidegate_config::ConfigError>(())
//! ```

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_saphyr::Spanned;

mod cost;
pub mod holds;
mod limits;
mod paths;
mod policy;
pub mod schema;
mod window;

pub use paths::RawPaths;
pub use policy::OneOrMany;
use policy::PolicyRules;
pub use policy::RawPolicy;

use schemars::schema_for;
use tidegate::{AttributeNames, Policies, PolicyError};

use crate::yaml::{ConfigError, Document, Redaction, resembles, schema_fields};

/// The sections that this library reads. Other sections belong to the program that the file
/// configures, and are ignored. `policies` is required, and a misspelling of these names is an
/// error, because it would silently disable all limits.
#[derive(Debug)]
struct PolicySections {
    attributes: Vec<Spanned<String>>,
    paths: RawPaths,
    policies: Vec<RawPolicy>,
}

/// The bits of [`ClientIp::default`](tidegate::ClientIp).
pub(crate) const DEFAULT_IPV6_PREFIX: u8 = 64;

const SECTIONS: [&str; 3] = ["attributes", "paths", "policies"];

impl<'de> Deserialize<'de> for PolicySections {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SectionsVisitor;
        impl<'de> Visitor<'de> for SectionsVisitor {
            type Value = PolicySections;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PolicySections, A::Error> {
                let mut attributes = Vec::new();
                let mut paths = RawPaths::default();
                let mut policies = None;
                while let Some(section) = map.next_key::<String>()? {
                    match section.as_str() {
                        "attributes" => attributes = map.next_value()?,
                        "paths" => paths = map.next_value()?,
                        "policies" => policies = Some(map.next_value()?),
                        other if SECTIONS.iter().any(|name| resembles(other, name)) => {
                            return Err(de::Error::unknown_field(other, &SECTIONS));
                        }
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                let policies = policies.ok_or_else(|| de::Error::missing_field("policies"))?;
                Ok(PolicySections { attributes, paths, policies })
            }
        }
        deserializer.deserialize_map(SectionsVisitor)
    }
}

/// Names of the sections of policies that error messages may show.
const NAMES: Redaction = Redaction {
    open_sections: &[],
    secret_fields: &[],
    other_fields: &[],
    all_fields: || {
        let mut names = schema_fields(schema_for!(RawPolicy));
        names.extend(schema_fields(schema_for!(RawPaths)));
        names.extend(SECTIONS.map(str::to_owned));
        names
    },
};

/// Loads the policies of a file, such as the configuration of `tidegate serve`. Sections other
/// than `policies`, which is required, `attributes` and `paths` are ignored. `${NAME}` in a value
/// stands for an environment variable, which must be set; `${NAME:-default}` has a default.
///
/// ```no_run
/// use tidegate::layer::RateLimitLayer;
/// use tidegate::{Limiter, MemoryStore};
///
/// # fn main() -> Result<(), tidegate_config::ConfigError> {
/// let policies = tidegate_config::load_policies("/etc/tidegate.yaml")?;
/// let layer = RateLimitLayer::with_policies(Limiter::new(MemoryStore::new()), policies);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// The file cannot be read, is not YAML, or has an invalid policy.
pub fn load(path: impl AsRef<Path>) -> Result<Policies, ConfigError> {
    let name = path.as_ref().display().to_string();
    let text =
        std::fs::read_to_string(path).map_err(|error| ConfigError::from_io(&name, &error))?;
    parse(&name, &text)
}

/// Parses the policies of a YAML text. `name` is the file name in error messages.
pub fn parse(name: &str, text: &str) -> Result<Policies, ConfigError> {
    parse_for(name, text, DEFAULT_IPV6_PREFIX)
}

/// Parses the policies for requests whose IPv6 addresses count together by this prefix.
pub(crate) fn parse_for(name: &str, text: &str, ipv6_prefix: u8) -> Result<Policies, ConfigError> {
    let document = Document::new(name, text).with_redaction(&NAMES);
    let PolicySections { attributes, paths, policies } = document.parse()?;
    from_raw(&document, &attributes, &paths, ipv6_prefix, policies)
}

/// Validates the declared attributes, the path rules and the policies of a document, for a program
/// that parses the whole file itself; see the example of [`Document`]. The addresses of its IPv6
/// clients count together by `ipv6_prefix` bits.
pub fn from_raw(
    document: &Document<'_>,
    attributes: &[Spanned<String>],
    paths: &RawPaths,
    ipv6_prefix: u8,
    policies: Vec<RawPolicy>,
) -> Result<Policies, ConfigError> {
    let mut declared = AttributeNames::default();
    for name in attributes {
        declared
            .declare(&name.value)
            .map_err(|error| document.error_at(name, &format!("attributes: {error}")))?;
    }
    let mut names = BTreeSet::new();
    if let Some(twice) =
        policies.iter().map(|policy| &policy.name).find(|name| !names.insert(name.value.clone()))
    {
        let error = PolicyError::Twice(twice.value.clone());
        return Err(document.error_at(twice, &error.to_string()));
    }
    let rules = paths.validate(document)?;
    let read = PolicyRules { attributes: &declared, paths: rules, ipv6_prefix };
    let policies = policies.into_iter().map(|policy| policy.validate(document, &read));
    let policies = policies.collect::<Result<_, _>>()?;
    let set = Policies::with_rules(policies, rules);
    let set = set.map_err(|error| document.error(&error.to_string()))?;
    Ok(set.with_attribute_names(&declared))
}
