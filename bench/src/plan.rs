//! Duration of the measurement: `BENCH=quick` for a run of a few minutes, the full one otherwise.

use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    Full,
    Quick,
}

impl Plan {
    /// Reads the plan from the environment variable `BENCH`.
    #[must_use]
    pub fn from_env() -> Self {
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

    /// Returns the number of rounds.
    #[must_use]
    pub fn rounds(self) -> usize {
        match self {
            Self::Full => 7,
            Self::Quick => 3,
        }
    }

    /// Returns the duration of a turn of a load generator.
    #[must_use]
    pub fn turn(self) -> Duration {
        match self {
            Self::Full => Duration::from_secs(3),
            Self::Quick => Duration::from_secs(1),
        }
    }

    /// Returns the number of users of the script suite, and of the decisions in a turn.
    #[must_use]
    pub fn script_users_and_decisions(self) -> (u64, u64) {
        match self {
            Self::Full => (100_000, 60_000),
            Self::Quick => (10_000, 10_000),
        }
    }

    /// Returns the number of keys that an attacker uses.
    #[must_use]
    pub fn attacked_keys(self) -> u64 {
        match self {
            Self::Full => 1_000_000,
            Self::Quick => 50_000,
        }
    }

    /// Returns the duration of a turn of the in-process suite, which needs no time to start.
    #[must_use]
    pub fn in_process_turn(self) -> Duration {
        match self {
            Self::Full => Duration::from_millis(100),
            Self::Quick => Duration::from_millis(30),
        }
    }

    /// Returns the numbers of keys in the stores.
    #[must_use]
    pub fn keys(self) -> &'static [usize] {
        match self {
            Self::Full => &[1, 10_000, 1_000_000, 10_000_000],
            Self::Quick => &[1, 10_000, 1_000_000],
        }
    }
}
