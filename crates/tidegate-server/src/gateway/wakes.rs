//! Wakes of a connection by its parts. While it is polled, they are only recorded.
//!
//! The unit tests run this file on loom's atomics, which try every order of the operations and every
//! value that the memory model allows a load to return.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

#[cfg(not(test))]
use std::sync::atomic::{AtomicU8, Ordering};

#[cfg(not(test))]
use futures_util::task::AtomicWaker;
#[cfg(test)]
use loom::sync::atomic::{AtomicU8, Ordering};

#[cfg(test)]
use self::tests::AtomicWaker;

/// Number of times that a connection is polled again because it woke itself, before other tasks
/// may run.
const MAX_POLLS: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Wakes {
    state: AtomicU8,
    task: AtomicWaker,
}

/// Nothing has happened since the connection was last polled.
const WAITING: u8 = 0;
/// The connection is polled, or nothing waits for it.
const HELD: u8 = 1;
/// Something has happened.
const WOKEN: u8 = 2;

impl Wakes {
    /// Polls until nothing more can be done without a wait. The parts of the connection wake each
    /// other; only a wake that comes later is passed on to the task.
    pub(super) fn poll_turn<T>(
        self: &Arc<Self>,
        cx: &mut Context<'_>,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        self.task.register(cx.waker());
        let waker = Waker::from(Arc::clone(self));
        for _ in 0..MAX_POLLS {
            self.hold();
            let polled = poll(&mut Context::from_waker(&waker));
            if polled.is_ready() || self.release() {
                return polled;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn hold(&self) {
        // The swap makes what a wake reports visible.
        self.state.swap(HELD, Ordering::AcqRel);
    }

    /// Passes further wakes on. Returns false if there was one since [`hold`](Self::hold).
    fn release(&self) -> bool {
        let exchanged =
            self.state.compare_exchange(HELD, WAITING, Ordering::AcqRel, Ordering::Acquire);
        exchanged.is_ok()
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(WOKEN, Ordering::AcqRel) == WAITING {
            self.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use loom::sync::atomic::AtomicUsize;

    use super::*;

    /// Loom's waker of a task, with the signature of the one in `futures_util`.
    #[derive(Debug, Default)]
    pub(super) struct AtomicWaker(loom::future::AtomicWaker);

    impl AtomicWaker {
        pub(super) fn register(&self, waker: &Waker) {
            self.0.register_by_ref(waker);
        }

        pub(super) fn wake(&self) {
            self.0.wake();
        }
    }

    /// A lost wake is a deadlock, which loom reports.
    fn check(parts: usize, wakes_per_part: usize) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let (wakes, events) = (Arc::new(Wakes::default()), Arc::new(AtomicUsize::new(0)));
            let threads: Vec<_> = (0..parts)
                .map(|_| {
                    let (wakes, events) = (Arc::clone(&wakes), Arc::clone(&events));
                    loom::thread::spawn(move || {
                        for _ in 0..wakes_per_part {
                            // Relaxed: only the wake makes the event visible.
                            events.fetch_add(1, Ordering::Relaxed);
                            Wake::wake_by_ref(&wakes);
                        }
                    })
                })
                .collect();
            loom::future::block_on(poll_fn(|cx| {
                wakes.poll_turn(cx, |_| match events.load(Ordering::Relaxed) {
                    all if all == parts * wakes_per_part => Poll::Ready(()),
                    _ => Poll::Pending,
                })
            }));
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        });
    }

    #[test]
    fn no_wake_of_one_part_is_lost() {
        check(1, 2);
    }

    #[test]
    fn no_wake_of_two_parts_is_lost() {
        check(2, 1);
    }

    #[test]
    fn wakes_within_a_poll_do_not_reach_the_task() {
        loom::model(|| {
            let wakes = Arc::new(Wakes::default());
            let mut polls = 0;
            let polled = wakes.poll_turn(&mut Context::from_waker(Waker::noop()), |cx| {
                polls += 1;
                if polls < 3 {
                    cx.waker().wake_by_ref();
                }
                Poll::<()>::Pending
            });
            assert!(polled.is_pending());
            assert_eq!(polls, 3, "polled again after each wake, and not after the last poll");
        });
    }
}
