//! `GET /v1/lookup`: the state of one key in every policy, without a charge.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query as UrlQuery, State};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tidegate::{
    Action, Calendar, Charge, Clock as _, Decision, Key, KeySource, Mode, OverrideEffect, Policy,
    PolicyDecision, Query, QueryError, Quota, ShowKeys, Source, SystemClock,
};

use super::Admin;
use super::fleet::view::LastDenial;
use super::reset::listed_key;
use crate::api::Problems;
use crate::api::problem::Problem;
use crate::logs;
use crate::state::{ActiveConfig, ServerState};
use tidegate_api::admin::OverrideBody;
use tidegate_api::duration::{millis, millis_rounded_up};
use tidegate_config::envoy::{CounterParts, Limit, Rule, RuleMode, parse_counter_key};
use tidegate_config::key_hash;

/// Maximum number of policies and rules that are asked.
const MAX_PEEKS: usize = 5_000;
/// Maximum number of policies and rules in a response.
const MAX_RESULTS: usize = 200;
/// Number of peeks in flight.
const MAX_PARALLEL: usize = 16;
/// Key of all requests, under a policy without a key.
const ALL: &str = "all";

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct LookupQuery {
    /// Key, or its hash in the form of the hot keys
    #[param(required, value_type = String, min_length = 1, max_length = 512)]
    key: Option<String>,
    /// Name of a policy; all by default
    #[param(max_length = 512)]
    policy: Option<String>,
}

#[derive(Serialize, utoipa::ToSchema)]
struct LookupBody {
    key: String,
    /// Whether units of this key are in use in any policy.
    found: bool,
    /// Whether an enforced policy denies the key; null if none is known to, but not all could be
    /// asked, or it depends on the value of an attribute.
    denied: Option<bool>,
    /// Policies that deny the key first, then those that it uses.
    results: Vec<ResultBody>,
    /// Whether there are more policies than results.
    truncated: bool,
}

/// State of the key in one policy or rule.
#[derive(Serialize, utoipa::ToSchema)]
struct ResultBody {
    policy: String,
    /// In the form that the policy shows.
    key: String,
    mode: &'static str,
    algorithm: &'static str,
    limit: u64,
    burst: u64,
    /// Null for units in flight, which have no window.
    window_ms: Option<u64>,
    /// Calendar whose periods are the windows, such as `month from day 15, Europe/Berlin`.
    #[serde(skip_serializing_if = "Option::is_none")]
    calendar: Option<String>,
    #[serde(rename = "override")]
    is_override: bool,
    /// Override that an operator has set while the service runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false)]
    run_time: Option<OverrideBody>,
    /// Value of the attribute in the policy's `limits` that has this limit, or `other`. It
    /// depends on the request, not on the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(flatten)]
    state: Option<StateBody>,
    /// Instance that denied it last, if it is one of the most denied keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_denial: Option<LastDenial>,
    /// Why the key could not be looked up here.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl ResultBody {
    fn is_denied(&self) -> bool {
        self.state.as_ref().is_some_and(|state| !state.allowed)
    }

    fn is_shadow(&self) -> bool {
        self.mode == Mode::Shadow.as_str()
    }
}

#[derive(Serialize, utoipa::ToSchema)]
struct StateBody {
    allowed: bool,
    /// Capacity by which it was decided: the burst, or the share of this instance during an outage.
    capacity: u64,
    remaining: u64,
    /// Of a denial; for units in flight, which may be released before, when their first hold ends.
    retry_after_ms: u64,
    /// Until all units are available; for units in flight, when their last hold ends.
    reset_after_ms: u64,
    delay_ms: u64,
    source: &'static str,
    reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    in_flight: Option<InFlightBody>,
}

/// Units in flight.
#[derive(Serialize, utoipa::ToSchema)]
#[schema(as = InFlight)]
struct InFlightBody {
    units: u64,
    /// Time until the hold of some of them ends, if it is neither renewed nor released; null without
    /// units.
    first_end_ms: Option<u64>,
}

/// Count that is looked up.
struct LookupTarget<'a> {
    policy: &'a str,
    key: String,
    quota: Cow<'a, Quota>,
    mode: &'static str,
    is_override: bool,
    /// Override that was set while the service runs.
    run_time: Option<(OverrideEffect, OverrideBody)>,
    value: Option<&'a str>,
    /// Whether the key counts all requests together.
    is_shared: bool,
    /// Whether the count is left out of the response unless it is in use.
    only_in_use: bool,
}

