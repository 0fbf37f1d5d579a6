//! Comparison of Tidegate with similar projects and with the limits of the machine.
//!
//! Each suite measures in rounds. In a round, each candidate has one turn. The suite writes a file
//! of [`results`], and `report` generates `docs/benchmarks.md` from these files. Ratios within a
//! round are similar on other machines; absolute times are not.

pub mod plan;
pub mod proto;
pub mod results;
pub mod spread;
