//! [`Counters`]: numbers that every request writes, without a cache line that all cores write.
//!
//! A thread that counts has a stripe of its own, on cache lines of its own, so it needs neither an
//! atomic read-modify-write nor a line of another core. Readers add the stripes up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;

/// Maximum number of threads with a stripe of their own.
const MAX_OWNERS: usize = 128;
/// Number of stripes that have an owner. The last stripe is that of all other threads.
static OWNERS: LazyLock<usize> = LazyLock::new(|| {
    thread::available_parallelism().map_or(1, usize::from).next_power_of_two().clamp(4, MAX_OWNERS)
});
/// Stripes without an owner.
static UNOWNED: LazyLock<Mutex<Vec<usize>>> =
    LazyLock::new(|| Mutex::new((0..*OWNERS).rev().collect()));

/// Stripe of a thread, until the thread ends.
struct Stripe(usize);

thread_local! {
    static STRIPE: Stripe = Stripe::claim();
}

impl Stripe {
    fn claim() -> Self {
        let free = UNOWNED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Self(free.unwrap_or(*OWNERS))
    }
}

impl Drop for Stripe {
    fn drop(&mut self) {
        if self.0 < *OWNERS {
            UNOWNED.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
        }
    }
}

/// Returns the stripe of this thread: a number that few or no other threads have.
#[inline]
pub fn stripe() -> usize {
    STRIPE.try_with(|stripe| stripe.0).unwrap_or_else(|_| *OWNERS)
}

/// N numbers that only grow, counted by each thread for itself.
#[derive(Debug)]
pub struct Counters<const N: usize> {
    stripes: Box<[Padded<[AtomicU64; N]>]>,
}

/// Value on its own cache lines; CPUs fetch two at a time.
#[derive(Debug)]
#[repr(align(128))]
pub struct Padded<T>(pub T);

impl<const N: usize> Default for Counters<N> {
    fn default() -> Self {
        let zeros = || Padded(std::array::from_fn(|_| AtomicU64::new(0)));
        Self { stripes: (0..=*OWNERS).map(|_| zeros()).collect() }
    }
}

impl<const N: usize> Counters<N> {
    /// Adds to a number.
    #[inline]
    pub fn add(&self, index: usize, count: u64) {
        let stripe = stripe();
        let counter = &self.stripes[stripe].0[index];
        if stripe + 1 < self.stripes.len() {
            // This thread is the only one that writes it.
            counter.store(counter.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
        } else {
            counter.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Returns a number.
    pub fn total(&self, index: usize) -> u64 {
        let parts = self.stripes.iter().map(|stripe| stripe.0[index].load(Ordering::Relaxed));
        parts.fold(0, u64::wrapping_add)
    }

    /// Returns all numbers.
    pub fn totals(&self) -> [u64; N] {
        std::array::from_fn(|index| self.total(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_count_is_lost_with_more_threads_than_stripes_one_after_the_other() {
        let counters = Counters::<2>::default();
        // More threads than stripes, twice: later ones inherit the stripes of earlier ones.
        for _ in 0..2 {
            thread::scope(|scope| {
                for _ in 0..2 * *OWNERS {
                    scope.spawn(|| {
                        for _ in 0..1_000 {
                            counters.add(0, 1);
                            counters.add(1, 3);
                        }
                    });
                }
            });
        }
        let threads = 4 * u64::try_from(*OWNERS).expect("small");
        assert_eq!(counters.totals(), [1_000 * threads, 3_000 * threads]);
    }

    #[test]
    fn threads_write_cache_lines_of_their_own() {
        let counters = Counters::<3>::default();
        for stripe in &counters.stripes {
            assert!(std::ptr::from_ref(stripe).addr().is_multiple_of(128));
        }
        let own = stripe();
        let other = thread::scope(|scope| scope.spawn(stripe).join().expect("no panic"));
        // Other tests may have taken all stripes but the last.
        assert!(own != other || own == *OWNERS);
        assert_eq!(own, stripe(), "a thread keeps its stripe");
    }
}
