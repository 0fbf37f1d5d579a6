//! The configurations to simulate: a file, a file with one policy changed, a quota of the command
//! line, or all algorithms.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tidegate::{Algorithm, ClientIp, Policies, Policy, Quota};

use super::Variant;
use tidegate_config::Config;

/// Attributes of log lines besides those of requests.
pub(crate) const LOG_ATTRIBUTES: [&str; 3] = ["status", "bytes", "remote_user"];

/// Numbers that replace those of a policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuotaChanges {
    pub algorithm: Option<Algorithm>,
    pub limit: Option<u64>,
    pub window: Option<Duration>,
    pub burst: Option<u64>,
}

/// Loads the policies of a file.
pub fn load(flag: &str, path: &Path) -> anyhow::Result<Variant> {
    let name = path.display();
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let has = |key: &str| text.lines().any(|line| line.starts_with(key));
    ensure!(
        !(has("domain:") && has("descriptors:")),
        "{flag} {name}: this is a rule file of Envoy's rate limit service. Envoy makes the \
         descriptors, and no log has them: write the limits as policies, with ip or headers as keys"
    );
    let (policies, client_ip) = Config::load_policies(path)?;
    let rules = if has("envoy:") {
        ", and the rules for Envoy need descriptors, which no log has"
    } else {
        ""
    };
    ensure!(
        policies.iter().next().is_some(),
        "{flag} {name}: it has no policies, so every request would pass{rules}"
    );
    Ok(Variant { name: path.display().to_string(), policies, client_ip })
}

/// Creates one policy for all requests, counted by `key`.
pub fn one_policy(changes: QuotaChanges, key: &[String]) -> anyhow::Result<Variant> {
    let (Some(limit), Some(window)) = (changes.limit, changes.window) else {
        bail!("there is no policy: name a file with --config, or give --limit and --window");
    };
    let algorithm = changes.algorithm.unwrap_or(Algorithm::SlidingLog);
    let mut quota = Quota::new(algorithm, limit, window)?;
    if let Some(burst) = changes.burst {
        quota = quota.with_burst(burst)?;
    }
    let policy = Policy::builder("limit", quota)
        .attributes(LOG_ATTRIBUTES)
        .key(key)
        .build()
        .context("--key")?;
    let policies = Policies::new(vec![policy])?;
    let name = algorithm.as_str().to_owned();
    Ok(Variant { name, policies, client_ip: ClientIp::default() })
}

impl Variant {
    /// Returns the policy to change: the named one, or the only one.
    fn changed_policy(&self, name: Option<&str>) -> anyhow::Result<String> {
        let names: Vec<&str> = self.policies.iter().map(Policy::name).collect();
        match (name, names.as_slice()) {
            (Some(name), names) if names.contains(&name) => Ok(name.to_owned()),
            (Some(name), names) => {
                bail!("--policy {name:?} is not in {}: it has {}", self.name, names.join(", "))
            }
            (None, [only]) => Ok((*only).to_owned()),
            (None, names) => bail!("name the policy to change with --policy: {}", names.join(", ")),
        }
    }

    /// Changes the quota of one policy.
    pub fn with_changes(self, policy: Option<&str>, changes: QuotaChanges) -> anyhow::Result<Self> {
        if changes == QuotaChanges::default() && policy.is_none() {
            return Ok(self);
        }
        let name = self.changed_policy(policy)?;
        let window = |quota: &Quota| (quota.window(), quota.calendar().cloned());
        let old_window = self.policies.get(&name).map(|policy| window(policy.quota()));
        let vary = |quota: &Quota, is_override: bool| {
            // A key with its own limit or window keeps it.
            let own_window = is_override && Some(window(quota)) != old_window;
            let changes = QuotaChanges {
                algorithm: changes.algorithm,
                limit: changes.limit.filter(|_| !is_override),
                window: changes.window.filter(|_| !own_window),
                burst: changes.burst.filter(|_| !is_override),
            };
            changed_quota(quota, changes)
        };
        let policies = self.policies.with_quotas(&name, vary);
        Ok(Self { policies: policies.with_context(|| format!("policy {name:?}"))?, ..self })
    }

    /// Returns a variant for each algorithm of one policy.
    pub fn for_all_algorithms(self, policy: Option<&str>) -> anyhow::Result<Vec<Self>> {
        let name = self.changed_policy(policy)?;
        let variant = |algorithm: Algorithm| {
            let copy = Self {
                name: algorithm.as_str().to_owned(),
                policies: self.policies.clone(),
                client_ip: self.client_ip.clone(),
            };
            let changes = QuotaChanges { algorithm: Some(algorithm), ..QuotaChanges::default() };
            copy.with_changes(Some(&name), changes)
        };
        Algorithm::RATES.into_iter().map(variant).collect()
    }
}

