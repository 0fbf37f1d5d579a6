//! Whether this user may do what decisions need, and no more.
//!
//! Found out by trying, each command in a form that changes nothing: before Redis 7 there is no
//! other way, and later only for administrators.

use tidegate::store::redis::Reply;

use super::info::pairs;
use super::keys::literally;
use super::{Finding, Kind, Report, Subject};

const CHECK: &str = "acl";

/// What the scripts call, beside TIME, each with arguments that do nothing to a key that is a short
/// text.
const BY_SCRIPTS: [(&str, &[&str]); 17] = [
    ("GET", &[]),
    ("GETRANGE", &["0", "0"]),
    ("SETRANGE", &["0", ""]),
    ("HMGET", &["field"]),
    // Of another type: it is refused.
    ("HSET", &["field", "value"]),
    ("ZADD", &["XX", "0", "member"]),
    ("ZCARD", &[]),
    ("ZCOUNT", &["0", "0"]),
    ("ZRANGE", &["0", "0"]),
    ("ZRANGEBYSCORE", &["0", "0"]),
    ("ZREM", &["member"]),
    ("ZREMRANGEBYRANK", &["0", "0"]),
    ("ZREMRANGEBYSCORE", &["0", "0"]),
    ("PTTL", &[]),
    // Long past: the key goes, which is what comes next anyway.
    ("PEXPIREAT", &["1"]),
    ("UNLINK", &[]),
    ("SET", &["", "PX", "1", "XX"]),
];
const NO_SUCH_SCRIPT: &str = "0000000000000000000000000000000000000000";

pub(super) async fn check(subject: &Subject<'_>, prefix: &str, report: &mut Report) {
    let missing = missing(subject, prefix).await;
    if !missing.is_empty() {
        return subject.found(report, lacks(&missing.join(", "), prefix, subject.kind));
    }
    let Ok(Reply::Text(user)) = subject.store.ask_node(subject.address, &["ACL", "WHOAMI"]).await
    else {
        return subject.found(
            report,
            Finding::ok(CHECK, "this user may do what decisions need, and not even ask who it is"),
        );
    };
    let rules = subject.store.ask_node(subject.address, &["ACL", "GETUSER", &user]).await;
    let user = user.escape_debug();
    subject.found(
        report,
        match rules.as_ref().map(may_do_anything) {
            Ok(Some(true)) => {
                let message = format!("user {user} may do anything, and needs very little");
                Finding::note(CHECK, message).advice(advice(prefix, subject.kind))
            }
            _ => Finding::ok(CHECK, format!("user {user} may do what decisions need")),
        },
    );
}

/// For a user who cannot even connect for want of a permission. `None`: that is not what the error
/// says.
pub(super) fn lacks_to_connect(error: &str, prefix: &str, kind: Kind) -> Option<Finding> {
    let command = error.split_once("NOPERM")?.1.split('\'').nth(1)?;
    Some(lacks(command, prefix, kind))
}

fn lacks(missing: &str, prefix: &str, kind: Kind) -> Finding {
    let message = format!("this user lacks what decisions need: {missing}");
    Finding::error(CHECK, message).advice(advice(prefix, kind))
}

fn advice(prefix: &str, kind: Kind) -> String {
    format!("the smallest that works: {}", smallest(prefix, kind))
}

/// The rules of a user for decisions, and nothing else.
pub(super) fn smallest(prefix: &str, kind: Kind) -> String {
    let by_scripts: Vec<String> =
        BY_SCRIPTS.iter().map(|(name, _)| format!("+{}", name.to_lowercase())).collect();
    let more = match kind {
        Kind::Single => "",
        Kind::Sentinel => " +role",
        Kind::Cluster => " +cluster|slots +asking",
    };
    format!(
        "ACL SETUSER tidegate on >PASSWORD resetchannels ~{}:* -@all +time +evalsha +script|load{more} {}",
        literally(prefix),
        by_scripts.join(" ")
    )
}

