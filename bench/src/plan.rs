//! How long to measure: `BENCH=quick` for a pass of two minutes, everything otherwise.

use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    Full,
    Quick,
}

impl Plan {
    /// From the environment.
    #[must_use]
    pub fn chosen() -> Self {
        match std::env::var("BENCH").as_deref() {
            Ok("quick") => Self::Quick,
            _ => Self::Full,
        }
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Quick => "quick",
        }
    }

    /// In how many rounds each contestant has its turn.
    #[must_use]
    pub fn rounds(self) -> usize {
        match self {
            Self::Full => 7,
            Self::Quick => 3,
        }
    }

    /// A turn of a load generator.
    #[must_use]
    pub fn turn(self) -> Duration {
        match self {
            Self::Full => Duration::from_secs(3),
            Self::Quick => Duration::from_secs(1),
        }
    }

    /// A turn in process, where nothing has to get going.
    #[must_use]
    pub fn short_turn(self) -> Duration {
        match self {
            Self::Full => Duration::from_millis(100),
            Self::Quick => Duration::from_millis(30),
        }
    }

    /// How many keys the stores are filled with.
    #[must_use]
    pub fn keys(self) -> &'static [usize] {
        match self {
            Self::Full => &[1, 10_000, 1_000_000, 10_000_000],
            Self::Quick => &[1, 10_000, 1_000_000],
        }
    }
}
