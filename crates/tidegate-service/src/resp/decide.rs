//! Decisions of commands.

use std::sync::Arc;
use std::time::Duration;

use tidegate::PreparedCharge;
use tidegate::{
    PolicyDecision, PolicyDecisions, Progress, Query, QueryError, Quota, Timestamp, Waiting,
};

use super::reply::{HoldFields, RespReply, decision_fields};
use super::request::{CommandQuery, Dialect, LimitTarget};
use crate::api::problem::unavailable;
use crate::logs;
use crate::observer::OWN_QUOTA;
use crate::state::ActiveConfig;
use tidegate_api::operation::HoldAnswer;

/// Name under which `CL.THROTTLE` and `THROTTLE` count. It has none of their numbers, because a key
/// keeps its count when they change.
const THROTTLE_POLICY: &str = "cl.throttle";

/// Request that is decided, or waits for the store.
pub(super) enum Started {
    Decided(RespReply),
    Waiting(Box<Waiting<'static>>),
}

/// Starts to decide a request.
pub(super) fn start(active: &ActiveConfig, request: &CommandQuery<'_>) -> Started {
    Started::Decided(
        match active.limiter.start(request.operation.action(), query(active, request)) {
            Ok(Progress::Decided(decisions)) => decision_reply(active, request, &decisions),
            Ok(Progress::Waiting(waiting)) => {
                return Started::Waiting(Box::new(waiting.into_owned()));
            }
            Err(error) => error_reply(&error),
        },
    )
}

/// Decides a valid request.
pub(super) async fn decide(
    active: &ActiveConfig,
    request: Result<CommandQuery<'_>, String>,
) -> RespReply {
    match request {
        Ok(request) => finish(active, start(active, &request), request).await,
        Err(error) => RespReply::Error(error),
    }
}

/// Waits for the decision of a request.
pub(super) async fn finish(
    active: &ActiveConfig,
    started: Started,
    request: CommandQuery<'_>,
) -> RespReply {
    let waiting = match started {
        Started::Decided(reply) => return reply,
        Started::Waiting(waiting) => waiting,
    };
    // Lets others run while a large group starts.
    tokio::task::coop::consume_budget().await;
    match active.limiter.finish(*waiting).await {
        Ok(decisions) => decision_reply(active, &request, &decisions),
        Err(error) => error_reply(&error),
    }
}

fn query<'a>(active: &ActiveConfig, request: &'a CommandQuery<'_>) -> Query<'a, 'a> {
    let CommandQuery { operation, key, cost, .. } = request;
    let query = match &request.target {
        LimitTarget::Policy(policy) => Query::policy(policy, key).with_cost(*cost),
        LimitTarget::Quota(quota) => {
            Query::quota(key, quota).with_cost(*cost).with_metric_name(OWN_QUOTA)
        }
        LimitTarget::Throttle(_, quota) => {
            let quantity = cost.filter(|quantity| *quantity <= quota.burst());
            let charge = PreparedCharge::new(THROTTLE_POLICY, *key, quota)
                .with_metric_name(OWN_QUOTA)
                .with_action(operation.action())
                .with_cost(quantity.unwrap_or(0));
            Query::charge(charge)
        }
    };
    let charged_at = request.age_ms.map_or(Timestamp::ZERO, |age| {
        let charged_at = active.now().saturating_sub(Duration::from_millis(age));
        charged_at.max(Timestamp::from_micros(1))
    });
    let query = query.with_charged_at(charged_at);
    match &request.hold {
        Some(hold) => query.with_hold(Arc::clone(hold)),
        None => query,
    }
}

fn decision_reply(
    active: &ActiveConfig,
    request: &CommandQuery<'_>,
    decisions: &PolicyDecisions<'_>,
) -> RespReply {
    if let Some(caller) = &request.caller {
        let policy =
            if let LimitTarget::Policy(policy) = request.target { policy } else { OWN_QUOTA };
        active.log_reset(caller, policy, request.key);
    }
    match &request.target {
        LimitTarget::Throttle(dialect, quota) => {
            RespReply::Numbers(throttle_reply(*dialect, quota, request.cost, decisions))
        }
        _ => {
            let given = request.hold.as_deref();
            let hold = HoldAnswer::new(request.operation, given, decisions);
            let fields = decision_fields(decisions);
            if given.is_some() || hold.is_some() {
                let hold = Box::new(HoldFields::new(hold));
                return RespReply::Held { fields, hold, with_names: request.with_names };
            }
            if request.with_names {
                RespReply::NamedDecision(fields)
            } else {
                RespReply::Decision(fields)
            }
        }
    }
}

#[cold]
fn error_reply(error: &QueryError) -> RespReply {
    RespReply::Error(match error {
        QueryError::Store(store) => {
            // The reason is only logged: it may have the addresses of servers.
            logs::store_failed(store);
            format!("ERR {}", unavailable(store))
        }
        error => format!("ERR {error}"),
    })
}

/// Returns the reply of a project's command. Seconds are rounded up, so a denial has at least one;
/// -1 stands for a quantity that is never admitted, and in redis-cell also for none.
fn throttle_reply(
    dialect: Dialect,
    quota: &Quota,
    quantity: Option<u64>,
    decisions: &PolicyDecisions<'_>,
) -> [i64; 5] {
    let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let seconds = |duration: Duration| {
        signed(duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0)))
    };
    let is_possible = quantity.is_none_or(|quantity| quantity <= quota.burst());
    let allowed = decisions.is_allowed() && is_possible;
    let decision = decisions.binding().map(PolicyDecision::decision);
    let remaining = decision.map_or(0, |decision| signed(decision.remaining));
    let reset_after = decision.map_or(0, |decision| seconds(decision.reset_after));
    let retry_after = match (allowed, dialect) {
        (true, Dialect::Cell) => -1,
        (true, Dialect::Crab) => 0,
        (false, _) if !is_possible => -1,
        (false, _) => decision.map_or(1, |decision| seconds(decision.retry_after)).max(1),
    };
    let limit = signed(quota.burst());
    match dialect {
        Dialect::Cell => [i64::from(!allowed), limit, remaining, retry_after, reset_after],
        Dialect::Crab => [i64::from(allowed), limit, remaining, reset_after, retry_after],
    }
}