/// The commands that are refused, in small letters, and `keys …` if it is the keys that are.
async fn missing(subject: &Subject<'_>, prefix: &str) -> Vec<String> {
    // No user's key has a tag that begins with a bare percent sign.
    let key = format!("{prefix}:{{%doctor}}");
    let mut missing = Vec::new();
    let mut told = |command: &str, reply: &Reply| {
        if let Reply::Error(error) = reply
            && let Some(lacks) = lacking(command, error, prefix)
            && !missing.contains(&lacks)
        {
            missing.push(lacks);
        }
    };
    let mut plain: Vec<(&str, Vec<&str>)> = vec![
        ("time", vec!["TIME"]),
        ("evalsha", vec!["EVALSHA", NO_SUCH_SCRIPT, "1", &key]),
        ("script|load", vec!["SCRIPT", "LOAD", "return 1"]),
    ];
    match subject.kind {
        Kind::Single => {}
        Kind::Sentinel => plain.push(("role", vec!["ROLE"])),
        // The second takes back what the first does to the connection.
        Kind::Cluster => plain.extend([
            ("cluster|slots", vec!["CLUSTER", "SLOTS"]),
            ("asking", vec!["ASKING"]),
            ("time", vec!["TIME"]),
        ]),
    }
    // A text with an end: what is meant for other types is then refused, and whatever happens the
    // key goes by itself.
    plain.push(("set", vec!["SET", &key, "", "PX", "10000"]));
    let questions: Vec<&[&str]> = plain.iter().map(|(_, words)| words.as_slice()).collect();
    let Ok(replies) = subject.store.ask_node_all(subject.address, &questions).await else {
        return missing;
    };
    for ((command, _), reply) in plain.iter().zip(&replies) {
        told(command, reply);
    }
    // Without that key, or on a node that sends us elsewhere, HSET would make one without an
    // expiry.
    let guarded = match replies.last() {
        Some(Reply::Text(_)) => true,
        Some(Reply::Error(error)) => error.starts_with("MOVED"),
        _ => false,
    };
    let tries: Vec<(&str, Vec<&str>)> = BY_SCRIPTS
        .iter()
        .filter(|(name, _)| guarded || *name != "HSET")
        .map(|(name, arguments)| {
            (*name, [*name, &key].into_iter().chain(arguments.iter().copied()).collect())
        })
        .collect();
    let questions: Vec<&[&str]> = tries.iter().map(|(_, words)| words.as_slice()).collect();
    if let Ok(replies) = subject.store.ask_node_all(subject.address, &questions).await {
        for ((command, _), reply) in tries.iter().zip(&replies) {
            told(&command.to_lowercase(), reply);
        }
    }
    missing
}

/// What an error says is lacking, if that is what it says.
fn lacking(command: &str, error: &str, prefix: &str) -> Option<String> {
    if error.starts_with("NOPERM") {
        let keys = !error.contains("to run the") && error.contains("key");
        return Some(if keys {
            format!("keys ~{}:*", literally(prefix))
        } else {
            command.to_owned()
        });
    }
    // Renamed or taken out.
    error.starts_with("ERR unknown command").then(|| command.to_owned())
}

/// From ACL GETUSER; `None` if it does not tell.
fn may_do_anything(reply: &Reply) -> Option<bool> {
    let rules = pairs(reply);
    let commands = rules.iter().find(|(name, _)| *name == "commands")?.1;
    Some(commands.split(' ').any(|rule| rule == "+@all"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// The names of the commands in `call('NAME'` and `read('NAME'`.
    fn called(script: &str) -> BTreeSet<String> {
        let calls = script.split("call(").chain(script.split("read(")).skip(1);
        let name =
            |rest: &str| rest.strip_prefix('\'')?.split_once('\'').map(|(name, _)| name.to_owned());
        calls.filter_map(name).collect()
    }

    #[test]
    fn the_list_is_what_the_scripts_call() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tidegate/src");
        let mut found = BTreeSet::new();
        for folder in ["algorithm", "store/redis"] {
            for entry in std::fs::read_dir(sources.join(folder)).expect("a folder") {
                let file = entry.expect("a file").path();
                if file.extension().is_some_and(|extension| extension == "lua") {
                    found.extend(called(&std::fs::read_to_string(file).expect("a script")));
                }
            }
        }
        let listed =
            BY_SCRIPTS.iter().map(|(name, _)| (*name).to_owned()).chain(["TIME".to_owned()]);
        assert_eq!(found, listed.collect());
    }

    #[test]
    fn the_guide_has_the_smallest_lines() {
        let guide = include_str!("../../../../docs/redis.md");
        for kind in [Kind::Single, Kind::Sentinel, Kind::Cluster] {
            let line = smallest("rate_limit", kind);
            assert!(guide.contains(&line), "docs/redis.md lacks: {line}");
        }
    }

    #[test]
    fn what_is_lacking_is_named() {
        let lacks = |error: &str| lacking("hset", error, "rate_limit");
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
        assert_eq!(
            lacks("ERR unknown command 'HSET', with args beginning with: "),
            Some("hset".to_owned())
        );
        assert_eq!(
            lacks("WRONGTYPE Operation against a key holding the wrong kind of value"),
            None
        );
        assert_eq!(lacks("MOVED 1 127.0.0.1:7001"), None);
        assert_eq!(lacks("OOM command not allowed when used memory > 'maxmemory'."), None);
    }
}
