//! `tidegate override`: limits of a running service, changed for a while.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use http::Method;
use tidegate_api::admin::{
    KeyValues, OverriddenLimits, OverrideBody, OverrideMode, OverrideScope, OverridesBody,
    SetOverride,
};

use super::admin::AdminFlags;
use crate::tool::table::TextTable;
use crate::tool::text::{encoded, grouped, printable};
use crate::top::AdminClient;

/// Number of overrides in one response.
const PAGE: usize = 1_000;
const TIMEOUT: Duration = Duration::from_secs(5);

/// Change limits of a running service for a while, on all instances within a second.
///
/// An override of a key comes before that of all keys (*), and both come before the overrides and
/// the limits of the configuration. On Redis all instances that share it have it, in memory only
/// this one. Exit code: 0, or 2 on an error, such as a limit that is out of range.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  Raise a customer to 5,000 for two hours:
    tidegate override set per-user acme --limit 5000 --expires-in 2h --reason 'launch, ticket 812'

  Halve the limit of all keys during an incident, and end that early:
    tidegate override set per-user '*' --limit 50 --expires-in 30m --reason 'database overloaded'
    tidegate override rm per-user '*'

  Exempt a key, or block one:
    tidegate override set per-user probe --mode unlimited --expires-in never --reason 'our probe'
    tidegate override set per-ip 192.0.2.7 --mode block --expires-in 1d --reason scraper

  List those in force, and print them for the file of the configuration:
    tidegate override list
    tidegate override export > overrides.yaml")]
pub struct OverrideCommand {
    #[command(flatten)]
    admin: AdminFlags,

    #[command(subcommand)]
    action: OverrideAction,
}

#[derive(Debug, Subcommand)]
enum OverrideAction {
    Set(SetFlags),
    List(ListFlags),
    Rm(RemoveFlags),
    /// Print the overrides in the form of the configuration file
    Export,
}

/// Set the limit of a key, or of all keys of a policy
///
/// Numbers that are not given stay as they are.
#[derive(Debug, Args)]
struct SetFlags {
    /// Policy
    policy: String,

    /// Key, or * for all keys; several values for a key of several attributes
    #[arg(required = true)]
    key: Vec<String>,

    /// Units per window
    #[arg(long, value_name = "N")]
    limit: Option<u64>,

    /// Window, such as 60s
    #[arg(long, value_name = "DURATION")]
    window: Option<String>,

    /// Capacity of a bucket
    #[arg(long, value_name = "N")]
    burst: Option<u64>,

    /// Instead of numbers: unlimited, or block
    #[arg(long, value_parser = mode, value_name = "MODE")]
    mode: Option<OverrideMode>,

    /// Time until the override ends, such as 2h, or never
    #[arg(long, value_name = "DURATION")]
    expires_in: String,

    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

/// List the overrides
#[derive(Debug, Args)]
struct ListFlags {
    /// Policy; all by default
    policy: Option<String>,

    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

/// Remove an override
#[derive(Debug, Args)]
struct RemoveFlags {
    /// Policy
    policy: String,

    /// Key as the list shows it, or * for that of all keys
    key: String,

    /// Why, for the audit
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

fn mode(text: &str) -> Result<OverrideMode, String> {
    match text {
        "unlimited" => Ok(OverrideMode::Unlimited),
        "block" => Ok(OverrideMode::Block),
        _ => Err("it must be unlimited or block".to_owned()),
    }
}

impl OverrideCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result = runtime.block_on(self.run_action());
        // A request without an answer must not delay the exit.
        runtime.shutdown_background();
        result.map(|()| ExitCode::SUCCESS)
    }

