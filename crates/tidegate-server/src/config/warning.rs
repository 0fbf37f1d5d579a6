//! [`ConfigWarning`]: a part of the configuration that is valid, but perhaps not as its author
//! expects.

use std::fmt;

use tidegate::Policies;

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
    let warning = |policy: &tidegate::Policy| {
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
