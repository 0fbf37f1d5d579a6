//! Sections on the Tower layer and on the gateway.

use tidegate_bench::results::Results;

use super::{NOT_MEASURED, Page, SuiteResults, thousands};
use crate::gateway::{CASES, NO_OP};

pub(super) fn write(page: &mut Page, suites: &SuiteResults) {
    if let Some(results) = &suites.layer {
        write_layer(page, results);
    }
    if let Some(results) = &suites.gateway {
        write_gateway(page, results);
    }
}

fn write_layer(page: &mut Page, results: &Results) {
    page.heading("Tower layer");
    page.paragraph(
        "A request with one header passes through the layer to a service whose response has \
         neither headers nor a body; one limit counts by that header, on memory, and the layer \
         adds five headers. The time includes that of the service, which drops the request. Two \
         of the allocations are those of the response's header map. The layer with constant \
         headers decides and renders nothing: it only copies a map of the same five headers.",
    );
    let row = |candidate: &str| {
        let median = |metric: &str, digits: usize| {
            results
                .spread("layer", candidate, metric)
                .map_or(NOT_MEASURED.to_owned(), |spread| format!("{:.digits$}", spread.median))
        };
        vec![candidate.to_owned(), median("ns", 0), median("allocations", 1)]
    };
    let rows = ["empty service", "constant headers", "one quota", "one policy"].map(row);
    page.table(&["", "ns per request", "allocations per request"], &rows);
    let median = |candidate: &str, metric: &str| {
        let spread = results.spread("acquire", candidate, metric);
        spread.map_or(NOT_MEASURED.to_owned(), |spread| format!("{:.1}", spread.median))
    };
    page.paragraph(&format!(
        "Without the layer, in a loop over a thousand keys, `limiter.blocking().acquire` takes {} \
         ns and `limiter.acquire`, awaited, {} ns: a median of {} ns more in the same round.",
        median("blocking", "ns"),
        median("async", "ns"),
        median("async", "ns_more"),
    ));
}

fn write_gateway(page: &mut Page, results: &Results) {
    page.heading("Gateway");
    page.paragraph(
        "`tidegate gateway` with a limit by address on memory, and nginx with `limit_req`, in \
         front of the same nginx. Client, proxy and upstream share the cores. Small answers have \
         ten bytes and are requested by `wrk` over 64 connections; a body of a gigabyte is one \
         request, and its length is checked. nginx streams bodies, too: it writes none to files. \
         The no-op proxy is hyper's server and client alone: it limits nothing, has a connection \
         to the upstream for each of a client, and changes only the Host.",
    );
    let row = |(case, metric): &(&str, &str)| {
        let unit = if *metric == "per_second" { "requests/s" } else { "MB/s" };
        let median = |candidate: &str| {
            results.spread(case, candidate, metric).map_or(NOT_MEASURED.to_owned(), |spread| {
                format!("{} {unit}", thousands(spread.median))
            })
        };
        let ratio = |candidate: &str| {
            let ratio = results.ratio(metric, (case, candidate), (case, "nginx"));
            ratio.map_or(NOT_MEASURED.to_owned(), |ratio| ratio.to_string())
        };
        let [own, nginx, no_op] = ["tidegate", "nginx", NO_OP].map(median);
        vec![(*case).to_owned(), own, nginx, ratio("tidegate"), no_op, ratio(NO_OP)]
    };
    let rows: Vec<Vec<String>> = CASES.iter().map(row).collect();
    let heads = ["", "tidegate", "nginx", "ratio", "no-op proxy", "ratio of it to nginx"];
    page.table(&heads, &rows);
}
