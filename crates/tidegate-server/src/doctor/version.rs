//! Which server it is, whether it writes, and whether more can connect.

use super::{Finding, Report, Subject};

/// The scripts set a value and its expiry in one command, `SET … PXAT`, which came with this
/// version.
const OLDEST: (u32, u32) = (6, 2);
/// Of `maxclients`, in percent.
const MANY_CLIENTS: u64 = 80;

pub(super) fn check(subject: &Subject<'_>, report: &mut Report) {
    let info = &subject.info;
    let (Some(server), Some(version)) = (info.server(), info.version()) else {
        let finding = Finding::note("version", "unknown: this user may not ask by INFO");
        let advice = "to see more, examine as another user, or grant +info +config|get +scan +pttl +acl|whoami";
        return subject.found(report, finding.advice(advice));
    };
    subject.found(
        report,
        if version < OLDEST {
            let message = format!("{server} is too old: the scripts need Redis 6.2 or Valkey");
            Finding::error("version", message).advice("upgrade Redis")
        } else {
            Finding::ok("version", server)
        },
    );
    if info.text("role") == Some("slave") {
        let primary = info.text("master_host").zip(info.text("master_port"));
        let primary = primary.map_or_else(String::new, |(host, port)| format!(" of {host}:{port}"));
        let finding = Finding::error(
            "role",
            format!("it is a replica{primary}: it does not write, so it cannot decide"),
        );
        subject.found(report, finding.advice("give the primary's address, or the sentinels'"));
    }
    if let (Some(clients), Some(most)) =
        (info.number("connected_clients"), info.number("maxclients"))
    {
        let message = format!("{clients} of at most {most} clients are connected");
        subject.found(
            report,
            if clients.saturating_mul(100) >= most.saturating_mul(MANY_CLIENTS) {
                let advice =
                    "raise `maxclients`: each instance of tidegate needs a connection to each node";
                Finding::warning("connections", message).advice(advice)
            } else {
                Finding::ok("connections", message)
            },
        );
    }
}
