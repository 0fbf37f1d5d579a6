//! Checks whether the user has the permissions that decisions need, and no more.
//!
//! Each command is tried in a form that changes nothing. Redis before version 7 offers no other
//! way, and later versions only offer one to administrators.

use tidegate::store::redis::{Reply, SCRIPT_COMMANDS};

use super::keys::escape_pattern;
use super::{Finding, NodeUnderTest};
use crate::tool::redis_info::{is_absent_command, pairs, value};
use tidegate_config::RedisTopology;

const CHECK: &str = "acl";

const SCRIPT_LOAD: &str = "script|load";
const NO_SUCH_SCRIPT: &str = "0000000000000000000000000000000000000000";

pub(super) async fn check(node: &mut NodeUnderTest<'_>) {
    let prefix = node.options.prefix;
    let mut missing = missing_permissions(node).await;
    if let Some(note) = missing.note.take() {
        node.add(note);
    }
    if !missing.absent.is_empty() {
        node.add(absent_finding(&missing.absent.join(", ")));
    }
    if !missing.permissions.is_empty() {
        let permissions = missing.permissions.join(", ");
        return node.add(missing_finding(&permissions, prefix, node.topology));
    }
    let Ok(Reply::Text(user)) = node.ask(&["ACL", "WHOAMI"]).await else {
        return node.add(Finding::ok(CHECK, "this user may do what decisions need"));
    };
    let rules = node.ask(&["ACL", "GETUSER", &user]).await;
    let user = user.escape_debug();
    node.add(match rules.as_ref().map(is_unrestricted) {
        Ok(Some(true)) => {
            let message = format!("user {user} may do anything, but needs only a few permissions");
            Finding::note(CHECK, message).advice(advice(prefix, node.topology))
        }
        _ => Finding::ok(CHECK, format!("user {user} may do what decisions need")),
    });
}

/// Checks the user on a replica, which becomes the primary after a failover.
pub(super) async fn check_replica(node: &mut NodeUnderTest<'_>) {
    let prefix = node.options.prefix;
    let missing = missing_permissions(node).await;
    if !missing.absent.is_empty() {
        node.add(absent_finding(&missing.absent.join(", ")));
    }
    if !missing.permissions.is_empty() {
        let message = format!(
            "on this replica the user lacks permissions that decisions need, so they fail after a \
             failover to it: {}",
            missing.permissions.join(", ")
        );
        let finding = Finding::warning(CHECK, message);
        node.add(finding.advice(advice(prefix, node.topology)));
    }
}

/// Returns the finding of a replica that rejects the user. ACLs are not replicated.
pub(super) fn unknown_user(prefix: &str, topology: RedisTopology) -> Finding {
    let message = "this user is unknown on this replica, or has another password there: after a \
                   failover to it, no decision works";
    let advice = format!(
        "ACLs are not replicated, so create the user there, too: {}",
        minimal_user(prefix, topology)
    );
    Finding::warning(CHECK, message).advice(advice)
}

/// Returns a finding if connecting failed because a permission or a command is missing.
pub(super) fn missing_at_connect(
    error: &str,
    prefix: &str,
    topology: RedisTopology,
) -> Option<Finding> {
    let quoted = |text: &str| Some(text.split('\'').nth(1)?.to_lowercase());
    if let Some((_, reason)) = error.split_once("NOPERM") {
        return Some(missing_finding(&quoted(reason)?, prefix, topology));
    }
    let (_, reason) = error.split_once("ERR unknown command")?;
    Some(absent_finding(&quoted(reason)?))
}

fn absent_finding(absent: &str) -> Finding {
    let message = format!("this server lacks commands that decisions need: {absent}");
    let advice = "they were renamed or disabled (rename-command), or the service or the proxy does \
                  not offer them: docs/redis.md lists services";
    Finding::error("commands", message).advice(advice)
}

fn missing_finding(missing: &str, prefix: &str, topology: RedisTopology) -> Finding {
    let message = format!("this user lacks permissions that decisions need: {missing}");
    Finding::error(CHECK, message).advice(advice(prefix, topology))
}

fn advice(prefix: &str, topology: RedisTopology) -> String {
    format!("the minimal user: {}", minimal_user(prefix, topology))
}

