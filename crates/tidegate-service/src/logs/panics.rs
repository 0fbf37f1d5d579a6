//! Panics: counted, and logged without a message that may contain a secret.

use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

static COUNT: AtomicU64 = AtomicU64::new(0);

/// Number of panics since the start.
pub fn count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// Replaces the hook of the standard library, which prints the whole message: that of a wrong
/// string index contains the string, for example a line of the configuration with a password.
pub fn install_hook() {
    std::panic::set_hook(Box::new(|info| {
        COUNT.fetch_add(1, Ordering::Relaxed);
        let location = info.location().map(ToString::to_string).unwrap_or_default();
        let message = message(info);
        if tracing::dispatcher::has_been_set() {
            tracing::error!(location, message, "panic: please report this defect");
        } else {
            anstream::eprintln!("panic at {location}: {message}; please report this defect");
        }
    }));
}

/// Returns the message if it is a constant of the program.
fn message(info: &PanicHookInfo<'_>) -> &'static str {
    info.payload().downcast_ref::<&'static str>().copied().unwrap_or("(message hidden)")
}

/// Runs a part of a task that must survive a defect in it. Returns `None` after a panic.
pub fn caught<T>(part: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(part)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_that_panics_returns_nothing() {
        assert_eq!(caught(|| 1), Some(1));
        assert_eq!(caught(|| "é".split_at(1).0.len()), None);
    }
}