/// State of one key in every policy, without a charge
#[utoipa::path(
    get, path = "/v1/lookup", operation_id = "lookup", params(LookupQuery),
    responses(
        (status = 200, description = "State in each policy", body = LookupBody),
        Problems,
    )
)]
pub(super) async fn handle(
    State(admin): State<Admin>,
    query: Result<UrlQuery<LookupQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let UrlQuery(LookupQuery { key, policy }) =
        query.map_err(|error| Problem::bad_request(error.to_string()))?;
    let Some(key) = key else {
        return Err(Problem::bad_request("the key is missing: /v1/lookup?key=KEY[&policy=NAME]"));
    };
    Key::new(&key).map_err(|error| Problem::bad_request(format!("the key {error}")))?;
    let active = admin.state.active();
    let mut targets = targets(&admin.state, &active, &key, policy.as_deref())?;
    let is_complete = targets.len() <= MAX_PEEKS;
    targets.truncate(MAX_PEEKS);
    let mut peeks = Vec::with_capacity(targets.len());
    for target in targets {
        peeks.push(target.peek(&active));
    }
    let peeked = futures_util::stream::iter(peeks).buffered(MAX_PARALLEL);
    let results: Vec<(bool, Option<ResultBody>)> = peeked.collect().await;
    let found = results.iter().any(|(in_use, _)| *in_use);
    let shown = results.into_iter().filter_map(|(in_use, result)| Some((in_use, result?)));
    let mut shown: Vec<(bool, ResultBody)> = shown.collect();
    // The results of each policy with limits by value: is one allowed?
    let mut allows = HashMap::new();
    for (_, result) in shown.iter().filter(|(_, result)| result.value.is_some()) {
        *allows.entry(result.policy.clone()).or_insert(false) |= !result.is_denied();
    }
    let depends =
        |result: &ResultBody| result.is_denied() && allows.get(&result.policy) == Some(&true);
    let is_known =
        is_complete && shown.iter().all(|(_, result)| result.error.is_none() && !depends(result));
    let is_denied = shown
        .iter()
        .any(|(_, result)| result.is_denied() && !result.is_shadow() && !depends(result));
    let denied = (is_denied || is_known).then_some(is_denied);
    shown.sort_by_key(|(in_use, result)| {
        (!result.is_denied(), result.is_shadow(), result.error.is_none(), !in_use)
    });
    let truncated = !is_complete || shown.len() > MAX_RESULTS;
    let mut results: Vec<ResultBody> =
        shown.into_iter().take(MAX_RESULTS).map(|(_, result)| result).collect();
    for result in &mut results {
        let last = admin.fleet.last_denial(&admin.state, &result.policy, &result.key);
        result.last_denial = last.await;
    }
    Ok(Json(LookupBody { key, found, denied, results, truncated }).into_response())
}

/// Returns the counts that this key names, in the order of the configuration.
fn targets<'a>(
    state: &ServerState,
    active: &'a ActiveConfig,
    key: &str,
    only: Option<&str>,
) -> Result<Vec<LookupTarget<'a>>, Problem> {
    let is_wanted = |name: &str| only.is_none_or(|only| only == name);
    let rules = || active.envoy.rules.rules().filter(|rule| is_wanted(&rule.path));
    if let Some(only) = only
        && rules().next().is_none()
    {
        if active.is_limit_of_requests(only) {
            let detail = "Envoy's requests bring this limit, so only they can look it up";
            return Err(Problem::new(StatusCode::NOT_FOUND, detail));
        }
        active.limiter.policy(only).map_err(Problem::from)?;
    }
    let policies = active.policies().iter().filter(|policy| is_wanted(policy.name()));
    let of_policies = policies.flat_map(|policy| of_policy(state, active, policy, key));
    let is_domain = |counter: &CounterParts| active.envoy.rules.domains().any(|it| it == counter.0);
    let counter = parse_counter_key(key).filter(is_domain);
    let of_rules = rules().filter_map(|rule| of_rule(state, active, rule, key, counter.as_ref()));
    Ok(of_policies.chain(of_rules).collect())
}