    async fn run_action(self) -> anyhow::Result<()> {
        let client = self.admin.client(TIMEOUT)?;
        let failed = format!("--admin {}", self.admin.admin);
        run_action(&client, self.action).await.context(failed)
    }
}

async fn run_action(client: &AdminClient, action: OverrideAction) -> anyhow::Result<()> {
    match action {
        OverrideAction::Set(set) => {
            let SetFlags { policy, key, limit, window, burst, mode, expires_in, reason } = set;
            let key = match <[String; 1]>::try_from(key) {
                Ok([key]) => KeyValues::One(key),
                Err(values) => KeyValues::Many(values),
            };
            let request =
                SetOverride { policy, key, limit, window, burst, mode, expires_in, reason };
            let body = serde_json::to_string(&request)?;
            let answer = client.call(Method::PUT, "/v1/overrides", body).await?;
            let set: OverrideBody = serde_json::from_slice(&answer)?;
            anstream::println!(
                "{} of {}: {} until {}",
                printable(&set.key),
                printable(&set.policy),
                shown_limits(&set.stored.limits),
                shown_end(set.until_ms)
            );
        }
        OverrideAction::Rm(RemoveFlags { policy, key, reason }) => {
            let [name, wanted, why] = [&policy, &key, &reason].map(|text| encoded(text));
            let path = format!("/v1/overrides?policy={name}&key={wanted}&reason={why}");
            client.call(Method::DELETE, &path, String::new()).await?;
            anstream::println!("removed");
        }
        OverrideAction::List(ListFlags { policy, json }) => {
            let (overrides, scope) = all(client, policy.as_deref()).await?;
            if json {
                for body in &overrides {
                    anstream::println!("{}", serde_json::to_string(body)?);
                }
                return Ok(());
            }
            let mut table =
                TextTable::new(&["policy", "key", "limit", "until", "by", "reason"], &[""; 0]);
            for body in &overrides {
                let inert = body.inert.as_ref().map(|why| format!(" (no effect: {why})"));
                table.add([
                    printable(&body.policy),
                    printable(&body.key),
                    shown_limits(&body.stored.limits) + &inert.unwrap_or_default(),
                    shown_end(body.until_ms),
                    printable(&body.stored.author.by),
                    printable(&body.stored.author.reason),
                ]);
            }
            table.write(&mut anstream::stdout())?;
            if scope == OverrideScope::ThisProcess {
                anstream::println!("The store is memory: only this instance has them.");
            }
        }
        OverrideAction::Export => {
            let (overrides, _) = all(client, None).await?;
            anstream::stdout().write_all(exported(&overrides).as_bytes())?;
        }
    }
    Ok(())
}

/// Returns all overrides, page by page.
async fn all(
    client: &AdminClient,
    policy: Option<&str>,
) -> anyhow::Result<(Vec<OverrideBody>, OverrideScope)> {
    let mut overrides = Vec::new();
    let mut cursor = None;
    loop {
        let mut path = format!("/v1/overrides?limit={PAGE}");
        for (name, value) in [("policy", policy), ("cursor", cursor.as_deref())] {
            if let Some(value) = value {
                let _ = write!(path, "&{name}={}", encoded(value));
            }
        }
        let answer = client.call(Method::GET, &path, String::new()).await?;
        let page: OverridesBody =
            serde_json::from_slice(&answer).context("not an answer of Tidegate")?;
        ensure!(!page.overrides.is_empty() || page.cursor.is_none(), "an empty page");
        overrides.extend(page.overrides);
        cursor = page.cursor;
        if cursor.is_none() {
            return Ok((overrides, page.scope));
        }
    }
}

fn shown_limits(limits: &OverriddenLimits) -> String {
    let OverriddenLimits { limit, window, burst, mode } = limits;
    let mut parts = Vec::new();
    match mode {
        Some(OverrideMode::Unlimited) => parts.push("unlimited".to_owned()),
        Some(OverrideMode::Block) => parts.push("blocked".to_owned()),
        None => {}
    }
    parts.extend(limit.map(grouped));
    parts.extend(window.as_ref().map(|window| format!("per {}", printable(window))));
    parts.extend(burst.map(|burst| format!("burst {}", grouped(burst))));
    parts.join(" ")
}

fn shown_end(until_ms: Option<u64>) -> String {
    let Some(until) = until_ms else { return "never".to_owned() };
    let time = i64::try_from(until).ok().and_then(|it| jiff::Timestamp::from_millisecond(it).ok());
    time.map_or_else(String::new, |time| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string())
}

/// Returns the overrides in the form of the configuration file. Those that a file cannot have are
/// comments.
fn exported(overrides: &[OverrideBody]) -> String {
    let mut by_policy: BTreeMap<&str, Vec<&OverrideBody>> = BTreeMap::new();
    for body in overrides {
        by_policy.entry(&body.policy).or_default().push(body);
    }
    let mut text = "# Add each list to the policy of that name.\npolicies:\n".to_owned();
    for (policy, bodies) in by_policy {
        let _ = writeln!(text, "  - name: {}\n    overrides:", quoted(policy));
        for body in bodies {
            let OverriddenLimits { limit, window, burst, mode } = &body.stored.limits;
            let can_be_written = body.key != "*"
                && mode.is_none()
                && limit.is_some()
                && !body.key.starts_with("sha256:");
            let mut fields = vec![format!("key: {}", quoted_key(&body.key))];
            fields.extend(limit.map(|limit| format!("limit: {limit}")));
            fields.extend(window.as_ref().map(|window| format!("window: {}", quoted(window))));
            fields.extend(burst.map(|burst| format!("burst: {burst}")));
            let comment = if can_be_written { "" } else { "# not in a file: " };
            let note = format!(
                "{}until {}, by {}: {}",
                mode.map_or(String::new(), |_| shown_limits(&body.stored.limits) + ", "),
                shown_end(body.until_ms),
                printable(&body.stored.author.by),
                printable(&body.stored.author.reason)
            );
            let _ = writeln!(text, "      {comment}- {{{}}} # {note}", fields.join(", "));
        }
    }
    text
}

/// Returns a text in quotes: that of JSON is one of YAML.
fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default()
}

