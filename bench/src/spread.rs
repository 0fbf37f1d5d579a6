//! [`Spread`]: median, minimum and maximum over rounds.

use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
    pub rounds: usize,
}

impl Spread {
    /// Computes the spread of values; `None` without values.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Some(Self { median: f64::midpoint(low, high), min, max, rounds: sorted.len() })
    }

    /// Computes the spread of the ratios of values of the same rounds.
    #[must_use]
    pub fn of_ratios(one: &[f64], other: &[f64]) -> Option<Self> {
        let ratios: Vec<f64> = one.iter().zip(other).map(|(one, other)| one / other).collect();
        Self::of(&ratios)
    }
}

/// `1.42× (1.38–1.51)`
impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = if self.median >= 20.0 { 0 } else { 2 };
        write!(f, "{:.digits$}× ({:.digits$}–{:.digits$})", self.median, self.min, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn median_of_an_even_count_is_the_midpoint() {
        let spread = Spread::of(&[4.0, 1.0, 3.0, 2.0]).expect("values");
        assert_eq!(spread, Spread { median: 2.5, min: 1.0, max: 4.0, rounds: 4 });
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn ratios_use_values_of_the_same_round() {
        let spread = Spread::of_ratios(&[10.0, 30.0, 20.0], &[5.0, 10.0, 20.0]).expect("values");
        assert_eq!(spread.to_string(), "2.00× (1.00–3.00)");
    }
}
