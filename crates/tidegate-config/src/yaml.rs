//! YAML texts with values that are checked as they are read, and errors that name the line and
//! hide secrets.

mod document;
pub mod duration;
mod message;
mod number;
mod redaction;
mod syntax;
mod variables;

pub use document::{ConfigError, Document};
pub use duration::BoundedDuration;
pub(crate) use number::whole;
pub use number::{Bounded, Flag, Ratio};
pub(crate) use redaction::resembles;
pub use redaction::{Redaction, schema_fields};
