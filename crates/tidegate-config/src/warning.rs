//! [`ConfigWarning`]: a part of the configuration that is valid, but perhaps not as its author
//! expects.

use std::fmt;
use std::time::Duration;

use crate::yaml::duration::readable;
use tidegate::{Algorithm, KeySource, MemoryStore, Policies, Policy, Quota};

/// Warning about a file that is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigWarning {
    pub file: String,
    pub line: Option<u64>,
    pub message: String,
}

impl fmt::Display for ConfigWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file, self.message),
            None => write!(f, "{}: {}", self.file, self.message),
        }
    }
}

/// Warning about a listener of the API that needs no token.
pub const OPEN_LISTENER: &str = "other hosts can use this listener without a token: set \
    auth.api_token or tls.client_ca, or listen on 127.0.0.1";

/// Number of policies with the same warning that have a line each. More of them share one.
const MAX_LINES: usize = 3;

/// Returns the warnings about policies. `line` returns the line of a policy.
pub(crate) fn of_policies(
    file: &str,
    policies: &Policies,
    line: impl Fn(&str) -> Option<u64>,
) -> Vec<ConfigWarning> {
    let bypassable = policies.bypassable().map(|policy| {
        let key = policy.key().iter().map(KeySource::as_str).collect::<Vec<_>>().join(" or ");
        (policy.name(), format!("a client that leaves out {key} is not limited by it"))
    });
    let bypassed = "no other policy limits all clients of the same requests: add one by ip, or set \
                    `missing_key: deny`";
    let literal = policies.iter().flat_map(|policy| {
        let patterns = policy.literal_parameters();
        patterns.map(|(text, meant)| {
            (policy.name(), format!("the path {text:?} matches only itself: write {meant:?}"))
        })
    });
    let literals = "`*` stands for any text without a slash, `**` for any text; there are neither \
                    parameters nor regular expressions";
    let exemptible = policies.exemptible().map(|(policy, attribute)| {
        let wrong = format!("`unless` rests on {attribute}, which a client may choose");
        (policy.name(), wrong)
    });
    let exempted = "make sure that a proxy in front removes it, or add a condition on ip to the \
                    entry";
    let short_blocks = policies.iter().filter_map(|policy| {
        let (block, window) = (policy.quota().block_for().iter().min()?, policy.quota().window());
        let wrong = format!("block_for {block:?} is shorter than the window of {window:?}");
        (*block < window).then_some((policy.name(), wrong))
    });
    let blocked_again = "after it, the limit may still be exceeded, and the next request starts \
                         another block: block for at least the window";
    [
        grouped(file, &line, &short_blocks.collect::<Vec<_>>(), blocked_again),
        grouped(file, &line, &bypassable.collect::<Vec<_>>(), bypassed),
        grouped(file, &line, &literal.collect::<Vec<_>>(), literals),
        grouped(file, &line, &exemptible.collect::<Vec<_>>(), exempted),
    ]
    .concat()
}

/// Returns a warning for each policy, or one for all if they are many. A warning has the name of
/// the policy, what is wrong with it, and an explanation that all share.
fn grouped(
    file: &str,
    line: impl Fn(&str) -> Option<u64>,
    found: &[(&str, String)],
    explanation: &str,
) -> Vec<ConfigWarning> {
    let warning =
        |name: &str, message| ConfigWarning { file: file.to_owned(), line: line(name), message };
    if found.len() <= MAX_LINES {
        let message = |(name, wrong): &(&str, String)| {
            warning(name, format!("policy {name:?}: {wrong}; {explanation}"))
        };
        return found.iter().map(message).collect();
    }
    let first: Vec<String> =
        found[..MAX_LINES].iter().map(|(name, _)| format!("{name:?}")).collect();
    let (name, wrong) = &found[0];
    vec![warning(
        name,
        format!(
            "{} policies, {} and {} more: {wrong} (the first one); {explanation}",
            found.len(),
            first.join(", "),
            found.len() - MAX_LINES
        ),
    )]
}

