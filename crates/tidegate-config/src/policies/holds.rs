//! [`RawHolds`]: how long the holds of a policy live.

use schemars::JsonSchema;
use serde_saphyr::Spanned;
use tidegate::{Algorithm, HoldTerms, OnExpire};

use super::policy::parse_name;
use crate::yaml::{BoundedDuration, ConfigError, Document};

type HoldTtl = BoundedDuration<1_000_000, 86_400_000_000>;

/// Holds of a policy: its reservations, or its units in flight.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Holds")]
pub(super) struct RawHolds {
    /// Time after which a hold ends that is neither settled nor renewed, from 1s to 24h; 60s by
    /// default.
    ttl: Option<HoldTtl>,
    /// Time after which a hold ends however often it is renewed, from 1s to 24h; 10m by default.
    max_ttl: Option<HoldTtl>,
    /// Units of a hold that ends without a commit: charge (default) keeps them charged, because the
    /// work may have been done; release returns them.
    #[schemars(with = "Option<OnExpire>")]
    on_expire: Option<Spanned<String>>,
}

impl RawHolds {
    /// Returns the terms for the quotas of this algorithm.
    pub(super) fn terms(
        &self,
        document: &Document<'_>,
        at: &Spanned<Self>,
        algorithm: Algorithm,
    ) -> Result<HoldTerms, ConfigError> {
        let terms =
            HoldTerms::with_defaults(self.ttl.map(HoldTtl::get), self.max_ttl.map(HoldTtl::get));
        let terms = terms.map_err(|error| document.error_at(at, &error.to_string()))?;
        let Some(name) = &self.on_expire else { return Ok(terms) };
        let on_expire = parse_name(document, name)?;
        let terms = with_on_expire(terms, algorithm, on_expire);
        terms.map_err(|error| document.error_at(name, error))
    }
}

/// Sets what happens at the end of a hold of this algorithm.
pub fn with_on_expire(
    terms: HoldTerms,
    algorithm: Algorithm,
    on_expire: OnExpire,
) -> Result<HoldTerms, &'static str> {
    if algorithm == Algorithm::Concurrency && on_expire == OnExpire::Charge {
        return Err("units in flight are free when their hold ends: leave `on_expire` out");
    }
    Ok(terms.with_on_expire(on_expire))
}
