//! A cluster: whether every slot has a node that decides.

use tidegate::store::redis::Reply;

use super::info::Info;
use super::{Finding, Report, Subject};

const CHECK: &str = "topology";
const SLOTS: i64 = 16_384;

/// As this node sees it.
pub(super) async fn check(subject: &Subject<'_>, primaries: usize, report: &mut Report) {
    let slots = subject.store.ask_node(subject.address, &["CLUSTER", "SLOTS"]).await.ok();
    let state = match subject.store.ask_node(subject.address, &["CLUSTER", "INFO"]).await {
        Ok(Reply::Text(text)) => Info::parse(&text).text("cluster_state").map(str::to_owned),
        _ => None,
    };
    let cluster = format!("a cluster of {primaries} primaries");
    let Some(served) = slots.as_ref().and_then(served) else {
        return report.add(Finding::note(
            CHECK,
            format!("{cluster}; its slots are unknown: this user may not ask by CLUSTER SLOTS"),
        ));
    };
    let advice = "redis-cli --cluster check tells which, --cluster fix mends";
    report.add(match state.as_deref() {
        _ if served < SLOTS => {
            let message = format!(
                "{cluster}: nobody serves {} of {SLOTS} slots, so their keys cannot be decided",
                SLOTS - served
            );
            Finding::error(CHECK, message).advice(advice)
        }
        Some(state) if state != "ok" => {
            Finding::error(CHECK, format!("{cluster}: its state is {state}, so it decides nothing"))
                .advice(advice)
        }
        _ => Finding::ok(CHECK, format!("{cluster}, all {SLOTS} slots served")),
    });
    if primaries < 3 {
        let message =
            format!("{primaries} primaries cannot agree on a failover: a majority has to be left");
        report.add(Finding::warning("failover", message).advice("have three primaries or more"));
    }
    match subject.setting("cluster-require-full-coverage").await.as_deref() {
        Some("no") => {
            report.add(Finding::ok(
                "full-coverage",
                "if the nodes of some slots are lost, the others go on deciding",
            ));
        }
        Some(_) => {
            let message = "if the nodes of one slot are lost, the whole cluster refuses to decide";
            let advice = "CONFIG SET cluster-require-full-coverage no on every node: only that slot's keys are affected then";
            report.add(Finding::note("full-coverage", message).advice(advice));
        }
        None => report
            .add(Finding::note("full-coverage", "unknown: this user may not ask by CONFIG GET")),
    }
}

/// How many slots the reply of CLUSTER SLOTS names; `None` if it is none.
fn served(reply: &Reply) -> Option<i64> {
    let Reply::List(ranges) = reply else { return None };
    let length = |range: &Reply| match range {
        Reply::List(parts) => match parts.as_slice() {
            [Reply::Integer(first), Reply::Integer(last), ..] => Some(last - first + 1),
            _ => None,
        },
        _ => None,
    };
    ranges.iter().map(length).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_counted() {
        let range = |first, last| {
            Reply::List(vec![Reply::Integer(first), Reply::Integer(last), Reply::List(Vec::new())])
        };
        assert_eq!(served(&Reply::List(vec![range(0, 5_460), range(5_461, 16_383)])), Some(SLOTS));
        assert_eq!(served(&Reply::List(vec![range(7, 7)])), Some(1));
        assert_eq!(served(&Reply::List(Vec::new())), Some(0));
        assert_eq!(served(&Reply::Error("NOPERM no".to_owned())), None);
        assert_eq!(served(&Reply::List(vec![Reply::Nil])), None);
    }
}
