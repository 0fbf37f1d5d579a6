//! Nanoseconds per decision in memory: each algorithm, 1 to 1,000,000 keys, 1 and 2 threads.
//!
//! `cargo bench -p tidegate`, or a part of it: `cargo bench -p tidegate -- token-bucket/1000000`

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tidegate::{Algorithm, Charge, Limiter, MemoryStore, Quota};

fn decisions(criterion: &mut Criterion) {
    for algorithm in Algorithm::RATES {
        let mut group = criterion.benchmark_group(algorithm.as_str());
        group.throughput(Throughput::Elements(1)).sample_size(20);
        group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
        for keys in [1_usize, 10_000, 1_000_000] {
            let names: Vec<String> = (0..keys).map(|number| format!("user-{number:08}")).collect();
            for threads in [1, 2] {
                // The window never ends during the run: decisions are allowed up to the limit, then
                // denied.
                let quota = Quota::new(algorithm, 1_000, Duration::from_secs(3_600))
                    .expect("a valid quota");
                let limiter = Limiter::new(MemoryStore::new());
                for name in &names {
                    let _ =
                        limiter.blocking().acquire(&Charge::new(name, &quota)).expect("a decision");
                }
                let id = BenchmarkId::new(keys.to_string(), format!("{threads} thread(s)"));
                group.bench_function(id, |bencher| {
                    bencher
                        .iter_custom(|count| in_threads(threads, count, &limiter, &quota, &names));
                });
            }
        }
        group.finish();
    }
}

/// Returns the total time of `count` decisions, divided evenly among the threads.
fn in_threads(
    threads: u64,
    count: u64,
    limiter: &Limiter,
    quota: &Quota,
    names: &[String],
) -> Duration {
    let work = |seed: u64| {
        // Visit the keys in a random order, which defeats prefetching.
        let mut at = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for _ in 0..count.div_ceil(threads) {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let name = &names[usize::try_from(at >> 33).expect("31 bits") % names.len()];
            let _ = black_box(
                limiter.blocking().acquire(&Charge::new(name, quota)).expect("a decision"),
            );
        }
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        for seed in 1..threads {
            scope.spawn(move || work(seed + 1));
        }
        work(1);
    });
    start.elapsed()
}

criterion_group!(benches, decisions);
criterion_main!(benches);
