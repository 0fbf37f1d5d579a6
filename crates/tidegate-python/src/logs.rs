//! Events of the library, such as the failure of Redis, for Python's logger `tidegate`.
//!
//! Threads of the runtime must not wait for the GIL, so events are queued. The next call that holds
//! it passes them on: a failure is logged with the first decision that it affects.

use std::fmt::{Debug, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::process::PerProcess;

/// Number of events that wait at most; later ones are dropped.
const MAX_QUEUED: usize = 100;

type Queue = Mutex<Vec<(Level, String)>>;

static QUEUE: PerProcess<Queue> = PerProcess::new();
static IS_QUEUED: AtomicBool = AtomicBool::new(false);

fn queue() -> PyResult<Arc<Queue>> {
    QUEUE.get(|| Ok(Mutex::default()))
}

/// Starts to queue events.
pub(crate) fn install() {
    // A program that embeds Python may have a subscriber of its own.
    let _ = tracing::subscriber::set_global_default(Queued);
}

/// Passes the queued events on. An error of a handler is shown, but does not undo a decision.
#[inline]
pub(crate) fn flush(py: Python<'_>) {
    if IS_QUEUED.load(Ordering::Relaxed) {
        flush_queued(py).unwrap_or_else(|error| error.write_unraisable(py, None));
    }
}

#[cold]
fn flush_queued(py: Python<'_>) -> PyResult<()> {
    IS_QUEUED.store(false, Ordering::Relaxed);
    let events = std::mem::take(&mut *queue()?.lock().unwrap_or_else(PoisonError::into_inner));
    let logger = py.import("logging")?.call_method1("getLogger", ("tidegate",))?;
    for (level, message) in events {
        let method = if level == Level::INFO { "info" } else { "warning" };
        logger.call_method1(method, ("%s", message))?;
    }
    Ok(())
}

struct Queued;

impl Subscriber for Queued {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let Ok(queue) = queue() else { return };
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.len() < MAX_QUEUED {
            queue.push((*event.metadata().level(), text.message + &text.fields));
            IS_QUEUED.store(true, Ordering::Relaxed);
        }
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Message of an event, and its fields like ` name=value`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}
