//! Nothing: the counting is in `benches/decisions.rs`.