/// Returns a key, or the list of its values.
fn quoted_key(key: &str) -> String {
    let mut values = vec![String::new()];
    let mut characters = key.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' if key.contains('|') => {
                values.last_mut().expect("one").extend(characters.next());
            }
            '|' => values.push(String::new()),
            other => values.last_mut().expect("one").push(other),
        }
    }
    let quoted: Vec<String> = values.iter().map(|value| quoted(value)).collect();
    if let [value] = quoted.as_slice() { value.clone() } else { format!("[{}]", quoted.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_api::admin::{OverrideAuthor, StoredOverride};

    fn body(key: &str, limits: OverriddenLimits) -> OverrideBody {
        let author =
            OverrideAuthor { by: "ops".into(), from: "192.0.2.1".into(), reason: "launch".into() };
        let stored = StoredOverride { limits, author };
        let policy = "per-user".to_owned();
        OverrideBody { policy, key: key.into(), stored, until_ms: None, inert: None }
    }

    #[test]
    fn an_export_is_a_configuration() {
        let numbers = OverriddenLimits {
            limit: Some(5_000),
            window: Some("60s".into()),
            ..OverriddenLimits::default()
        };
        let block =
            OverriddenLimits { mode: Some(OverrideMode::Block), ..OverriddenLimits::default() };
        let overrides =
            [body("a: \"b\"", numbers.clone()), body("*", numbers), body("scraper", block)];
        let text = exported(&overrides);
        assert!(text.contains("# not in a file: - {key: \"*\""), "{text}");
        let policy =
            "  - name: per-user\n    key: [header.x-user-id]\n    limit: 1\n    window: 1s\n";
        let file = text.replace("  - name: \"per-user\"\n", policy);
        let policies = tidegate_config::parse_policies("export.yaml", &file).expect("valid");
        let policy = policies.get("per-user").expect("a policy");
        assert_eq!(policy.quota_for("a: \"b\"").limit(), 5_000);
        assert_eq!(policy.overrides().count(), 1);
    }

    #[test]
    fn a_key_of_several_values_is_a_list() {
        assert_eq!(quoted_key("acme|eu"), r#"["acme", "eu"]"#);
        assert_eq!(quoted_key(r"a\|b|c"), r#"["a|b", "c"]"#);
        assert_eq!(quoted_key(r"a\b"), r#""a\\b""#);
    }
}