/// Returns the counts of a key under a policy: of the hashed key that is listed by this hash, of the
/// group of an address, or of all requests if the policy has no key. Callers of the API may name a
/// key nevertheless.
fn of_policy<'a>(
    state: &ServerState,
    active: &ActiveConfig,
    policy: &'a Policy,
    key: &str,
) -> Vec<LookupTarget<'a>> {
    let attributes: Vec<&str> = policy.key().iter().map(KeySource::as_str).collect();
    let targets = |key: String, is_shared, only_in_use| {
        let run_time = state.overrides.in_force(policy.name(), &key);
        let is_override = run_time.is_some() || policy.override_of(&key).is_some();
        let has_limit = |(_, body): &(_, OverrideBody)| {
            body.stored.limits.limit.is_some() || body.stored.limits.mode.is_some()
        };
        let is_only =
            policy.override_of(&key).is_some() || run_time.as_ref().is_some_and(has_limit);
        let by_value = policy.limits().filter(|_| !is_only).map(|(_, quotas)| {
            let mut values: Vec<_> =
                quotas.iter().map(|(value, it)| (value.as_str(), it)).collect();
            values.sort_unstable_by_key(|(value, _)| *value);
            values.push(("other", policy.quota()));
            values.into_iter().map(|(value, quota)| (Some(value), quota)).collect()
        });
        let quotas = by_value.unwrap_or_else(|| vec![(None, policy.quota_for(&key))]);
        let target = move |(value, quota): (_, &'a Quota)| LookupTarget {
            policy: policy.name(),
            quota: match run_time.as_ref().map(|(effect, _)| effect) {
                Some(OverrideEffect::Quota(numbers)) => {
                    Cow::Owned(Quota::clone(&numbers.applied_to(quota, policy)))
                }
                _ => Cow::Borrowed(quota),
            },
            is_override,
            run_time: run_time.clone(),
            value,
            key: key.clone(),
            mode: policy.mode().as_str(),
            is_shared,
            only_in_use,
        };
        quotas.into_iter().map(target)
    };
    let named = match attributes.as_slice() {
        _ if is_hash_of(key, policy.show_keys()) => listed_key(state, active, policy.name(), key),
        _ => Some(active.counted_key(policy.name(), key)),
    };
    let has_key = !attributes.is_empty();
    let shared = (!has_key).then(|| targets(ALL.to_owned(), true, false));
    let named = named.filter(|key| has_key || key != ALL).map(|key| targets(key, false, !has_key));
    shared.into_iter().flatten().chain(named.into_iter().flatten()).collect()
}

/// Returns the count of a key under a rule of Envoy: of the counter that has this descriptor, or
/// otherwise of the descriptor whose only entry has the key as its value.
fn of_rule<'a>(
    state: &ServerState,
    active: &ActiveConfig,
    rule: &'a Rule,
    key: &str,
    counter: Option<&CounterParts>,
) -> Option<LookupTarget<'a>> {
    let Limit::Quota(_, quota) = &rule.limit else { return None };
    let rules = &active.envoy.rules;
    let find = |domain: &str, entries: &[(&str, &str)]| {
        let found = rules.find(domain, entries.iter().copied())?;
        std::ptr::eq(found.rule, rule).then_some(found.key)
    };
    let key = if is_hash_of(key, rule.show_keys()) {
        listed_key(state, active, &rule.path, key)?
    } else if let Some((domain, entries)) = counter {
        let entries = entries.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        find(domain, &entries.collect::<Vec<_>>())?
    } else {
        let [entry] = rule.keys.as_slice() else { return None };
        rules.domains().find_map(|domain| find(domain, &[(entry, key)]))?
    };
    let mode = if active.envoy.shadow_mode { RuleMode::Shadow } else { rule.mode };
    Some(LookupTarget {
        policy: &rule.path,
        key,
        quota: Cow::Borrowed(quota),
        mode: mode.as_str(),
        is_override: false,
        run_time: None,
        value: None,
        is_shared: false,
        only_in_use: false,
    })
}

fn is_hash_of(key: &str, show_keys: ShowKeys) -> bool {
    show_keys == ShowKeys::Hashed && key_hash::is_hash(key)
}

