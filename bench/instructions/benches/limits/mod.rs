//! Limits of the benchmarks.

use gungraun::{Callgrind, EventKind, LibraryBenchmarkConfig};

/// Returns a configuration that fails above the limit of this benchmark plus 5 %.
pub fn limit(name: &str) -> LibraryBenchmarkConfig {
    let lines = include_str!("../../limits.txt").lines().filter_map(|line| line.split_once(' '));
    let limit = lines
        .filter(|(named, _)| *named == name)
        .find_map(|(_, count)| count.trim().parse::<u64>().ok());
    // A new benchmark has no limit until the file is updated.
    let max = limit.map_or(u64::MAX, |count| count + count / 20);
    let mut callgrind = Callgrind::with_args(["--cache-sim=no"]);
    callgrind.hard_limits([(EventKind::Ir, max)]);
    let mut config = LibraryBenchmarkConfig::default();
    // Use the same memcpy on all machines; the optimized variants depend on CPU features.
    config
        .env("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2,-AVX512F,-AVX512VL,-ERMS,-FSRM")
        .tool(callgrind);
    config
}
