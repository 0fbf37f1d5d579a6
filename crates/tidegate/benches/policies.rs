//! Nanoseconds to select the policies of a request among 10, 100 and 1,000 policies. The time
//! should hardly grow.
//!
//! `cargo bench -p tidegate --bench policies`

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use tidegate::{Policies, Policy, Quota};

/// Creates services with three policies each: a subtree, one path, and an Envoy domain.
fn policies(count: usize) -> Policies {
    let quota = Quota::token_bucket(100, Duration::from_secs(60)).expect("valid");
    let policy = |number: usize| {
        let policy = Policy::builder(format!("policy-{number}"), quota.clone());
        let service = number / 3;
        let policy = match number % 3 {
            0 => policy.matches("path", [format!("/service-{service}/**")]),
            1 => policy.matches("path", [format!("/service-{service}/items/*")]),
            _ => policy.matches("domain", [format!("service-{service}")]),
        };
        policy.key(["ip"]).build().expect("valid")
    };
    Policies::new((0..count).map(policy).collect()).expect("unique names")
}

fn select(criterion: &mut Criterion) {
    let request = [
        ("ip", "203.0.113.9"),
        ("method", "GET"),
        ("path", "/service-2/items/7"),
        ("header.x-user-id", "u1"),
    ];
    let request = BTreeMap::from(request.map(|(name, value)| (name.to_owned(), value.to_owned())));
    let mut group = criterion.benchmark_group("select");
    group
        .sample_size(30)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    for count in [10, 100, 1_000] {
        let policies = policies(count);
        assert_eq!(policies.select(&request, None).expect("valid").charges.len(), 2);
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            bencher.iter(|| black_box(policies.select(black_box(&request), None)).is_ok());
        });
    }
    group.finish();
}

criterion_group!(benches, select);
criterion_main!(benches);
