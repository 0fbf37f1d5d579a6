//! Sentinels: whether they would agree on a failover.

use tidegate::store::redis::NodeHealth;

use super::info::pairs;
use super::{Finding, Report, Role, Subject};
use tidegate::store::redis::Reply;

const CHECK: &str = "sentinels";

pub(super) async fn check(primary: &Subject<'_>, sentinels: &[&NodeHealth], report: &mut Report) {
    let address = primary.address;
    report.add(Finding::ok("topology", format!("the sentinels name {address} as the primary")));
    for sentinel in sentinels {
        report.node(&sentinel.address, Role::Sentinel);
        let finding =
            match primary.store.ask_node(&sentinel.address, &["SENTINEL", "MASTERS"]).await {
                Ok(reply) => told(&reply, address),
                Err(error) => {
                    let finding =
                        Finding::warning(CHECK, format!("this sentinel does not answer: {error}"));
                    finding.advice("start it: each that is missing makes a failover less likely")
                }
            };
        report.add(finding.on(&sentinel.address));
    }
}

/// What a sentinel thinks of the primary at this address.
fn told(reply: &Reply, address: &str) -> Finding {
    let Reply::List(watched) = reply else {
        return Finding::note(CHECK, "unknown: this user may not ask by SENTINEL MASTERS");
    };
    let entry = watched.iter().map(pairs).find(|entry| {
        let port = value(entry, "port").unwrap_or_default();
        // It may say its host by another name.
        value(entry, "ip").is_some_and(|ip| {
            format!("{ip}:{port}") == address || format!("[{ip}]:{port}") == address
        })
    });
    let Some(entry) = entry else {
        let message =
            format!("this sentinel does not watch {address}: it names another primary, or none");
        return Finding::warning(CHECK, message).advice("see SENTINEL MASTERS there");
    };
    let number = |name| value(&entry, name).and_then(|value| value.parse::<u64>().ok());
    let (Some(others), Some(quorum)) = (number("num-other-sentinels"), number("quorum")) else {
        return Finding::note(CHECK, "unknown: its reply to SENTINEL MASTERS has no quorum");
    };
    let all = others + 1;
    let (message, down) = (
        format!("it knows of {all} sentinels, quorum {quorum}"),
        value(&entry, "flags").unwrap_or_default(),
    );
    if quorum > all {
        let message = format!("{message}: they can never agree that the primary is down");
        Finding::error(CHECK, message)
            .advice(format!("start more sentinels, or lower the quorum to {}", all / 2 + 1))
    } else if down.contains("down") {
        Finding::warning(CHECK, format!("{message}; it thinks that the primary is down ({down})"))
    } else if all < 3 {
        let message = format!(
            "{message}: if one of them is lost with the primary, there is no majority for a failover"
        );
        Finding::warning(CHECK, message)
            .advice("have three sentinels or more, on different machines")
    } else {
        Finding::ok(CHECK, message)
    }
}

fn value<'a>(entry: &[(&'a str, &'a str)], name: &str) -> Option<&'a str> {
    entry.iter().find(|(found, _)| *found == name).map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    fn watched(others: &str, quorum: &str, flags: &str) -> Reply {
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
            (watched("2", "2", "master"), Level::Ok, "3 sentinels, quorum 2"),
            (watched("1", "1", "master"), Level::Warning, "no majority"),
            (watched("2", "4", "master"), Level::Error, "can never agree"),
            (watched("2", "2", "master,s_down"), Level::Warning, "s_down"),
            (Reply::Error("NOPERM".to_owned()), Level::Note, "unknown"),
            (Reply::List(Vec::new()), Level::Warning, "does not watch 10.0.0.1:6379"),
        ] {
            let finding = told(&reply, address);
            assert_eq!(finding.level, level, "{finding:?}");
            assert!(finding.message.contains(says), "{finding:?}");
        }
    }
}