impl LookupTarget<'_> {
    /// Looks the count up. Also returns whether units of this key are in use.
    async fn peek(self, active: &ActiveConfig) -> (bool, Option<ResultBody>) {
        let only_in_use = self.only_in_use;
        let (in_use, result) = self.peek_always(active).await;
        (in_use, (in_use || !only_in_use).then_some(result))
    }

    async fn peek_always(self, active: &ActiveConfig) -> (bool, ResultBody) {
        let is_unlimited = matches!(self.run_time, Some((OverrideEffect::Unlimited, _)));
        let peeked = if is_unlimited {
            let burst = self.quota.burst();
            Ok(Decision::allow(burst, burst).with_source(Source::Override))
        } else {
            self.decision(active).await
        };
        let run_time = self.run_time.as_ref().map(|(_, body)| active.shown_override(body.clone()));
        let mut result = ResultBody {
            policy: self.policy.to_owned(),
            key: active.shown_key(self.policy, self.key.clone()),
            mode: self.mode,
            algorithm: self.quota.algorithm().as_str(),
            limit: self.quota.limit(),
            burst: self.quota.burst(),
            window_ms: (!self.quota.is_concurrency()).then(|| millis(self.quota.window())),
            calendar: self.quota.calendar().map(ToString::to_string),
            is_override: self.is_override,
            run_time,
            value: self.value.map(str::to_owned),
            state: None,
            last_denial: None,
            error: None,
        };
        match peeked {
            Ok(mut decision) => {
                let is_held = self.quota.is_concurrency() && decision.source != Source::Override;
                let in_flight = if is_held { self.held(active, &mut decision).await } else { None };
                let of_decision = StateBody::new(&decision, &self.quota, self.mode);
                let state = StateBody { in_flight, ..of_decision };
                let in_use = !state.allowed || state.remaining < state.capacity;
                result.state = Some(state);
                (in_use && !self.is_shared, result)
            }
            Err(error) => {
                if let QueryError::Store(store) = &error {
                    logs::store_failed(store);
                }
                result.error = Some(error.to_string());
                (false, result)
            }
        }
    }

    /// Returns the units in flight. A request that lacks one unit waits for the first of them.
    async fn held(&self, active: &ActiveConfig, decision: &mut Decision) -> Option<InFlightBody> {
        let charge = Charge::new(&self.key, &self.quota).with_policy(self.policy);
        let limiter = active.limiter.limiter();
        let held = limiter.decide(Action::Peek, &charge.with_cost(0)).await.ok()?;
        if !decision.allowed {
            // With as many holds as a key may have, nothing remained.
            decision.remaining = held.remaining;
        }
        let units = held.limit.saturating_sub(held.remaining);
        let mut in_flight = InFlightBody { units, first_end_ms: None };
        if units > 0
            && let Ok(first) = limiter.peek(&charge.with_cost(held.remaining + 1)).await
        {
            in_flight.first_end_ms = Some(millis_rounded_up(first.retry_after));
            decision.reset_after = first.reset_after;
        }
        Some(in_flight)
    }

    async fn decision(&self, active: &ActiveConfig) -> Result<Decision, QueryError> {
        if self.value.is_none() && active.policies().get(self.policy).is_some() {
            let query = Query::policy(self.policy, &self.key).with_cost(1);
            let decisions = active.limiter.decide(Action::Peek, query).await?;
            let decision = decisions.iter().next().map(PolicyDecision::decision);
            // A policy in shadow mode whose store fails is left out.
            if let Some(decision) = decision {
                return Ok(decision);
            }
        }
        let charge = Charge::new(&self.key, &self.quota).with_policy(self.policy);
        Ok(active.limiter.limiter().peek(&charge).await?)
    }
}

impl StateBody {
    fn new(decision: &Decision, quota: &Quota, mode: &'static str) -> Self {
        let counts = matches!(decision.source, Source::Store | Source::Local);
        // A peek shows what would be left after the request.
        let spent = u64::from(decision.allowed && counts);
        let remaining = (decision.remaining + spent).min(decision.limit);
        let reset_after =
            if remaining < decision.limit { decision.reset_after } else { Duration::ZERO };
        Self {
            allowed: decision.allowed,
            capacity: decision.limit,
            remaining,
            retry_after_ms: millis_rounded_up(decision.retry_after),
            reset_after_ms: millis_rounded_up(reset_after),
            delay_ms: millis_rounded_up(decision.delay),
            source: decision.source.as_str(),
            reason: reason(decision, remaining, quota, mode),
            in_flight: None,
        }
    }
}

