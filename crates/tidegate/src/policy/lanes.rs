//! [`Lanes`]: lower limits on the same count for requests of less importance.

use std::collections::HashMap;

use super::select::RequestValues;
use super::{KeySource, Policy, PolicyError};

/// Percentages of the limit by the value of an attribute.
#[derive(Debug, Clone)]
pub(super) struct Lanes {
    pub(super) attribute: KeySource,
    percents: HashMap<String, u64>,
    /// Of a request without the attribute, or with another value.
    other: u64,
}

impl Lanes {
    /// Returns the percentage of the limit for a request. The error is an attribute of which
    /// servers may read another value.
    pub(super) fn percent_of(&self, request: &RequestValues<'_>) -> Result<u64, &KeySource> {
        let value = request.get(&self.attribute);
        if request.is_ambiguous(&self.attribute, value.as_deref()) {
            return Err(&self.attribute);
        }
        Ok(value.and_then(|value| self.percents.get(&*value)).copied().unwrap_or(self.other))
    }
}

impl Policy {
    /// Sets the percentages of the limit for values of an attribute. Called after all quotas.
    pub(crate) fn set_lanes(
        &mut self,
        attribute: &str,
        values: Vec<(String, u64)>,
        other: u64,
    ) -> Result<(), PolicyError> {
        let attribute = self.choosing_attribute(attribute)?;
        let mut percents = HashMap::with_capacity(values.len());
        for (value, percent) in values {
            let normal = attribute.normalize(value.into()).into_owned();
            if let Some(value) = percents.insert(normal.clone(), percent).and(Some(normal)) {
                return Err(PolicyError::LaneTwice(value));
            }
        }
        for percent in percents.values().chain([&other]) {
            if !(1..=100).contains(percent) {
                return Err(PolicyError::LanePercent(*percent));
            }
            for quota in self.quotas() {
                if quota.count_denied() {
                    return Err(PolicyError::LaneCountsDenied);
                }
                if quota.has_blocks() {
                    return Err(PolicyError::LaneBlocks);
                }
                if quota.burst() * percent < 100 {
                    let (limit, percent) = (quota.burst(), *percent);
                    return Err(PolicyError::EmptyLane { percent, limit });
                }
            }
        }
        self.lanes = Some(Box::new(Lanes { attribute, percents, other }));
        Ok(())
    }

    /// Returns the lowest percentage of the limit that a request may fill.
    pub(super) fn lowest_lane(&self) -> u64 {
        let lanes = self.lanes.as_ref();
        lanes.map_or(100, |it| it.percents.values().copied().min().unwrap_or(100).min(it.other))
    }

    /// Returns whether a key may be counted by several quotas, which change its limit.
    pub(super) fn has_several_quotas(&self) -> bool {
        self.quotas.by_value().is_some() || self.lanes.is_some()
    }
}
