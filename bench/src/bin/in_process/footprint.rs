//! How many bytes are allocated, as the system's allocator takes them, while it is asked for.

#![expect(unsafe_code, reason = "an allocator cannot be written without")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static BYTES: AtomicI64 = AtomicI64::new(0);

/// The system's, which everybody has who asks for no other. Where nobody counts it costs one look
/// at a flag.
struct Counting;

/// What `work` has allocated and kept.
pub(crate) fn kept_by<T>(work: impl FnOnce() -> T) -> (T, i64) {
    BYTES.store(0, Ordering::SeqCst);
    IS_COUNTING.store(true, Ordering::SeqCst);
    let done = work();
    IS_COUNTING.store(false, Ordering::SeqCst);
    (done, BYTES.load(Ordering::SeqCst))
}

/// glibc puts eight bytes before each block, gives no less than 32, and rounds up to 16; large
/// blocks are whole pages.
fn footprint(size: usize) -> i64 {
    let taken = if size < 128 * 1024 {
        (size + 8).next_multiple_of(16).max(32)
    } else {
        (size + 16).next_multiple_of(4096)
    };
    i64::try_from(taken).unwrap_or(i64::MAX)
}

fn count(change: i64) {
    if IS_COUNTING.load(Ordering::Relaxed) {
        BYTES.fetch_add(change, Ordering::Relaxed);
    }
}

// SAFETY: everything is done by the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
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