/// Returns one sentence about why the key is allowed or denied, and when it is free.
fn reason(decision: &Decision, remaining: u64, quota: &Quota, mode: &'static str) -> String {
    let verb = if decision.allowed { "pass" } else { "are denied" };
    let failure = match decision.source {
        Source::Allow | Source::Deny => {
            return format!("The store is unavailable, and requests {verb} by on_store_failure.");
        }
        Source::Override if decision.allowed => {
            return "An override exempts the key from this limit.".to_owned();
        }
        Source::Override => return "An override blocks the key.".to_owned(),
        Source::Local => "The store is unavailable, so this instance decides by its share: ",
        _ => "",
    };
    let capacity = decision.limit;
    let used = capacity.saturating_sub(remaining);
    let units = match quota.algorithm() {
        _ if !decision.allowed && !quota.block_for().is_empty() => {
            "The limit is exceeded, or a block is in force".to_owned()
        }
        tidegate::Algorithm::TokenBucket | tidegate::Algorithm::LeakyBucket => {
            format!("{used} of {capacity} units of the bucket are used")
        }
        tidegate::Algorithm::Concurrency => format!("{used} of {capacity} units are in flight"),
        _ => match quota.calendar() {
            Some(calendar) if used > 0 => format!(
                "{used} of {capacity} units of this {} are used; resets on {}",
                calendar.unit(),
                end_of_period(calendar, decision.reset_after)
            ),
            Some(calendar) => {
                format!("none of {capacity} units of this {} is used", calendar.unit())
            }
            None => format!("{used} of {capacity} units per {} are used", shown(quota.window())),
        },
    };
    let next = if !decision.allowed && quota.is_concurrency() {
        format!(
            "; the next request passes when one is released, at the latest in {}",
            shown(decision.retry_after)
        )
    } else if !decision.allowed {
        format!("; the next request passes in {}", shown(decision.retry_after))
    } else if decision.delay > Duration::ZERO {
        format!("; the next request waits {} for its turn", shown(decision.delay))
    } else {
        String::new()
    };
    let shadow = if mode == Mode::Shadow.as_str() && !decision.allowed {
        "; in shadow mode requests pass anyway"
    } else {
        ""
    };
    format!("{failure}{units}{next}{shadow}.")
}

/// Returns the end of a period in its time zone, to the nearest minute: the clocks of this host and
/// of the store may differ.
fn end_of_period(calendar: &Calendar, after: Duration) -> String {
    let end = SystemClock::new().now().saturating_add(after + Duration::from_secs(30));
    calendar.local_text(end)
}

/// Returns a duration for people, rounded up: `250 ms`, `12 s`, `5 min`, `3 h 20 min`, `2 d`.
fn shown(duration: Duration) -> String {
    let millis = millis_rounded_up(duration);
    let seconds = millis.div_ceil(1_000);
    let two = |large: u64, name: &str, small: u64, small_name: &str| match small {
        0 => format!("{large} {name}"),
        small => format!("{large} {name} {small} {small_name}"),
    };
    match seconds {
        _ if millis < 1_000 => format!("{millis} ms"),
        0..120 => format!("{seconds} s"),
        120..3_600 => two(seconds / 60, "min", seconds % 60, "s"),
        3_600..172_800 => two(seconds / 3_600, "h", seconds % 3_600 / 60, "min"),
        _ => two(seconds / 86_400, "d", seconds % 86_400 / 3_600, "h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short_and_rounded_up() {
        for (millis, expected) in [
            (0, "0 ms"),
            (250, "250 ms"),
            (1_001, "2 s"),
            (60_000, "60 s"),
            (120_000, "2 min"),
            (150_000, "2 min 30 s"),
            (3_600_000, "1 h"),
            (12_000_000, "3 h 20 min"),
            (86_400_000 * 2, "2 d"),
        ] {
            assert_eq!(shown(Duration::from_millis(millis)), expected);
        }
    }
}
