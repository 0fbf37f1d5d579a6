//! [`StatusSet`]: the statuses of responses whose requests a policy refunds.

use std::ops::RangeInclusive;

use super::PolicyError;

/// Statuses of responses whose requests are refunded; [`PolicyBuilder::refund_on`] creates it.
///
/// [`PolicyBuilder::refund_on`]: super::PolicyBuilder::refund_on
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Policy, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(5, Duration::from_secs(60))?;
/// let policy = Policy::builder("logins", quota).refund_on(["2xx", "304"]).build()?;
/// let statuses = policy.refund_on().expect("it is set");
/// assert!(statuses.contains(204) && statuses.contains(304) && !statuses.contains(401));
/// assert!(statuses.iter().eq(["2xx", "304"]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusSet(Vec<RangeInclusive<u16>>);

impl StatusSet {
    pub(super) fn new(texts: &[String]) -> Result<Self, PolicyError> {
        if texts.is_empty() {
            return Err(PolicyError::NoStatus);
        }
        let parsed =
            texts.iter().map(|text| parse(text).ok_or_else(|| PolicyError::Status(text.clone())));
        Ok(Self(parsed.collect::<Result<_, _>>()?))
    }

    /// Returns whether it has this status.
    #[must_use]
    pub fn contains(&self, status: u16) -> bool {
        self.0.iter().any(|statuses| statuses.contains(&status))
    }

    /// Iterates over the statuses as they are written: `2xx` or `404`.
    pub fn iter(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|statuses| match (statuses.start(), statuses.end()) {
            (first, last) if first == last => first.to_string(),
            (first, _) => format!("{}xx", first / 100),
        })
    }
}

/// Parses a class such as `2xx` or a status such as `404`.
fn parse(text: &str) -> Option<RangeInclusive<u16>> {
    let class = text.strip_suffix("xx").or_else(|| text.strip_suffix("XX"));
    let (first, last) = match class {
        Some(class) => (format!("{class}00"), format!("{class}99")),
        None => (text.to_owned(), text.to_owned()),
    };
    let is_status = first.len() == 3 && ('1'..='5').contains(&first.chars().next()?);
    (is_status && first.bytes().all(|byte| byte.is_ascii_digit()))
        .then_some(first.parse().ok()?..=last.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(texts: &[&str]) -> Result<StatusSet, PolicyError> {
        StatusSet::new(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn set_has_classes_and_single_statuses() {
        let statuses = set(&["1xx", "2XX", "404", "599"]).expect("valid");
        for status in [100, 101, 199, 200, 299, 404, 599] {
            assert!(statuses.contains(status), "{status}");
        }
        for status in [0, 99, 300, 400, 403, 405, 598, 600, 999] {
            assert!(!statuses.contains(status), "{status}");
        }
        assert!(statuses.iter().eq(["1xx", "2xx", "404", "599"]));
    }

    #[test]
    fn other_texts_are_errors_that_say_what_is_right() {
        for text in [
            "0xx", "6xx", "9xx", "xx", "2x", "2xX", "22xx", "2xxx", "ok", "", "099", "600", "-20",
            "+20", "2 0", "20", "2000", "200.0", "２xx", "2xx-3xx", "*", "!200",
        ] {
            let error = set(&["200", text]).expect_err(text).to_string();
            let expected = format!("{text:?} is not a status: write one from 100 to 599");
            assert!(error.starts_with(&expected) && error.contains("2xx"), "{error}");
        }
        assert!(set(&[]).expect_err("empty").to_string().contains("[2xx, 3xx]"));
    }
}