/// Returns the command that creates a user with exactly the permissions that decisions need.
pub(super) fn minimal_user(prefix: &str, topology: RedisTopology) -> String {
    let script_commands: Vec<String> =
        SCRIPT_COMMANDS.iter().map(|(name, _)| format!("+{}", name.to_lowercase())).collect();
    let more = match topology {
        RedisTopology::Single => "",
        RedisTopology::Sentinel => " +role",
        RedisTopology::Cluster => " +cluster|slots +asking",
    };
    format!(
        "ACL SETUSER tidegate on >PASSWORD resetchannels ~{}:* -@all +time +evalsha \
         +script|load{more} {}",
        escape_pattern(prefix),
        script_commands.join(" ")
    )
}

/// Permissions that the user lacks, and commands that the server lacks.
struct MissingPermissions<'a> {
    prefix: &'a str,
    /// Commands in lower case, or `keys …` if the user may not access the keys.
    permissions: Vec<String>,
    /// Commands that the server does not have.
    absent: Vec<String>,
    /// Command that is missing, but can be replaced.
    note: Option<Finding>,
}

impl MissingPermissions<'_> {
    /// Tries commands, and records those that are missing.
    async fn try_all(
        &mut self,
        node: &NodeUnderTest<'_>,
        commands: &[(&str, Vec<&str>)],
    ) -> Option<Vec<Reply>> {
        let words: Vec<&[&str]> = commands.iter().map(|(_, words)| words.as_slice()).collect();
        let replies = node.ask_all(&words).await.ok()?;
        for ((command, _), reply) in commands.iter().zip(&replies) {
            self.record(&command.to_lowercase(), reply);
        }
        Some(replies)
    }

    /// Records a command or a permission that is missing according to the reply.
    fn record(&mut self, command: &str, reply: &Reply) {
        let Reply::Error(error) = reply else { return };
        let (list, name) = if is_absent_command(error) {
            (&mut self.absent, command.to_owned())
        } else if let Some(permission) = missing_permission(command, error, self.prefix) {
            (&mut self.permissions, permission)
        } else {
            return;
        };
        if !list.contains(&name) {
            list.push(name);
        }
    }

    /// Makes a note of SCRIPT LOAD, because EVAL works: by it the store sends the text of its
    /// scripts, which Redis then keeps.
    fn excuse_load(&mut self) {
        for (list, check, reason) in [
            (&mut self.absent, "commands", "this server lacks"),
            (&mut self.permissions, CHECK, "this user may not run"),
        ] {
            if let Some(index) = list.iter().position(|name| name == SCRIPT_LOAD) {
                list.remove(index);
                let message =
                    format!("{reason} {SCRIPT_LOAD}: the text of scripts is sent by EVAL instead");
                self.note = Some(Finding::note(check, message));
            }
        }
    }
}

/// Tries each command that decisions need, and returns those that are missing.
async fn missing_permissions<'a>(node: &NodeUnderTest<'a>) -> MissingPermissions<'a> {
    let prefix = node.options.prefix;
    // No user's key has a hash tag that starts with a bare percent sign.
    let key = format!("{prefix}:{{%doctor}}");
    let mut missing =
        MissingPermissions { prefix, permissions: Vec::new(), absent: Vec::new(), note: None };
    let mut commands: Vec<(&str, Vec<&str>)> = vec![
        ("time", vec!["TIME"]),
        ("evalsha", vec!["EVALSHA", NO_SUCH_SCRIPT, "1", &key]),
        (SCRIPT_LOAD, vec!["SCRIPT", "LOAD", "return 1"]),
    ];
    match node.topology {
        RedisTopology::Single => {}
        RedisTopology::Sentinel => commands.push(("role", vec!["ROLE"])),
        // TIME after ASKING clears the state that ASKING leaves on the connection.
        RedisTopology::Cluster => commands.extend([
            ("cluster|slots", vec!["CLUSTER", "SLOTS"]),
            ("asking", vec!["ASKING"]),
            ("time", vec!["TIME"]),
        ]),
    }
    // A string with a TTL: commands for other types fail on it, and it expires in any case.
    commands.push(("set", vec!["SET", &key, "", "PX", "10000"]));
    let Some(replies) = missing.try_all(node, &commands).await else { return missing };
    // If the key does not exist, HSET and HINCRBY would create one without a TTL. A node that
    // redirects us, or a replica, does not run them at all.
    let is_guarded = match replies.last() {
        Some(Reply::Text(_)) => true,
        Some(Reply::Error(error)) => error.starts_with("MOVED") || error.starts_with("READONLY"),
        _ => false,
    };
    let script_commands: Vec<(&str, Vec<&str>)> = SCRIPT_COMMANDS
        .iter()
        .filter(|(name, _)| is_guarded || !["HSET", "HINCRBY"].contains(name))
        .map(|(name, arguments)| {
            (*name, [*name, &key].into_iter().chain(arguments.iter().copied()).collect())
        })
        .collect();
    missing.try_all(node, &script_commands).await;
    let eval = node.ask(&["EVAL", "return 1", "0"]).await;
    if matches!(eval, Ok(Reply::Integer(1))) {
        missing.excuse_load();
    }
    missing
}

