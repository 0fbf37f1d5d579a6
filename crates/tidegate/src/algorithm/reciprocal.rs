//! [`Reciprocal`]: division by the numbers of a quota, without a division.

/// A divisor below 2^63 and its inverse: a multiplication instead of a division.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reciprocal {
    pub(crate) divisor: u64,
    /// 2^(64 + shift) / divisor, less at most 1: the greatest integer below it.
    inverse: u64,
    /// Logarithm of the divisor, rounded down.
    shift: u32,
}

impl Reciprocal {
    pub(super) fn new(divisor: u64) -> Self {
        let shift = divisor.ilog2();
        let inverse = ((1_u128 << (64 + shift)) - 1) / u128::from(divisor);
        Self { divisor, inverse: u64::try_from(inverse).unwrap_or(u64::MAX), shift }
    }

    /// Returns the quotient of a number from 1 to 2^63, rounded up. The product with the inverse is
    /// less than the quotient, but by less than 1 / divisor, because the number times the divisor
    /// is less than 2^(64 + shift). So without its fraction it is the greatest integer below the
    /// quotient.
    #[inline]
    pub(crate) fn divide_up(self, number: u64) -> u64 {
        let product = u128::from(number) * u128::from(self.inverse);
        ((product >> 64) as u64).wrapping_shr(self.shift) + 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn number() -> impl Strategy<Value = u64> {
        (0..64_u32, any::<u64>()).prop_map(|(shift, number)| number >> shift)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn a_reciprocal_divides_exactly(number in number(), divisor in number(), near in 0..3_u64) {
            const MAX: u64 = (1 << 63) - 1;
            let (number, divisor) = (number & MAX, (divisor & MAX).max(1));
            let multiple = (number / divisor * divisor + near).saturating_sub(1).min(MAX);
            for divisor in [divisor, 1, 2] {
                for number in [number, multiple, MAX].map(|number| number.max(1)) {
                    let quotient = Reciprocal::new(divisor).divide_up(number);
                    prop_assert_eq!(quotient, number.div_ceil(divisor));
                }
            }
        }
    }
}
