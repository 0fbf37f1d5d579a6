//! The accuracy of every algorithm against an exact oracle, under four loads and five faults, on
//! memory, Redis and a cluster. docs/accuracy.md defines the terms and has the figures.
//!
//! By default the short form runs: memory under every fault, and Redis without any, compared with
//! the page row by row; and every decision of the exact definitions, which fails if one is off by
//! one. `make accuracy` sets `ACCURACY=write`, measures everything, and writes the page.

#[path = "../support/mod.rs"]
mod support;

/// Definition of each algorithm, decision by decision.
mod definition;
/// Algorithms and encodings.
mod form;
/// The exact log, and over- and under-admission against it.
mod oracle;
/// docs/accuracy.md: written and read.
mod page;
/// Killed servers and failovers, in real time.
mod real_time;
/// Primary with replicas and Sentinels.
#[path = "../../../tidegate/tests/support/sentinel.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod sentinel;
/// Requests of the loads.
mod traffic;
/// Decisions in virtual time.
mod virtual_time;

/// `support::server`, under the name that `sentinel` uses.
mod server {
    pub(crate) use super::support::{Redis, folder_in_memory, free_port};
}

use form::Form;
use page::{Page, Row, RowName};
use support::{Cluster, Redis};
use tidegate_tools::simulate::load::LoadKind;
use traffic::{LOADS, Traffic};
use virtual_time::{Change, Fault, Run};

/// Place of the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Memory,
    Redis,
    Cluster,
}

impl Place {
    const ALL: [Self; 3] = [Self::Memory, Self::Redis, Self::Cluster];

    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Redis => "Redis",
            Self::Cluster => "cluster",
        }
    }
}

/// Table of the page, in virtual time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Table {
    NoFault,
    ClockStepsBack,
    LimitChanges,
    WindowChanges,
    AlgorithmChanges,
}

impl Table {
    const ALL: [Self; 5] = [
        Self::NoFault,
        Self::ClockStepsBack,
        Self::LimitChanges,
        Self::WindowChanges,
        Self::AlgorithmChanges,
    ];

    /// Returns the runs of a row: one, or one per other form.
    fn runs(self, form: Form, load: LoadKind) -> Vec<Run> {
        let run = |fault| Run { form, load, fault };
        match self {
            Self::NoFault => vec![run(Fault::None)],
            Self::ClockStepsBack => vec![run(Fault::ClockStepsBack)],
            Self::LimitChanges => vec![run(Fault::Rollout(Change::Limit))],
            Self::WindowChanges => vec![run(Fault::Rollout(Change::Window))],
            Self::AlgorithmChanges => {
                let others = Form::ALL.into_iter().filter(|other| *other != form);
                others.map(|other| run(Fault::Rollout(Change::Form(other)))).collect()
            }
        }
    }
}

/// Returns the rows of these tables on one store.
async fn rows(place: Place, tables: &[Table], urls: &[String]) -> Vec<Row> {
    let mut names = Vec::new();
    let mut runs = Vec::new();
    for table in tables {
        for form in Form::ALL {
            for load in LOADS {
                for run in table.runs(form, load) {
                    names.push(RowName { table: *table, form, load, place });
                    runs.push(run);
                }
            }
        }
    }
    let results = virtual_time::decide_all(place, urls, &runs).await;
    let mut rows: Vec<Row> = Vec::new();
    for ((name, run), decisions) in names.into_iter().zip(runs).zip(results) {
        let figures = virtual_time::figures(run, &decisions, place);
        match rows.last_mut() {
            Some(last) if last.name == name => last.runs.push((run, figures)),
            _ => rows.push(Row { name, runs: vec![(run, figures)] }),
        }
    }
    rows
}

fn is_writing() -> bool {
    std::env::var("ACCURACY").is_ok_and(|value| value == "write")
}

/// Compares the rows of this store with the page.
fn assert_on_page(rows: &[Row]) {
    let page = Page::read();
    let mut differences = Vec::new();
    for row in rows {
        let (found, cells) = (page.cells_of(row.name).unwrap_or("no row"), row.cells());
        if found != cells {
            differences.push(format!("{}\n  page {found}\n  now  {cells}", row.name));
        }
    }
    assert!(
        differences.is_empty(),
        "docs/accuracy.md differs in {} rows; `make accuracy` rewrites it:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_has_the_figures_of_memory_and_of_redis_without_faults() {
    if is_writing() {
        return write_page().await;
    }
    assert_on_page(&rows(Place::Memory, &Table::ALL, &[]).await);
    let many_clients = page::table_of_many_clients(&virtual_time::many_clients().await);
    assert_eq!(Page::read().table("ManyClients"), many_clients.trim());
    let redis = Redis::start();
    assert_on_page(&rows(Place::Redis, &[Table::NoFault], &[redis.url()]).await);
}

/// Measures everything, and writes the page.
async fn write_page() {
    let started = std::time::Instant::now();
    let mut all = rows(Place::Memory, &Table::ALL, &[]).await;
    eprintln!("memory: {:?}", started.elapsed());
    let redis = Redis::start();
    all.extend(rows(Place::Redis, &Table::ALL, &[redis.url()]).await);
    drop(redis);
    eprintln!("Redis: {:?}", started.elapsed());
    let cluster = Cluster::start();
    all.extend(rows(Place::Cluster, &Table::ALL, &cluster.urls()).await);
    drop(cluster);
    eprintln!("cluster: {:?}", started.elapsed());
    let mut outages = Vec::new();
    for outage in real_time::Outage::ALL {
        outages.push((outage, real_time::measure(outage).await));
        eprintln!("{outage:?}: {:?}", started.elapsed());
    }
    page::write(&all, &virtual_time::many_clients().await, &outages);
    eprintln!("written: {:?}", started.elapsed());
}

/// Asserts that every decision is that of the definition, with exactly this limit.
async fn assert_exact(place: Place, urls: &[String]) {
    let mut runs = Vec::new();
    for form in Form::ALL {
        runs.extend(LOADS.map(|load| Run { form, load, fault: Fault::None }));
    }
    let results = virtual_time::decide_all(place, urls, &runs).await;
    for (run, decisions) in runs.iter().zip(&results) {
        let traffic = Traffic::of(run.load);
        let difference = |limit| definition::first_difference(run.form, limit, &traffic, decisions);
        let at = difference(form::LIMIT);
        assert_eq!(at, None, "{run:?} on {place:?}: not the definition at request {at:?}");
        // A limit that is off by one must be found, or this test would pass for any limiter.
        for wrong in [form::LIMIT - 1, form::LIMIT + 1] {
            assert!(difference(wrong).is_some(), "{run:?} also fits the limit {wrong}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_in_memory_are_those_of_the_definition() {
    assert_exact(Place::Memory, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_on_redis_are_those_of_the_definition() {
    let redis = Redis::start();
    assert_exact(Place::Redis, &[redis.url()]).await;
}

#[test]
fn page_has_the_text_of_its_template() {
    if !is_writing() {
        assert_eq!(Page::read().text, page::TEMPLATE);
    }
}
