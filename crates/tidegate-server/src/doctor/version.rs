//! Checks the version and the role of a server, and its number of clients.

use super::{Finding, NodeUnderTest};

/// Oldest supported version: the first one with `SET … PXAT`, which the scripts use.
const MIN_VERSION: (u32, u32) = (6, 2);
/// Share of `maxclients` that causes a warning, in percent.
const MAX_CLIENTS_PERCENT: u64 = 80;

pub(super) fn check(node: &mut NodeUnderTest<'_>) {
    let (Some(server), Some(version)) = (node.info.server(), node.info.version()) else {
        let advice = "for more checks, connect as another user, or grant +info +config|get +scan \
                      +pttl +acl|whoami";
        return node.add(Finding::unknown("version", "INFO").advice(advice));
    };
    node.add(if version < MIN_VERSION {
        let message = format!("{server} is too old: the scripts need Redis 6.2 or Valkey");
        Finding::error("version", message).advice("upgrade Redis")
    } else {
        Finding::ok("version", server)
    });
    if node.info.text("role") == Some("slave") {
        let primary = node.info.text("master_host").zip(node.info.text("master_port"));
        let primary = primary.map_or_else(String::new, |(host, port)| format!(" of {host}:{port}"));
        let finding = Finding::error(
            "role",
            format!("it is a replica{primary}: it rejects writes, so decisions fail"),
        );
        let advice = "configure the address of the primary, or those of the sentinels";
        node.add(finding.advice(advice));
    }
    if let (Some(clients), Some(max)) =
        (node.info.number("connected_clients"), node.info.number("maxclients"))
    {
        let message = format!("{clients} of at most {max} clients are connected");
        node.add(if clients.saturating_mul(100) >= max.saturating_mul(MAX_CLIENTS_PERCENT) {
            let advice =
                "raise `maxclients`: each instance of tidegate needs a connection to each node";
            Finding::warning("connections", message).advice(advice)
        } else {
            Finding::ok("connections", message)
        });
    }
}
