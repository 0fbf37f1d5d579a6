//! Checks whether the sentinels can agree on a failover.

use tidegate::store::redis::{NodeHealth, Reply};

use super::{Finding, NodeRole, NodeUnderTest};
use crate::tool::redis_info::{self, pairs, value};

const CHECK: &str = "sentinels";

pub(super) async fn check(primary: &mut NodeUnderTest<'_>, sentinels: &[&NodeHealth]) {
    let address = primary.address;
    primary
        .report
        .add(Finding::ok("topology", format!("the sentinels name {address} as the primary")));
    for sentinel in sentinels {
        primary.report.node(&sentinel.address, NodeRole::Sentinel);
        let finding =
            match primary.store.ask_node(&sentinel.address, &["SENTINEL", "MASTERS"]).await {
                Ok(reply) => sentinel_finding(&reply, address),
                Err(error) => {
                    let message = format!("this sentinel does not respond: {error}");
                    Finding::warning(CHECK, message)
                        .advice("start it: every missing sentinel makes a failover less likely")
                }
            };
        primary.report.add(finding.on(&sentinel.address));
    }
}

/// Checks a sentinel's view of the primary at an address.
fn sentinel_finding(reply: &Reply, address: &str) -> Finding {
    let Reply::List(monitored) = reply else {
        return Finding::unknown(CHECK, "SENTINEL MASTERS");
    };
    // A sentinel may report the primary by host name, which then does not match.
    let entry = monitored.iter().map(pairs).find(|entry| {
        let port = value(entry, "port").unwrap_or_default();
        value(entry, "ip").is_some_and(|ip| {
            format!("{ip}:{port}") == address || format!("[{ip}]:{port}") == address
        })
    });
    let Some(entry) = entry else {
        let message =
            format!("this sentinel does not monitor {address}: it knows another primary, or none");
        return Finding::warning(CHECK, message).advice("run SENTINEL MASTERS there");
    };
    let number = |name| value(&entry, name).and_then(|value| value.parse::<u64>().ok());
    let (Some(others), Some(quorum)) = (number("num-other-sentinels"), number("quorum")) else {
        return Finding::note(CHECK, "unknown: its reply to SENTINEL MASTERS has no quorum");
    };
    let all = others + 1;
    let message = format!("it knows {all} sentinels, quorum {quorum}");
    let flags = value(&entry, "flags").unwrap_or_default();
    if quorum > all {
        let message = format!("{message}: they can never agree that the primary is down");
        Finding::error(CHECK, message)
            .advice(format!("start more sentinels, or lower the quorum to {}", all / 2 + 1))
    } else if flags.contains("down") {
        Finding::warning(CHECK, format!("{message}; it considers the primary down ({flags})"))
    } else if all < 3 {
        let message = format!(
            "{message}: if one of them is lost with the primary, there is no majority for a \
             failover"
        );
        Finding::warning(CHECK, message)
            .advice("run at least three sentinels, on different machines")
    } else {
        Finding::ok(CHECK, message)
    }
}

/// Returns the address of a replica in a reply of SENTINEL REPLICAS.
pub(super) fn address_of(replica: &Reply) -> Option<String> {
    let fields = pairs(replica);
    Some(redis_info::address(value(&fields, "ip")?, value(&fields, "port")?))
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;

    fn monitored(others: &str, quorum: &str, flags: &str) -> Reply {
        let words = [
            "name",
            "mymaster",
            "ip",
            "10.0.0.1",
            "port",
            "6379",
            "flags",
            flags,
            "num-other-sentinels",
            others,
            "quorum",
            quorum,
        ];
        Reply::List(vec![Reply::List(words.map(|word| Reply::Text(word.to_owned())).to_vec())])
    }

    #[test]
    fn sentinels_must_be_able_to_agree() {
        let address = "10.0.0.1:6379";
        for (reply, level, says) in [
            (monitored("2", "2", "master"), Severity::Ok, "3 sentinels, quorum 2"),
            (monitored("1", "1", "master"), Severity::Warning, "no majority"),
            (monitored("2", "4", "master"), Severity::Error, "can never agree"),
            (monitored("2", "2", "master,s_down"), Severity::Warning, "s_down"),
            (Reply::Error("NOPERM".to_owned()), Severity::Note, "unknown"),
            (Reply::List(Vec::new()), Severity::Warning, "does not monitor 10.0.0.1:6379"),
        ] {
            let finding = sentinel_finding(&reply, address);
            assert_eq!(finding.level, level, "{finding:?}");
            assert!(finding.message.contains(says), "{finding:?}");
        }
    }
}
