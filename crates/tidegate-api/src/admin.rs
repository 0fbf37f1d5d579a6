//! Bodies of the admin API.

use serde::{Deserialize, Serialize};

/// Health of an upstream of the gateway, judged by the requests to it.
#[derive(Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct UpstreamHealth {
    pub url: String,
    /// False after three failures in a row, until a request succeeds.
    pub up: bool,
    /// Whether it gets no requests for some seconds, unless all others are ejected, too.
    pub ejected: bool,
}

/// Limit that replaces that of a key, or of all keys of a policy, for a while.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetOverride {
    pub policy: String,
    pub key: KeyValues,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Such as 60s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<OverrideMode>,
    /// Time until the override ends, such as 2h, or never.
    #[schema(examples("2h", "never"))]
    pub expires_in: String,
    /// Why, for the audit.
    #[schema(min_length = 1, max_length = 500)]
    pub reason: String,
}

/// Key of an override: its value, or the values of several attributes in order, or `*` for all keys
/// of the policy.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(untagged)]
pub enum KeyValues {
    One(String),
    Many(Vec<String>),
}

impl KeyValues {
    pub fn texts(&self) -> &[String] {
        match self {
            Self::One(text) => std::slice::from_ref(text),
            Self::Many(texts) => texts,
        }
    }
}

/// Numbers of an override, or its mode. Numbers that are absent are those without the override.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct OverriddenLimits {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Such as 60s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<OverrideMode>,
}

/// Limit of a key without a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OverrideMode {
    /// The policy does not apply.
    Unlimited,
    /// Every request is denied.
    Block,
}

/// Override with its author, as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct StoredOverride {
    #[serde(flatten)]
    #[schema(inline)]
    pub limits: OverriddenLimits,
    #[serde(flatten)]
    #[schema(inline)]
    pub author: OverrideAuthor,
}

/// Author of a change, with the address and the reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct OverrideAuthor {
    /// Name of the token, or else the address.
    pub by: String,
    /// Address.
    pub from: String,
    pub reason: String,
}

/// Override that is set.
#[derive(Debug, Clone, Serialize, Deserialize, utoipa::ToSchema)]
pub struct OverrideBody {
    pub policy: String,
    /// In the form that the policy shows; `*` for all keys.
    pub key: String,
    #[serde(flatten)]
    #[schema(inline)]
    pub stored: StoredOverride,
    /// Milliseconds since the Unix epoch; null if it never ends.
    pub until_ms: Option<u64>,
    /// Why it has no effect: the policy was removed, or has changed so that it is invalid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(required = false)]
    pub inert: Option<String>,
}

/// Instances that have an override.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OverrideScope {
    /// All that share the Redis, within a second.
    AllInstances,
    /// Only this process, until it ends: the store is its memory.
    ThisProcess,
}

/// Overrides that are set.
#[derive(Debug, Serialize, Deserialize, utoipa::ToSchema)]
pub struct OverridesBody {
    pub overrides: Vec<OverrideBody>,
    pub scope: OverrideScope,
    /// For the next page; null at the end.
    pub cursor: Option<String>,
}

/// Changes of overrides, the latest first.
#[derive(Debug, Serialize, Deserialize, utoipa::ToSchema)]
pub struct OverrideAuditBody {
    pub changes: Vec<OverrideChangeBody>,
    /// For the next page, as `before`; null at the end.
    pub before: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = OverrideChange)]
pub struct OverrideChangeBody {
    pub number: u64,
    /// Milliseconds since the Unix epoch, by the clock of the store.
    pub at_ms: u64,
    pub policy: String,
    pub key: String,
    #[serde(flatten)]
    #[schema(inline)]
    pub author: OverrideAuthor,
    /// Null if there was none.
    pub before: Option<OverrideStateBody>,
    /// Null if it was removed.
    pub after: Option<OverrideStateBody>,
}

#[derive(Debug, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = OverrideState)]
pub struct OverrideStateBody {
    #[serde(flatten)]
    #[schema(inline)]
    pub limits: OverriddenLimits,
    pub until_ms: Option<u64>,
}
