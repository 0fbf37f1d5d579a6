//! [`Series`]: counts over time in a bounded number of bins, of traffic whose end is unknown.

/// Maximum number of bins. Beyond it, each two (or three, or five) become one.
const MAX_BINS: usize = 512;
/// Widths of bins in milliseconds. Most windows are a multiple of one, so that no bin has requests
/// of two windows. Beyond the last one, each two bins become one.
const WIDTHS: [u64; 17] = [
    1, 2, 10, 20, 100, 200, 1_000, 2_000, 10_000, 30_000, 60_000, 300_000, 600_000, 1_800_000,
    3_600_000, 10_800_000, 43_200_000,
];

/// Counts of one bin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Bin {
    /// Requests.
    pub(super) admitted: u64,
    pub(super) denied: u64,
    /// Highest number of units that one key was admitted in a window that ends in this bin, in
    /// thousandths of its limit.
    pub(super) peak: u64,
}

impl Bin {
    fn merge(&mut self, other: Self) {
        self.admitted += other.admitted;
        self.denied += other.denied;
        self.peak = self.peak.max(other.peak);
    }
}

/// Bins of equal width from the first time on.
#[derive(Debug, Clone)]
pub(super) struct Series {
    /// Time of the first bin, in microseconds since the Unix epoch.
    pub(super) start: u64,
    /// Width of a bin in microseconds.
    pub(super) width: u64,
    pub(super) bins: Vec<Bin>,
}

impl Series {
    pub(super) fn new(start: u64) -> Self {
        Self { start, width: WIDTHS[0] * 1_000, bins: Vec::new() }
    }

    /// Returns the bin of a time, which is not before the start.
    pub(super) fn at(&mut self, time: u64) -> &mut Bin {
        let offset = time.saturating_sub(self.start);
        let mut index = usize::try_from(offset / self.width).unwrap_or(usize::MAX);
        while index >= MAX_BINS {
            self.widen();
            index = usize::try_from(offset / self.width).unwrap_or(usize::MAX);
        }
        if index >= self.bins.len() {
            self.bins.resize(index + 1, Bin::default());
        }
        &mut self.bins[index]
    }

    fn widen(&mut self) {
        let next = WIDTHS.iter().map(|millis| millis * 1_000).find(|width| *width > self.width);
        let factor = next.map_or(2, |next| next / self.width);
        self.width *= factor;
        let merged = self.bins.chunks(usize::try_from(factor).unwrap_or(2)).map(|group| {
            let mut sum = Bin::default();
            for bin in group {
                sum.merge(*bin);
            }
            sum
        });
        self.bins = merged.collect();
    }

    /// Widens the bins until a width is accepted.
    pub(super) fn widen_until(&mut self, is_accepted: impl Fn(u64) -> bool) {
        while !is_accepted(self.width) && self.width <= u64::MAX / 4 {
            self.widen();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_width_is_a_multiple_of_the_one_before() {
        for pair in WIDTHS.windows(2) {
            assert!(pair[1].is_multiple_of(pair[0]) && pair[1] / pair[0] <= 5, "{pair:?}");
        }
    }

    #[test]
    fn number_of_bins_is_bounded_and_no_count_is_lost() {
        let mut series = Series::new(5);
        for step in 0..100_000_u64 {
            let bin = series.at(5 + step * 7_919);
            bin.admitted += 1;
            bin.denied += step % 2;
            bin.peak = bin.peak.max(step);
        }
        assert!(series.bins.len() <= MAX_BINS && series.bins.len() > MAX_BINS / 5);
        let sum = |count: fn(&Bin) -> u64| series.bins.iter().map(count).sum::<u64>();
        assert_eq!(sum(|bin| bin.admitted), 100_000);
        assert_eq!(sum(|bin| bin.denied), 50_000);
        assert_eq!(series.bins.last().map(|bin| bin.peak), Some(99_999));
        // A late time far away is one more step, not a long loop.
        series.at(u64::MAX / 2).admitted += 1;
        assert!(series.bins.len() <= MAX_BINS);
    }
}
