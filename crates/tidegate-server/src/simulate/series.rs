//! [`Series`]: counts over time in a bounded number of bins, of traffic whose end is unknown.

/// Maximum number of bins. Beyond it, each two become one.
const MAX_BINS: usize = 512;
const MIN_WIDTH: u64 = 1_000;

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
    start: u64,
    width: u64,
    bins: Vec<Bin>,
}

impl Series {
    pub(super) fn new(start: u64) -> Self {
        Self { start, width: MIN_WIDTH, bins: Vec::new() }
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
        self.width *= 2;
        let merged = self.bins.chunks(2).map(|pair| {
            let mut sum = Bin::default();
            for bin in pair {
                sum.merge(*bin);
            }
            sum
        });
        self.bins = merged.collect();
    }

    /// Widens the bins to those of another series of the same start.
    pub(super) fn widen_to(&mut self, other: &Self) {
        while self.width < other.width {
            self.widen();
        }
    }

    /// Returns the time of the first bin, in microseconds since the Unix epoch.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// Returns the width of a bin in microseconds.
    pub(super) fn width(&self) -> u64 {
        self.width
    }

    pub(super) fn bins(&self) -> &[Bin] {
        &self.bins
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_bins_is_bounded_and_no_count_is_lost() {
        let mut series = Series::new(5);
        for step in 0..100_000_u64 {
            let bin = series.at(5 + step * 7_919);
            bin.admitted += 1;
            bin.denied += step % 2;
            bin.peak = bin.peak.max(step);
        }
        assert!(series.bins().len() <= MAX_BINS && series.bins().len() > MAX_BINS / 4);
        let sum = |count: fn(&Bin) -> u64| series.bins().iter().map(count).sum::<u64>();
        assert_eq!(sum(|bin| bin.admitted), 100_000);
        assert_eq!(sum(|bin| bin.denied), 50_000);
        assert_eq!(series.bins().last().map(|bin| bin.peak), Some(99_999));
        // A late time far away is one more step, not a long loop.
        series.at(u64::MAX / 2).admitted += 1;
        assert!(series.bins().len() <= MAX_BINS);
    }
}
