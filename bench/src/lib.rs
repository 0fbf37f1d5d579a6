//! Side by side: Tidegate, its peers and the limits of the machine, in one run, taking turns.
//!
//! Each suite measures in rounds, in which every contestant has its turn, and writes a file of
//! [`results`]; `report` makes `docs/benchmarks.md` of them. What counts are the ratios within a
//! round: they carry over to other machines.

pub mod plan;
pub mod results;
pub mod spread;
