//! Wakers of a connection's task, which avoid polls that would do nothing. The goals of HTTP on
//! memory, compared with no-op servers, have no room for a second poll of each request.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

thread_local! {
    static HELD: Cell<Held> = const { Cell::new(Held::Off) };
}

/// Wake of a connection by this thread, which may be held back.
#[derive(Default)]
enum Held {
    /// Wakes are passed on.
    #[default]
    Off,
    /// The first wake is held back. There was none so far.
    None,
    Some(Arc<ConnectionWaker>),
}

/// Runs a function and holds back the first wake of a connection by this thread.
pub(super) fn hold_wake<T>(function: impl FnOnce() -> T) -> (T, Option<Arc<ConnectionWaker>>) {
    let before = HELD.replace(Held::None);
    let output = function();
    match HELD.replace(before) {
        Held::Some(waker) => (output, Some(waker)),
        Held::Off | Held::None => (output, None),
    }
}

/// Waker of hyper's part of a connection, to which [`hold_wake`] applies.
#[derive(Debug)]
pub(super) struct ConnectionWaker(Waker);

impl Wake for ConnectionWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A thread that ends no longer holds wakes back.
        match HELD.try_with(Cell::take).unwrap_or_default() {
            Held::Off => self.0.wake_by_ref(),
            Held::None => HELD.set(Held::Some(Arc::clone(self))),
            Held::Some(other) => {
                HELD.set(Held::Some(other));
                self.0.wake_by_ref();
            }
        }
    }
}

/// Waker of the timers and signals of a connection: they are polled only after one of them woke it.
#[derive(Debug)]
pub(super) struct CheckWaker {
    is_due: AtomicBool,
    task: Waker,
}

impl Wake for CheckWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_due.store(true, Ordering::Release);
        self.task.wake_by_ref();
    }
}

impl From<Waker> for ConnectionWaker {
    fn from(task: Waker) -> Self {
        Self(task)
    }
}

impl From<Waker> for CheckWaker {
    fn from(task: Waker) -> Self {
        Self { is_due: AtomicBool::new(true), task }
    }
}

/// Waker around that of the current task, which is the same for all polls of most tasks.
#[derive(Debug)]
pub(super) struct Wrapped<W> {
    task: Waker,
    pub(super) inner: Arc<W>,
    pub(super) waker: Waker,
}

impl<W: Wake + From<Waker> + Send + Sync + 'static> Wrapped<W> {
    /// Returns the waker around that of the task, and creates it if the task has changed.
    pub(super) fn of<'a>(cached: &'a mut Option<Self>, cx: &Context<'_>) -> &'a Self {
        let is_current = |wrapped: &Self| wrapped.task.will_wake(cx.waker());
        if !cached.as_ref().is_some_and(is_current) {
            *cached = None;
        }
        cached.get_or_insert_with(|| {
            let task = cx.waker().clone();
            let inner = Arc::new(W::from(task.clone()));
            Self { task, waker: Waker::from(Arc::clone(&inner)), inner }
        })
    }
}

impl CheckWaker {
    /// Returns whether the timers and signals are to be polled.
    pub(super) fn take_due(&self) -> bool {
        // Most polls are of hyper's part alone, and need no write.
        self.is_due.load(Ordering::Relaxed) && self.is_due.swap(false, Ordering::AcqRel)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Counter(AtomicUsize);

    impl Wake for Counter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn wakes_of_this_thread_alone_are_held_back() {
        let counter = Arc::new(Counter::default());
        let count = || counter.0.load(Ordering::Relaxed);
        let task = Waker::from(Arc::clone(&counter));
        let mut cached = None;
        let wrapped =
            Wrapped::<ConnectionWaker>::of(&mut cached, &Context::from_waker(&task)).waker.clone();
        wrapped.wake_by_ref();
        assert_eq!(count(), 1);
        assert!(matches!(hold_wake(|| 7), (7, None)));
        let ((), held) = hold_wake(|| wrapped.wake_by_ref());
        assert_eq!(count(), 1, "held back");
        held.expect("the wake").wake();
        assert_eq!(count(), 2);
        let other = || std::thread::scope(|scope| scope.spawn(|| wrapped.wake_by_ref()).join());
        assert!(hold_wake(|| other().expect("no panic")).1.is_none());
        assert_eq!(count(), 3, "the wake of another thread");
        wrapped.wake_by_ref();
        assert_eq!(count(), 4);
    }

    #[test]
    fn checks_are_due_at_first_and_after_a_wake() {
        let counter = Arc::new(Counter::default());
        let task = Waker::from(Arc::clone(&counter));
        let mut cached = None;
        let wrapped = Wrapped::<CheckWaker>::of(&mut cached, &Context::from_waker(&task));
        assert!(wrapped.inner.take_due() && !wrapped.inner.take_due());
        wrapped.waker.wake_by_ref();
        assert_eq!(counter.0.load(Ordering::Relaxed), 1);
        assert!(wrapped.inner.take_due() && !wrapped.inner.take_due());
        // Another task has to register its own wakers.
        let other = Waker::from(Arc::new(Counter::default()));
        let wrapped = Wrapped::<CheckWaker>::of(&mut cached, &Context::from_waker(&other));
        assert!(wrapped.inner.take_due());
    }
}
