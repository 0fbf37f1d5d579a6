//! Checks whether a cluster serves every slot and can fail over.

use tidegate::store::redis::Reply;

use super::{ConfigGet, Finding, NodeUnderTest};
use crate::tool::redis_info::{self, Info};

const CHECK: &str = "topology";
const SLOTS: i64 = 16_384;

/// Checks the cluster from the view of one node.
pub(super) async fn check(node: &mut NodeUnderTest<'_>, primaries: usize) {
    let slots = node.ask(&["CLUSTER", "SLOTS"]).await.ok();
    let state = match node.ask(&["CLUSTER", "INFO"]).await {
        Ok(Reply::Text(text)) => Info::parse(&text).text("cluster_state").map(str::to_owned),
        _ => None,
    };
    let cluster = format!("a cluster of {primaries} primaries");
    let Some(served) = slots.as_ref().and_then(served_slots) else {
        return node.report.add(Finding::note(
            CHECK,
            format!("{cluster}; its slots are unknown: this user may not run CLUSTER SLOTS"),
        ));
    };
    let advice = "redis-cli --cluster check lists the slots, --cluster fix repairs them";
    node.report.add(match state.as_deref() {
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
    if primaries == 1 && node.config == ConfigGet::Absent {
        let message = "one node has all slots, as the virtual node of a service: how it fails over \
                       cannot be checked from here";
        node.report.add(Finding::note("failover", message));
    } else if primaries < 3 {
        let message =
            format!("{primaries} primaries cannot agree on a failover, which needs a majority");
        node.report
            .add(Finding::warning("failover", message).advice("run at least three primaries"));
    }
    match node.setting("cluster-require-full-coverage").await.as_deref() {
        Some("no") => {
            node.report.add(Finding::ok(
                "full-coverage",
                "if the nodes of some slots are lost, the other slots stay available",
            ));
        }
        Some(_) => {
            let message = "if the nodes of one slot are lost, the whole cluster is unavailable";
            let advice = "CONFIG SET cluster-require-full-coverage no on every node: then only \
                          the keys of that slot are affected";
            node.report.add(Finding::note("full-coverage", message).advice(advice));
        }
        None => node.report.add(node.unknown_setting("full-coverage")),
    }
}

/// Checks whether slots of a node are migrating, as after a resharding that was interrupted.
pub(super) async fn check_migration(node: &mut NodeUnderTest<'_>) {
    const CHECK: &str = "migration";
    let Ok(Reply::Text(nodes)) = node.ask(&["CLUSTER", "NODES"]).await else {
        return node.add_unknown(CHECK, "CLUSTER NODES");
    };
    let (migrating, importing) = open_slots(&nodes);
    let lists =
        [(migrating, "migrating to another node"), (importing, "being imported from another node")];
    let mut is_calm = true;
    for (slots, state) in lists.iter().filter(|(slots, _)| !slots.is_empty()) {
        is_calm = false;
        let (noun, verb) = if slots.len() == 1 { ("slot", "is") } else { ("slots", "are") };
        let message = format!(
            "{noun} {} {verb} {state}: requests for their keys take further round trips",
            slots.join(", ")
        );
        let advice = format!(
            "if no resharding is running, one was interrupted: redis-cli --cluster fix {} ends it",
            node.address
        );
        node.add(Finding::warning(CHECK, message).advice(advice));
    }
    if is_calm {
        node.add(Finding::ok(CHECK, "no slot is migrating"));
    }
}

/// Returns the slots that the asked node is migrating and importing, by a reply of CLUSTER NODES.
/// Its own line ends with entries such as `[77->-id]` and `[93-<-id]`.
fn open_slots(nodes: &str) -> (Vec<&str>, Vec<&str>) {
    let own = nodes.lines().find(|line| line.contains("myself")).unwrap_or_default();
    let entries = || own.split(' ').filter_map(|word| word.strip_prefix('['));
    let marked = |mark| entries().filter_map(|entry| Some(entry.split_once(mark)?.0)).collect();
    (marked("->-"), marked("-<-"))
}

/// Returns the replicas of a primary by a reply of CLUSTER SLOTS.
pub(super) fn replicas_of(primary: &str, reply: &Reply) -> Vec<String> {
    let Reply::List(ranges) = reply else { return Vec::new() };
    let own_host = primary.rsplit_once(':').map_or("", |(host, _)| host);
    let address = |node: &Reply| {
        let Reply::List(parts) = node else { return None };
        let Some(Reply::Integer(port)) = parts.get(1) else { return None };
        // A node may leave out its host, which is that of the node that was asked.
        Some(match parts.first()? {
            Reply::Text(host) if !host.is_empty() && host != "?" => redis_info::address(host, port),
            _ => format!("{own_host}:{port}"),
        })
    };
    let mut replicas = Vec::new();
    for range in ranges {
        let Reply::List(parts) = range else { continue };
        let [_, _, owner, others @ ..] = parts.as_slice() else { continue };
        if address(owner).as_deref() == Some(primary) {
            replicas.extend(others.iter().filter_map(address));
        }
    }
    replicas.sort_unstable();
    replicas.dedup();
    replicas
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
    fn replicas_of_a_primary_are_found_by_its_address() {
        let node = |host: Option<&str>, port| {
            let host = host.map_or(Reply::Nil, |host| Reply::Text(host.to_owned()));
            Reply::List(vec![host, Reply::Integer(port), Reply::Text("id".to_owned())])
        };
        let range = |nodes: Vec<Reply>| {
            Reply::List([vec![Reply::Integer(0), Reply::Integer(9)], nodes].concat())
        };
        let reply = Reply::List(vec![
            range(vec![node(Some("10.0.0.1"), 1), node(Some("::1"), 2), node(None, 3)]),
            range(vec![node(Some("10.0.0.2"), 1), node(Some("10.0.0.3"), 1)]),
            range(vec![node(Some("10.0.0.1"), 1), node(None, 3)]),
            Reply::Nil,
        ]);
        assert_eq!(replicas_of("10.0.0.1:1", &reply), ["10.0.0.1:3", "[::1]:2"]);
        assert_eq!(replicas_of("10.0.0.9:1", &reply), Vec::<String>::new());
    }

    #[test]
    fn open_slots_are_those_of_the_asked_node() {
        let nodes = "07c3 127.0.0.1:1@2 master - 0 1 2 connected 10-20\n\
                     e7d1 127.0.0.1:3@4 myself,master - 0 0 1 connected 0-9 [7->-07c3] [8-<-07c3] \
                     [9->-07c3]\n";
        assert_eq!(open_slots(nodes), (vec!["7", "9"], vec!["8"]));
        assert_eq!(open_slots(""), (Vec::new(), Vec::new()));
    }

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