/// Returns a warning for each policy that refunds or settles by the response, which only a gateway
/// sees.
pub(crate) fn of_responses(
    file: &str,
    policies: &Policies,
    line: impl Fn(&str) -> Option<u64>,
) -> Vec<ConfigWarning> {
    let of = |wrong: &str, applies: fn(&Policy) -> bool, instead: &str| {
        let found = policies.iter().filter(|policy| applies(policy));
        let found: Vec<_> = found.map(|policy| (policy.name(), wrong.to_owned())).collect();
        let explanation = format!(
            "only the gateway sees responses, and this file has no gateway.upstreams: use \
             `tidegate gateway`, or {instead}"
        );
        grouped(file, &line, &found, &explanation)
    };
    let mut warnings = of(
        "refund_on has no effect, so every request counts",
        |policy| policy.refund_on().is_some(),
        "return units by POST /v1/refund",
    );
    warnings.extend(of(
        "cost.actual has no effect, so every request costs its reserve",
        |policy| policy.settled_by().is_some(),
        "settle requests by POST /v1/reserve and /v1/commit",
    ));
    warnings
}

/// Returns a warning for each policy that counts requests of Envoy in flight, if their ends have no
/// id.
pub(crate) fn of_ends_without_id(
    file: &str,
    policies: &Policies,
    line: impl Fn(&str) -> Option<u64>,
) -> Vec<ConfigWarning> {
    let is_of_envoy = |policy: &Policy| {
        let mut names = policy.references();
        names.any(|name| name == "domain" || name.starts_with("descriptor."))
    };
    let counts_in_flight = |policy: &Policy| policy.quotas().any(Quota::is_concurrency);
    let found = policies.iter().filter(|policy| counts_in_flight(policy) && is_of_envoy(policy));
    let wrong = "requests of Envoy count until their hold ends, also after their end";
    let found: Vec<_> = found.map(|policy| (policy.name(), wrong.to_owned())).collect();
    let explanation = "set envoy.hold_id: the key of the descriptor entry that has the id of the \
                       request";
    grouped(file, &line, &found, explanation)
}

/// Window from which on counts should survive a restart.
const DAY: Duration = Duration::from_secs(86_400);

/// Returns a warning for each policy, and each rule of Envoy, whose windows are so long that a
/// restart of a store in memory matters.
pub(crate) fn of_long_windows<'a>(
    file: &str,
    policies: &'a Policies,
    rules: impl Iterator<Item = (&'a str, Duration)>,
    line: impl Fn(&str) -> Option<u64>,
) -> Vec<ConfigWarning> {
    let longest = |policy: &Policy| policy.quotas().map(Quota::window).max().unwrap_or_default();
    let windows = policies.iter().map(|policy| (policy.name(), longest(policy)));
    let long = windows.chain(rules).filter(|(_, window)| *window >= DAY);
    let wrong = |window| format!("its counts of {} end with this process", readable(window));
    let found: Vec<_> = long.map(|(name, window)| (name, wrong(window))).collect();
    let explanation = "a restart gives every key its whole limit again: use Redis with an append-only \
                       file (store.redis)";
    grouped(file, line, &found, explanation)
}

/// Memory of an entry of a sliding log, in bytes.
const LOG_ENTRY_BYTES: u64 = 16;
/// Number of logs at their limit that should fit the memory of all logs.
const MIN_FULL_LOGS: u64 = 4;

/// Returns a warning for each policy whose logs are too large for a store in memory: it would have
/// no room for some requests within the limit.
pub(crate) fn of_logs(
    file: &str,
    policies: &Policies,
    max_keys: usize,
    line: impl Fn(&str) -> Option<u64>,
) -> Vec<ConfigWarning> {
    let max_bytes = MemoryStore::builder().max_keys(max_keys).build().max_log_bytes();
    let max_bytes = u64::try_from(max_bytes).unwrap_or(u64::MAX);
    let too_large = policies.iter().filter_map(|policy| {
        let logs = policy.quotas().filter(|quota| quota.algorithm() == Algorithm::SlidingLog);
        let limit = logs.map(Quota::limit).max()?;
        let bytes = limit.saturating_mul(LOG_ENTRY_BYTES);
        let wrong =
            format!("a key at its limit needs {bytes} bytes for the sliding-log of {limit}");
        (bytes > max_bytes / MIN_FULL_LOGS).then_some((policy.name(), wrong))
    });
    let explanation = format!(
        "the store in memory has {max_bytes} bytes for all logs: use sliding-counter or \
         token-bucket, raise store.max_keys (100 bytes each), or use Redis"
    );
    grouped(file, line, &too_large.collect::<Vec<_>>(), &explanation)
}
