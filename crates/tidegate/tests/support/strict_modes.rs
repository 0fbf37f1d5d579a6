//! Restrictions of the strict server, and the services that have them.

#![allow(dead_code, reason = "each test binary uses its own part")]

/// Restrictions of a server, each independent of the others. The default has none.
#[derive(Debug, Clone, Default)]
pub(crate) struct Restrictions {
    /// Reply to a script whose keys are in several slots.
    pub(crate) cross_slot: Option<&'static str>,
    /// Error inside a script that uses a key which is not in KEYS. The key follows the text.
    pub(crate) undeclared_keys: Option<&'static str>,
    /// Error inside a script that calls TIME, which is allowed as a command.
    pub(crate) time_in_scripts: Option<&'static str>,
    /// Reply to a script without keys.
    pub(crate) no_keys: Option<&'static str>,
    /// Reply to a script that calls a command with a key which is not `KEYS[…]` in its text.
    pub(crate) literal_keys: Option<&'static str>,
    /// Maximum number of words of a command; 0 for any.
    pub(crate) max_arguments: usize,
    /// Whether scripts run by Lua 5.4 instead of 5.1. They are not isolated from commands then.
    pub(crate) lua_5_4: bool,
    /// Whether TIME replies with integers instead of texts; inside scripts only by Lua 5.4.
    pub(crate) integer_time: bool,
    pub(crate) script_cache: ScriptCache,
    pub(crate) databases: Databases,
    pub(crate) cluster: ClusterView,
    /// Commands that do not exist, such as `CONFIG`, or with a subcommand, such as `ACL SETUSER`.
    pub(crate) absent: &'static [&'static str],
    /// Fields that are missing in INFO.
    pub(crate) absent_info: &'static [&'static str],
}

/// EVALSHA calls that are answered by NOSCRIPT, although the script was loaded.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum ScriptCache {
    #[default]
    Keeps,
    /// Each n-th call; 1 for all of them.
    ForgetsEvery(u64),
    /// This many of a thousand calls, at random places, which are the same in every run.
    ForgetsPermille(u64),
}

/// Answer to SELECT of a database other than 0.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Databases {
    #[default]
    All,
    /// An error.
    OnlyZero,
    /// OK, but the database stays the same.
    Ignored,
}

/// Cluster that clients see.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum ClusterView {
    /// That of the server behind the proxy.
    #[default]
    Real,
    /// None: CLUSTER is refused with this reply.
    Refused(&'static str),
    /// One node, which is the proxy, has all slots.
    OneNode,
}

const CROSS_SLOT: &str = "CROSSSLOT Keys in request don't hash to the same slot";

impl Restrictions {
    /// Redis Software and Redis Cloud without the cluster API, Azure Managed Redis with the
    /// Enterprise policy: one address in front of shards.
    pub(crate) fn enterprise() -> Self {
        Self {
            cross_slot: Some(
                "CROSSSLOT Keys in request don't hash to the same slot (context='', \
                 command='evalsha')",
            ),
            databases: Databases::Ignored,
            cluster: ClusterView::Refused("ERR command is not allowed"),
            absent: &["ACL SETUSER", "ASKING", "MOVE", "CLIENT PAUSE"],
            ..Self::default()
        }
    }

    /// Amazon `ElastiCache` Serverless. The texts of TIME and undeclared keys are those that its users
    /// report.
    pub(crate) fn serverless() -> Self {
        Self {
            cross_slot: Some(CROSS_SLOT),
            undeclared_keys: Some(
                "ERR Script attempted to access keys that do not hash to the same slot ",
            ),
            time_in_scripts: Some("ERR This Redis command is not allowed from script"),
            no_keys: Some("ERR Lua scripts without any input keys are not supported"),
            max_arguments: 3_999,
            script_cache: ScriptCache::ForgetsPermille(10),
            databases: Databases::OnlyZero,
            cluster: ClusterView::OneNode,
            absent: &["CONFIG", "ACL SETUSER", "FUNCTION", "FCALL", "DEBUG", "MIGRATE"],
            ..Self::default()
        }
    }

    /// Dragonfly with its default flags, and with its version of Lua.
    pub(crate) fn dragonfly() -> Self {
        Self {
            undeclared_keys: Some("ERR script tried accessing undeclared key, key: "),
            lua_5_4: true,
            integer_time: true,
            cluster: ClusterView::Refused(
                "ERR Cluster is disabled. Use --cluster_mode=yes to enable.",
            ),
            absent: &["FUNCTION", "FCALL", "MIGRATE", "RESET"],
            ..Self::default()
        }
    }

    /// Tair (Alibaba Cloud) as a cluster in proxy mode, with its default parameters.
    pub(crate) fn alibaba() -> Self {
        Self {
            literal_keys: Some(
                "ERR bad lua script for redis cluster, all the keys that the script uses should be \
                 passed using the KEYS array, and KEYS should not be in expression",
            ),
            ..Self::alibaba_without_script_check()
        }
    }

    /// The same with the parameter `script_check_enable` 0.
    pub(crate) fn alibaba_without_script_check() -> Self {
        Self {
            cross_slot: Some("ERR eval/evalsha command keys must be in same slot"),
            no_keys: Some(
                "ERR for redis cluster, eval/evalsha number of keys can't be negative or zero",
            ),
            cluster: ClusterView::Refused("ERR command CLUSTER not support for normal user"),
            absent: &["CONFIG", "ACL SETUSER", "MIGRATE", "DEBUG"],
            ..Self::default()
        }
    }

    /// All modes that decisions work with.
    pub(crate) fn modes() -> [(&'static str, Self); 4] {
        [
            ("enterprise", Self::enterprise()),
            ("serverless", Self::serverless()),
            ("dragonfly", Self::dragonfly()),
            ("alibaba", Self::alibaba_without_script_check()),
        ]
    }

    pub(super) fn replaces_scripts(&self) -> bool {
        self.undeclared_keys.is_some() || self.time_in_scripts.is_some()
    }
}

impl ScriptCache {
    pub(super) fn forgets(self, call: u64) -> bool {
        match self {
            Self::Keeps => false,
            Self::ForgetsEvery(number) => call.is_multiple_of(number),
            // A hash of the number of the call, as in SplitMix64.
            Self::ForgetsPermille(share) => {
                let mixed = call.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                ((mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) % 1_000 < share
            }
        }
    }
}