fn changed_quota(quota: &Quota, changes: QuotaChanges) -> anyhow::Result<Quota> {
    let algorithm = changes.algorithm.unwrap_or(quota.algorithm());
    let limit = changes.limit.unwrap_or(quota.limit());
    let window = changes.window.unwrap_or(quota.window());
    let has_burst = matches!(algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket);
    // A burst that was not set follows the limit.
    let own_burst = Some(quota.burst()).filter(|burst| *burst != quota.limit() && has_burst);
    let calendar = quota.calendar().filter(|_| changes.window.is_none());
    let mut new = match calendar.filter(|_| algorithm == quota.algorithm()) {
        Some(calendar) => Quota::new_in_calendar(algorithm, limit, calendar.clone())?,
        None => Quota::new(algorithm, limit, window)?,
    };
    if let Some(burst) = changes.burst.or(own_burst) {
        new = new.with_burst(burst)?;
    }
    let keeps_options = algorithm == quota.algorithm() && algorithm == Algorithm::SlidingLog;
    if keeps_options && quota.count_denied() {
        new = new.with_count_denied(true)?;
    }
    if !quota.block_for().is_empty() {
        new = new.with_block_for(quota.block_for())?;
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "
policies:
  - name: per-user
    key: [header.x-user-id]
    algorithm: token-bucket
    limit: 100
    window: 60s
    burst: 150
    overrides:
      - {key: acme, limit: 1000}
      - {key: beta, limit: 10, window: 1s}
  - {name: total, limit: 1000, window: 60s}
";

    fn variant() -> Variant {
        let policies = tidegate_config::parse_policies("file.yaml", FILE).expect("valid");
        Variant { name: "file.yaml".to_owned(), policies, client_ip: ClientIp::default() }
    }

    fn quota_of(variant: &Variant, key: &str) -> (Algorithm, u64, u64, u64) {
        let quota = variant.policies.get("per-user").expect("the policy").quota_for(key);
        (quota.algorithm(), quota.limit(), quota.window().as_secs(), quota.burst())
    }

    #[test]
    fn changes_apply_to_the_policy_and_overrides_keep_their_own_numbers() {
        let changes = QuotaChanges {
            limit: Some(50),
            window: Some(Duration::from_secs(30)),
            ..QuotaChanges::default()
        };
        let varied = variant().with_changes(Some("per-user"), changes).expect("valid");
        let bucket = Algorithm::TokenBucket;
        assert_eq!(quota_of(&varied, "ann"), (bucket, 50, 30, 150));
        assert_eq!(quota_of(&varied, "acme"), (bucket, 1_000, 30, 150));
        assert_eq!(quota_of(&varied, "beta"), (bucket, 10, 1, 150));
    }

    #[test]
    fn all_algorithms_have_the_same_limit() {
        let variants = variant().for_all_algorithms(Some("per-user")).expect("valid");
        let found: Vec<_> = variants.iter().map(|variant| quota_of(variant, "ann")).collect();
        assert_eq!(found.len(), 5);
        for (algorithm, limit, window, burst) in found {
            let has_burst = matches!(algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket);
            let expected = (100, 60, if has_burst { 150 } else { 100 });
            assert_eq!((limit, window, burst), expected, "{algorithm}");
        }
    }

    #[test]
    fn wrong_changes_are_errors() {
        let error = |policy, changes| {
            let error = variant().with_changes(policy, changes).expect_err("wrong");
            format!("{error:#}")
        };
        let limit = |limit| QuotaChanges { limit: Some(limit), ..QuotaChanges::default() };
        assert!(
            error(None, limit(5)).contains("name the policy to change with --policy: per-user")
        );
        assert!(error(Some("peruser"), limit(5)).contains("is not in file.yaml: it has per-user"));
        assert!(error(Some("total"), limit(0)).contains("limit 0 is out of range"));
        let burst = QuotaChanges { burst: Some(5), ..QuotaChanges::default() };
        assert!(error(Some("total"), burst).contains("has no burst"));
        let one = one_policy(limit(5), &[]).expect_err("no window").to_string();
        assert!(one.contains("give --limit and --window"), "{one}");
    }
}
