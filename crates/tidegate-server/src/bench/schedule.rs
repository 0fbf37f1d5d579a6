//! [`Schedule`]: the due times of an open loop.

use std::time::Duration;

use crate::tool::random::SeededRandom;
use crate::tool::text::float;

/// Times between requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Arrivals {
    /// Equal intervals
    Fixed,
    /// Random intervals, as those of independent clients
    Poisson,
}

/// Endless iterator over due times, after the start of the run.
pub(super) struct Schedule {
    arrivals: Arrivals,
    interval: f64,
    random: SeededRandom,
    number: u64,
    seconds: f64,
}

impl Schedule {
    pub(super) fn new(rate: f64, arrivals: Arrivals, seed: u64) -> Self {
        // Independent of the keys, which have the same seed.
        let random = SeededRandom::new(seed ^ 0x5bd1_e995);
        Self { arrivals, interval: 1.0 / rate, random, number: 0, seconds: 0.0 }
    }
}

impl Iterator for Schedule {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let seconds = match self.arrivals {
            // A product has no rounding errors that add up.
            Arrivals::Fixed => float(self.number) * self.interval,
            Arrivals::Poisson => {
                self.seconds += self.interval * self.random.exponential();
                self.seconds
            }
        };
        self.number += 1;
        Duration::try_from_secs_f64(seconds).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_times_are_evenly_spaced() {
        let times: Vec<Duration> = Schedule::new(4.0, Arrivals::Fixed, 1).take(4).collect();
        assert_eq!(times, [0, 250, 500, 750].map(Duration::from_millis));
    }

    #[test]
    fn random_times_have_the_rate_and_the_deviation_of_independent_clients() {
        let second = |time: &Duration| time.as_secs();
        let times: Vec<u64> = Schedule::new(100.0, Arrivals::Poisson, 1)
            .take_while(|time| *time < Duration::from_secs(1_000))
            .map(|time| second(&time))
            .collect();
        let mut counts = vec![0_u32; 1_000];
        for second in times {
            counts[usize::try_from(second).expect("small")] += 1;
        }
        let mean = counts.iter().map(|&count| f64::from(count)).sum::<f64>() / 1_000.0;
        let deviation = |count: &u32| (f64::from(*count) - mean).powi(2);
        let variance = counts.iter().map(deviation).sum::<f64>() / 1_000.0;
        assert!((98.0..102.0).contains(&mean), "{mean}");
        assert!((85.0..115.0).contains(&variance), "{variance}");
    }
}
