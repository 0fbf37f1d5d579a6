//! The guides of `docs/`: their commands run and print the shown output, their links lead
//! somewhere, and the references of metrics and of variables are complete.

#[path = "../support/mod.rs"]
mod support;

mod blocks;
mod links;
mod metrics;
mod page;
mod session;
mod variables;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Page whose commands run.
struct Page {
    name: &'static str,
    /// Number of steps that it has at least.
    min_steps: usize,
    /// Steps before its first one, in the form of a page.
    before: &'static str,
}

const PAGES: [Page; 21] = [
    page("README.md", 3, REDIS),
    page("docs/getting-started.md", 20, ""),
    page("docs/install.md", 3, SERVICE),
    page("docs/concepts.md", 7, ""),
    page("docs/http-api.md", 20, ""),
    page("docs/redis-clients.md", 2, ""),
    page("docs/python.md", 4, ""),
    page("docs/holds.md", 14, ""),
    page("docs/monitoring.md", 3, SERVICE),
    page("docs/gateway.md", 11, ""),
    page("docs/proxies.md", 8, ""),
    page("docs/migrating.md", 7, ""),
    page("docs/configuration.md", 1, ""),
    page("docs/operations.md", 14, ""),
    page("docs/redis.md", 1, REDIS),
    page("docs/metrics.md", 2, ""),
    page("docs/simulate.md", 2, LOGS),
    page("docs/from-a-log.md", 6, ""),
    page("docs/bench.md", 1, ""),
    page("docs/algorithms.md", 5, LOGS),
    page("deploy/README.md", 1, CADDY),
];

const fn page(name: &'static str, min_steps: usize, before: &'static str) -> Page {
    Page { name, min_steps, before }
}

const SERVICE: &str = "```sh\ntidegate serve\n```\n";
/// One of the proxies of the folder, an application, and the service with the file of the folder.
const CADDY: &str = "\
```sh
python3 -m http.server 3000
```
```sh
tidegate serve --config deploy/tidegate.yaml
```
```sh
caddy run --config deploy/caddy/Caddyfile
```
";
const REDIS: &str = "\
```sh
redis-server --save ''
```
`tidegate.yaml`:
```yaml
store: {redis: 'redis://127.0.0.1:6379', instances: 1}
policies: [{name: per-user, key: [ip], limit: 100, window: 60s}]
```
";
/// Access logs, and two configurations.
const LOGS: &str = "\
`access.log`:
```text
203.0.113.9 - - [16/Nov/2026:07:44:08 +0000] \"GET /a HTTP/1.1\" 200 5 \"-\" \"curl/8.11\"
203.0.113.9 - - [16/Nov/2026:07:44:09 +0000] \"GET /b HTTP/1.1\" 200 5 \"-\" \"curl/8.11\"
```
`tidegate.yaml`:
```yaml
policies: [{name: per-client, key: [ip], limit: 1, window: 60s}]
```
```sh
gzip -c access.log > access.log.1.gz
sed 's/limit: 1/limit: 2/' tidegate.yaml > new.yaml
```
";

/// Returns the root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("a repository")
}

#[test]
fn commands_of_the_pages_print_the_shown_output() {
    // Two pages at a time: most of their time is the start of services.
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(page) = PAGES.get(next.fetch_add(1, Ordering::Relaxed)) {
                    failures.lock().expect("no panic").extend(run_page(page));
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no panic");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn the_readme_is_short() {
    let lines = std::fs::read_to_string(root().join("README.md")).expect("a page").lines().count();
    assert!(lines < 200, "README.md has {lines} lines: details belong into docs/");
}

/// Runs the steps of a page, and returns what differs.
fn run_page(Page { name, min_steps, before }: &Page) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(name)).expect("a page");
    let steps = page::steps(&text);
    if steps.len() < *min_steps {
        return vec![format!("{name} has {} steps, fewer than {min_steps}", steps.len())];
    }
    let all: Vec<_> = page::steps(before).into_iter().chain(steps).collect();
    session::run(&all).into_iter().map(|failure| format!("{name}:{failure}")).collect()
}
