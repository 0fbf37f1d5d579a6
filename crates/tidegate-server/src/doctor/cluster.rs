//! Checks whether a cluster serves every slot and can fail over.

use tidegate::store::redis::Reply;

use super::info::Info;
use super::{Finding, NodeUnderTest, Report};

const CHECK: &str = "topology";
const SLOTS: i64 = 16_384;

/// Checks the cluster from the view of one node.
pub(super) async fn check(node: &NodeUnderTest<'_>, primaries: usize, report: &mut Report) {
    let slots = node.store.ask_node(node.address, &["CLUSTER", "SLOTS"]).await.ok();
    let state = match node.store.ask_node(node.address, &["CLUSTER", "INFO"]).await {
        Ok(Reply::Text(text)) => Info::parse(&text).text("cluster_state").map(str::to_owned),
        _ => None,
    };
    let cluster = format!("a cluster of {primaries} primaries");
    let Some(served) = slots.as_ref().and_then(served_slots) else {
        return report.add(Finding::note(
            CHECK,
            format!("{cluster}; its slots are unknown: this user may not run CLUSTER SLOTS"),
        ));
    };
    let advice = "redis-cli --cluster check lists the slots, --cluster fix repairs them";
    report.add(match state.as_deref() {
        _ if served < SLOTS => {
            let message = format!(
                "{cluster}: {} of {SLOTS} slots are not served, so their keys cannot be decided",
                SLOTS - served
            );
            Finding::error(CHECK, message).advice(advice)
        }
        Some(state) if state != "ok" => {
            Finding::error(CHECK, format!("{cluster}: its state is {state}, so it is unavailable"))
                .advice(advice)
        }
        _ => Finding::ok(CHECK, format!("{cluster}, all {SLOTS} slots served")),
    });
    if primaries < 3 {
        let message =
            format!("{primaries} primaries cannot agree on a failover, which needs a majority");
        report.add(Finding::warning("failover", message).advice("run at least three primaries"));
    }
    match node.setting("cluster-require-full-coverage").await.as_deref() {
        Some("no") => {
            report.add(Finding::ok(
                "full-coverage",
                "if the nodes of some slots are lost, the other slots stay available",
            ));
        }
        Some(_) => {
            let message = "if the nodes of one slot are lost, the whole cluster is unavailable";
            let advice = "CONFIG SET cluster-require-full-coverage no on every node: then only \
                          the keys of that slot are affected";
            report.add(Finding::note("full-coverage", message).advice(advice));
        }
        None => report.add(Finding::unknown("full-coverage", "CONFIG GET")),
    }
}

/// Returns the number of slots in a reply of CLUSTER SLOTS; `None` if the reply is malformed.
fn served_slots(reply: &Reply) -> Option<i64> {
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
    fn served_slots_are_counted() {
        let range = |first, last| {
            Reply::List(vec![Reply::Integer(first), Reply::Integer(last), Reply::List(Vec::new())])
        };
        assert_eq!(
            served_slots(&Reply::List(vec![range(0, 5_460), range(5_461, 16_383)])),
            Some(SLOTS)
        );
        assert_eq!(served_slots(&Reply::List(vec![range(7, 7)])), Some(1));
        assert_eq!(served_slots(&Reply::List(Vec::new())), Some(0));
        assert_eq!(served_slots(&Reply::Error("NOPERM no".to_owned())), None);
        assert_eq!(served_slots(&Reply::List(vec![Reply::Nil])), None);
    }
}
