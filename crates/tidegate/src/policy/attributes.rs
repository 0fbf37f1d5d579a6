//! [`Attributes`]: what policies read of a request.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;

/// Attributes of a request by name: `ip`, `method`, `path`, `host`, `header.NAME`, `query.NAME`,
/// `cookie.NAME`; from Envoy `domain` and `descriptor.KEY`; and custom ones, which
/// [`PolicyBuilder::attributes`](crate::PolicyBuilder::attributes) declares.
///
/// Maps from `String` to `String` implement it. Implement it for a request type of your own, so
/// that only the attributes that a policy uses are read:
///
/// ```
/// use std::borrow::Cow;
/// use std::time::Duration;
/// use tidegate::{Attributes, Policy, Quota};
///
/// struct Job {
///     tenant: String,
/// }
///
/// impl Attributes for Job {
///     fn get(&self, name: &str) -> Option<Cow<'_, str>> {
///         match name {
///             "tenant" => Some(Cow::from(&self.tenant)),
///             _ => None,
///         }
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let policy =
///     Policy::builder("per-tenant", quota).attributes(["tenant"]).key(["tenant"]).build()?;
/// let job = Job { tenant: "acme".to_owned() };
/// assert_eq!(policy.select(&job, None)?.charges[0].key(), Some("acme"));
/// # Ok(())
/// # }
/// ```
///
/// A front door for HTTP must normalize `path` and `host` by [`normalize_path`](crate::normalize_path) and
/// [`normalize_host`](crate::normalize_host), as `layer::RequestParts` (feature `tower`) does.
pub trait Attributes {
    /// Returns the value of this attribute, if the request has it.
    fn get(&self, name: &str) -> Option<Cow<'_, str>>;

    /// Returns whether the request has several different values of this attribute, of which the
    /// application may read another one than [`get`](Self::get) returns. Such a request is an error
    /// for a policy that uses the attribute.
    fn is_ambiguous(&self, _name: &str) -> bool {
        false
    }

    /// Returns whether `ip` was read although the address of the peer is unknown. Such a request is
    /// an error, because failing open would silently disable the limit.
    fn lacks_peer(&self) -> bool {
        false
    }
}

impl Attributes for BTreeMap<String, String> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        BTreeMap::get(self, name).map(|value| Cow::Borrowed(value.as_str()))
    }
}

impl<H: BuildHasher> Attributes for HashMap<String, String, H> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        HashMap::get(self, name).map(|value| Cow::Borrowed(value.as_str()))
    }
}