/// Returns the missing permission that an error reports, if any.
fn missing_permission(command: &str, error: &str, prefix: &str) -> Option<String> {
    if !error.starts_with("NOPERM") {
        return None;
    }
    let is_about_keys = !error.contains("to run the") && error.contains("key");
    Some(if is_about_keys {
        format!("keys ~{}:*", escape_pattern(prefix))
    } else {
        command.to_owned()
    })
}

/// Parses the reply of ACL GETUSER; `None` if it lists no commands.
fn is_unrestricted(reply: &Reply) -> Option<bool> {
    let commands = value(&pairs(reply), "commands")?;
    Some(commands.split(' ').any(|rule| rule == "+@all"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// Returns the commands in `call('NAME'`, `try('NAME'` and `read('NAME'`.
    fn called_commands(script: &str) -> BTreeSet<String> {
        let calls = ["call(", "try(", "read("].into_iter().flat_map(|name| script.split(name));
        let name =
            |rest: &str| rest.strip_prefix('\'')?.split_once('\'').map(|(name, _)| name.to_owned());
        calls.filter_map(name).collect()
    }

    #[test]
    fn list_contains_exactly_the_commands_of_the_scripts() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tidegate/src");
        let mut found = BTreeSet::new();
        for folder in ["algorithm", "store/redis/script", "store/redis/coordination"] {
            for entry in std::fs::read_dir(sources.join(folder)).expect("a directory") {
                let file = entry.expect("a file").path();
                if file.extension().is_some_and(|extension| extension == "lua") {
                    let script = std::fs::read_to_string(file).expect("a script");
                    found.extend(called_commands(&script));
                }
            }
        }
        let listed =
            SCRIPT_COMMANDS.iter().map(|(name, _)| (*name).to_owned()).chain(["TIME".to_owned()]);
        assert_eq!(found, listed.collect());
    }

    #[test]
    fn guide_lists_the_minimal_users() {
        let guide = include_str!("../../../../docs/redis.md");
        for topology in [RedisTopology::Single, RedisTopology::Sentinel, RedisTopology::Cluster] {
            let line = minimal_user("rate_limit", topology);
            assert!(guide.contains(&line), "docs/redis.md lacks: {line}");
        }
    }

    #[test]
    fn missing_permissions_are_parsed_from_errors() {
        let lacks = |error: &str| missing_permission("hset", error, "rate_limit");
        assert_eq!(
            lacks("NOPERM this user has no permissions to run the 'hset' command").as_deref(),
            Some("hset")
        );
        let keys = Some("keys ~rate_limit:*".to_owned());
        assert_eq!(
            lacks(
                "NOPERM this user has no permissions to access one of the keys used as arguments"
            ),
            keys
        );
        assert_eq!(lacks("NOPERM No permissions to access a key"), keys);
        assert_eq!(lacks("ERR unknown command 'HSET', with args beginning with: "), None);
        assert_eq!(
            lacks("WRONGTYPE Operation against a key holding the wrong kind of value"),
            None
        );
        assert_eq!(lacks("MOVED 1 127.0.0.1:7001"), None);
        assert_eq!(lacks("OOM command not allowed when used memory > 'maxmemory'."), None);
    }
}
