//! [`ConfigWarning`]: a part of the configuration that is valid, but perhaps not as its author
//! expects.

use std::fmt;

use tidegate::{Algorithm, MemoryStore, Policies, Policy, Quota};

/// Warning about a file that is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConfigWarning {
    pub(crate) file: String,
    pub(crate) line: Option<u64>,
    pub(crate) message: String,
}

impl fmt::Display for ConfigWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file, self.message),
            None => write!(f, "{}: {}", self.file, self.message),
        }
    }
}

/// Returns a warning for each policy that clients bypass by leaving out its key, because no other
/// policy limits the same requests. `line` returns the line of a policy.
pub(super) fn of_policies(
    file: &str,
    policies: &Policies,
    line: impl Fn(&str) -> Option<u64>,
) -> Vec<ConfigWarning> {
    let warning = |policy: &Policy| {
        let key: Vec<&str> = policy.key().iter().map(tidegate::KeySource::as_str).collect();
        ConfigWarning {
            file: file.to_owned(),
            line: line(policy.name()),
            message: format!(
                "a client that leaves out {} is not limited by {:?}, and no other policy limits \
                 all clients of the same requests: add one by ip, or set `missing_key: deny`",
                key.join(" or "),
                policy.name()
            ),
        }
    };
    policies.bypassable().map(warning).collect()
}

/// Memory of an entry of a sliding log, in bytes.
const LOG_ENTRY_BYTES: u64 = 16;
/// Number of logs at their limit that should fit the memory of all logs.
const MIN_FULL_LOGS: u64 = 4;

/// Returns a warning for each policy whose logs are too large for a store in memory: it would have
/// no room for some requests within the limit.
pub(super) fn of_logs(
    file: &str,
    policies: &Policies,
    max_keys: usize,
    line: impl Fn(&str) -> Option<u64>,
) -> Vec<ConfigWarning> {
    let max_bytes = MemoryStore::builder().max_keys(max_keys).build().max_log_bytes();
    let max_bytes = u64::try_from(max_bytes).unwrap_or(u64::MAX);
    let warning = |policy: &Policy| {
        let logs = policy.quotas().filter(|quota| quota.algorithm() == Algorithm::SlidingLog);
        let limit = logs.map(Quota::limit).max()?;
        let bytes = limit.saturating_mul(LOG_ENTRY_BYTES);
        (bytes > max_bytes / MIN_FULL_LOGS).then(|| ConfigWarning {
            file: file.to_owned(),
            line: line(policy.name()),
            message: format!(
                "a key at the limit of {:?} needs {bytes} bytes for its sliding-log of {limit} \
                 requests, and the store in memory has {max_bytes} bytes for all logs: use \
                 sliding-counter or token-bucket, raise store.max_keys (100 bytes each), or use \
                 Redis",
                policy.name()
            ),
        })
    };
    policies.iter().filter_map(warning).collect()
}
