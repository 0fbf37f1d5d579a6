//! Percentiles of a few values. Those of many are estimated by a histogram.

/// Returns the smallest of the sorted values that is not exceeded by `percent` of them.
pub fn nearest_rank<T: Copy>(sorted: &[T], percent: usize) -> Option<T> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}
