//! Load generators for throughput: `wrk` for HTTP, and `h2load` for gRPC.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process::{Server, run_tool};

/// Throughput and CPU time of a server under load.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Throughput {
    pub(crate) per_second: f64,
    /// CPU time of the server per request, in microseconds.
    pub(crate) cpu_micros: f64,
}

impl Throughput {
    /// Runs a load generator, which returns the number of requests and the requests per second, and
    /// measures the CPU time of the server.
    pub(crate) fn measure(
        server: &Server,
        load: impl FnOnce() -> Result<(f64, f64)>,
    ) -> Result<Self> {
        let before = server.cpu_seconds()?;
        let (requests, per_second) = load()?;
        ensure!(requests > 0.0, "no request was answered");
        Ok(Self { per_second, cpu_micros: (server.cpu_seconds()? - before) * 1e6 / requests })
    }
}

/// Runs wrk with 64 connections and the requests of the script.
pub(crate) fn wrk(
    server: &Server,
    script: &Path,
    url: &str,
    duration: Duration,
) -> Result<Throughput> {
    Throughput::measure(server, || {
        let duration_flag = format!("-d{}s", duration.as_secs());
        let text = run_tool(
            Command::new("wrk").args(["-t1", "-c64", &duration_flag, "-s"]).arg(script).arg(url),
        )?;
        ensure!(!text.contains("Non-2xx"), "wrk got answers other than 200: {text}");
        let word =
            |line: &str| line.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
        let requests = text.lines().find(|line| line.contains("requests in")).and_then(word);
        let per_second =
            text.lines().find_map(|line| line.strip_prefix("Requests/sec:")).and_then(word);
        requests.zip(per_second).with_context(|| format!("wrk printed no rate: {text}"))
    })
}

/// Runs h2load with 8 connections of 32 streams, all with the same message.
pub(crate) fn h2load(
    server: &Server,
    message: &Path,
    url: &str,
    duration: Duration,
) -> Result<Throughput> {
    Throughput::measure(server, || {
        let text = run_tool(
            Command::new("h2load")
                .args(["-t1", "-c8", "-m32", "-D", &duration.as_secs().to_string(), "-d"])
                .arg(message)
                .args(["-H", "content-type: application/grpc", "-H", "te: trailers", url]),
        )?;
        // finished in 3.00s, 101234.33 req/s, 9.12MB/s
        let per_second = text.lines().find_map(|line| line.strip_prefix("finished in"));
        let per_second =
            per_second.and_then(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
        // requests: 303702 total, 303958 started, 303702 done, 303702 succeeded, 0 failed, 0
        // errored, 0 timeout
        let counts =
            text.lines().find_map(|line| line.strip_prefix("requests:")).unwrap_or_default();
        let count = |name: &str| {
            let entry = counts.split(',').find(|entry| entry.trim_end().ends_with(name));
            entry.and_then(|entry| entry.split_whitespace().next()?.parse::<f64>().ok())
        };
        let (done, succeeded) =
            count("done").zip(count("succeeded")).with_context(|| format!("h2load: {text}"))?;
        // Requests in flight at the end are aborted.
        ensure!(succeeded >= done - 8.0 * 32.0, "h2load had failures: {text}");
        Ok((succeeded, per_second.context("h2load printed no rate")?))
    })
}
