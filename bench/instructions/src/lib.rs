//! This crate is empty: the benchmarks are in `benches`.
