//! Counts the allocated bytes, including the overhead of the system allocator.

#![expect(unsafe_code, reason = "GlobalAlloc is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static BYTES: AtomicI64 = AtomicI64::new(0);
static ALLOCATIONS: AtomicI64 = AtomicI64::new(0);

/// The system allocator, which is the default of all candidates. If counting is off, the overhead
/// is one atomic load.
struct CountingAllocator;

/// Runs `work`, and returns its result and the bytes that it has allocated and not freed.
pub(crate) fn measure_allocated<T>(work: impl FnOnce() -> T) -> (T, i64) {
    BYTES.store(0, Ordering::SeqCst);
    IS_COUNTING.store(true, Ordering::SeqCst);
    let result = work();
    IS_COUNTING.store(false, Ordering::SeqCst);
    (result, BYTES.load(Ordering::SeqCst))
}

/// Runs `work`, and returns the number of its allocations.
pub(crate) fn count_allocations(work: impl FnOnce()) -> i64 {
    ALLOCATIONS.store(0, Ordering::SeqCst);
    measure_allocated(work);
    ALLOCATIONS.load(Ordering::SeqCst)
}

/// Returns the size of a block in glibc: a header of eight bytes, a minimum of 32, rounded up to a
/// multiple of 16; large blocks are whole pages.
fn footprint(size: usize) -> i64 {
    let allocated = if size < 128 * 1024 {
        (size + 8).next_multiple_of(16).max(32)
    } else {
        (size + 16).next_multiple_of(4096)
    };
    i64::try_from(allocated).unwrap_or(i64::MAX)
}

fn count(change: i64) {
    if IS_COUNTING.load(Ordering::Relaxed) {
        BYTES.fetch_add(change, Ordering::Relaxed);
        if change > 0 {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
    }
}

// SAFETY: all calls are forwarded to the system allocator, and counting does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(footprint(layout.size()));
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(footprint(layout.size()));
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-footprint(layout.size()));
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(footprint(size) - footprint(layout.size()));
        unsafe { System.realloc(block, layout, size) }
    }
}
