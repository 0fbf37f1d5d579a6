//! [`Quotas`]: the quota of a policy, and others for some keys, networks and values.

use std::collections::HashMap;
use std::fmt;

use ipnet::IpNet;

use super::networks::{self, Networks};
use super::select::RequestValues;
use super::{KeySource, PolicyError};
use crate::quota::Quota;

/// The quotas of a policy: that of an override comes first, then that of a value.
#[derive(Debug, Clone)]
pub(super) struct Quotas {
    pub(super) default: Quota,
    /// Boxed, because most policies have one quota.
    exceptions: Option<Box<Exceptions>>,
}

#[derive(Debug, Clone, Default)]
struct Exceptions {
    overrides: Vec<(String, Quota)>,
    /// Positions in `overrides`.
    by_key: HashMap<String, usize>,
    /// Addresses and networks with their positions, until they are indexed.
    networks: Vec<(IpNet, u32)>,
    /// Positions by address, if one of the overrides is that of a network.
    by_network: Networks,
    by_value: Option<ValueQuotas>,
}

/// Quotas by the value of an attribute.
#[derive(Debug, Clone)]
pub(super) struct ValueQuotas {
    pub(super) attribute: KeySource,
    pub(super) quotas: HashMap<String, Quota>,
}

/// Why a request has its quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QuotaReason<'a> {
    /// The policy has only one.
    Only,
    /// An override of the key, or of a network around it, applies.
    Override,
    /// The attribute has this value.
    Value(&'a KeySource, &'a str),
    /// The attribute is missing, or has a value without a quota of its own.
    Other(&'a KeySource),
}

impl fmt::Display for QuotaReason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Only => f.write_str("it matches"),
            Self::Override => f.write_str("it matches; an override applies"),
            Self::Value(attribute, value) => {
                write!(f, "it matches; limits: {attribute} is {value:?}")
            }
            Self::Other(attribute) => write!(
                f,
                "it matches; limits: {attribute} is missing or not listed, so `other` applies"
            ),
        }
    }
}

impl Quotas {
    pub(super) fn new(default: Quota) -> Self {
        Self { default, exceptions: None }
    }

    fn exceptions_mut(&mut self) -> &mut Exceptions {
        self.exceptions.get_or_insert_default()
    }

    /// Adds an override of a key, or of a network. Call [`index`](Self::index) after the last one.
    pub(super) fn add_override(
        &mut self,
        key: String,
        network: Option<IpNet>,
        quota: Quota,
    ) -> Result<(), PolicyError> {
        let exceptions = self.exceptions_mut();
        let position = exceptions.overrides.len();
        if exceptions.by_key.insert(key.clone(), position).is_some() {
            return Err(PolicyError::OverriddenTwice(key));
        }
        if let Some(network) = network {
            exceptions.networks.push((network, u32::try_from(position).unwrap_or(u32::MAX)));
        }
        exceptions.overrides.push((key, quota));
        Ok(())
    }

    pub(super) fn index(&mut self) {
        if let Some(exceptions) = &mut self.exceptions {
            let networks = std::mem::take(&mut exceptions.networks);
            if !networks.iter().all(|(network, _)| networks::is_address(network)) {
                exceptions.by_network = Networks::new(networks.into_iter());
            }
        }
    }

    pub(super) fn set_by_value(&mut self, by_value: ValueQuotas) {
        self.exceptions_mut().by_value = Some(by_value);
    }

    pub(super) fn by_value(&self) -> Option<&ValueQuotas> {
        self.exceptions.as_ref()?.by_value.as_ref()
    }

    /// Returns the quota of a key, whatever the values of its request are.
    pub(super) fn of_key(&self, key: &str) -> &Quota {
        self.override_of(key).map_or(&self.default, |(_, quota)| quota)
    }

    /// Returns a larger quota than this one by which units of a key may have been charged. They are
    /// returned by it: by a smaller one, the level of a bucket would be cut to ten times its limit.
    /// By one with other windows, the count would end.
    pub(super) fn larger_than(&self, quota: &Quota, key: &str) -> Option<&Quota> {
        let overridden = self.override_of(key).map(|(_, quota)| quota);
        let by_value = self.by_value().filter(|_| overridden.is_none());
        let by_value = by_value.into_iter().flat_map(|it| it.quotas.values());
        let quotas = by_value.chain([overridden.unwrap_or(&self.default)]);
        let larger = quotas.filter(|it| it.burst() > quota.burst() && it.has_windows_of(quota));
        larger.max_by_key(|quota| quota.burst())
    }

    /// Returns the override that applies to a key, or to the network around it.
    pub(super) fn override_of(&self, key: &str) -> Option<(&str, &Quota)> {
        let exceptions = self.exceptions.as_ref()?;
        let position = if exceptions.by_network.is_empty() {
            *exceptions.by_key.get(key)?
        } else {
            exceptions.by_network.find(key)? as usize
        };
        let (key, quota) = &exceptions.overrides[position];
        Some((key, quota))
    }

    /// Returns the quota of a request with this key, and why it is that one. The error is an
    /// attribute of which servers may read another value.
    #[inline]
    pub(super) fn of_request(
        &self,
        request: &RequestValues<'_>,
        key: &str,
    ) -> Result<(&Quota, QuotaReason<'_>), &KeySource> {
        match self.exceptions {
            None => Ok((&self.default, QuotaReason::Only)),
            Some(_) => self.exception_of(request, key),
        }
    }

    #[inline(never)]
    fn exception_of(
        &self,
        request: &RequestValues<'_>,
        key: &str,
    ) -> Result<(&Quota, QuotaReason<'_>), &KeySource> {
        if let Some((_, quota)) = self.override_of(key) {
            return Ok((quota, QuotaReason::Override));
        }
        let Some(ValueQuotas { attribute, quotas }) = self.by_value() else {
            return Ok((&self.default, QuotaReason::Only));
        };
        let value = request.get(attribute);
        if request.is_ambiguous(attribute, value.as_deref()) {
            return Err(attribute);
        }
        let listed = value.and_then(|value| quotas.get_key_value(&*value));
        Ok(listed.map_or((&self.default, QuotaReason::Other(attribute)), |(value, quota)| {
            (quota, QuotaReason::Value(attribute, value))
        }))
    }

    /// Iterates over all quotas; the default is the last.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Quota> {
        let by_value = self.by_value().into_iter().flat_map(|it| it.quotas.values());
        self.overrides().map(|(_, quota)| quota).chain(by_value).chain([&self.default])
    }

    pub(super) fn overrides(&self) -> impl Iterator<Item = (&str, &Quota)> {
        let overrides = self.exceptions.iter().flat_map(|exceptions| &exceptions.overrides);
        overrides.map(|(key, quota)| (key.as_str(), quota))
    }

    /// Replaces each quota. `change` gets whether it is another than the default.
    pub(super) fn change<E>(
        &mut self,
        change: impl Fn(&Quota, bool) -> Result<Quota, E>,
    ) -> Result<(), E> {
        self.default = change(&self.default, false)?;
        let Some(exceptions) = &mut self.exceptions else { return Ok(()) };
        let by_value = exceptions.by_value.iter_mut().flat_map(|it| it.quotas.values_mut());
        for quota in exceptions.overrides.iter_mut().map(|(_, quota)| quota).chain(by_value) {
            *quota = change(quota, true)?;
        }
        Ok(())
    }
}
