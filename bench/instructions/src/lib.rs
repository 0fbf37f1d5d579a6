//! This crate is empty: the benchmark is in `benches/decisions.rs`.
