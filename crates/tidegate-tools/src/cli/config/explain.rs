//! `tidegate config explain`: which policies apply to a request, without a service.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use clap::builder::{FalseyValueParser, Resettable};
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use serde_json::json;
use tidegate::layer::{CustomAttributes, RequestParts};
use tidegate::{ClientIp, Explanation, Policies};

use crate::cli::simulate::attribute;
use crate::simulate::RequestAttributes;
use crate::simulate::log::LogArgs;
use crate::tool::output;
use crate::tool::table::TextTable;
use crate::tool::text::{grouped, printable};
use tidegate_config::Config;

const COLUMNS: [&str; 5] = ["policy", "applies", "mode", "key", "reason"];
/// Flags of one request.
const OF_REQUEST: [&str; 6] = ["method", "path", "host", "headers", "ip", "attributes"];

/// Explain which policies apply to a request, by which key and limit, and why the others do not
///
/// With --access-log, it counts the requests of a log by policy and reason. It reads only the
/// policies of the file, and contacts no server. The request is read as the gateway reads it. Rules
/// for Envoy are not explained: they have descriptors instead of requests.
#[derive(Debug, Args)]
#[command(mut_arg("access_log", |flag| {
    flag.env(Resettable::Reset).conflicts_with_all(OF_REQUEST)
}))]
#[command(after_help = "\
Examples:
  A request of a user:
    tidegate config explain --config tidegate.yaml --method POST --path '/api/items?page=2' \\
      --header 'x-user-id: ann' --ip 203.0.113.9

  The requests of a log:
    tidegate config explain --config tidegate.yaml --access-log access.log

  The names of the policies that apply, for a test of a pull request:
    tidegate config explain --config tidegate.yaml --path /login --json |
      jq -r '.policies[] | select(.applies).policy'")]
pub(super) struct ExplainCommand {
    /// Configuration file
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    config: PathBuf,

    /// Method of the request
    #[arg(long, value_name = "METHOD", default_value = "GET")]
    method: Method,

    /// Path of the request, with its query
    #[arg(long, value_name = "PATH", default_value = "/")]
    path: Uri,

    /// Host of the request
    #[arg(long, value_name = "HOST")]
    host: Option<HeaderValue>,

    /// Header of the request, such as 'x-user-id: ann'
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    headers: Vec<(HeaderName, HeaderValue)>,

    /// Address that the request comes from; behind a trusted proxy, it is that of the proxy, and
    /// the header x-forwarded-for has the client's
    #[arg(long, value_name = "ADDRESS", default_value = "192.0.2.1")]
    ip: IpAddr,

    /// Attribute that the file declares
    #[arg(long = "attribute", value_name = "NAME=VALUE", value_parser = attribute)]
    attributes: Vec<(String, String)>,

    #[command(flatten)]
    logs: LogArgs,

    /// Print one JSON object
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

/// Parses `NAME: VALUE`.
fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let parsed = text.split_once(':').and_then(|(name, value)| {
        Some((name.trim().parse().ok()?, HeaderValue::from_str(value.trim()).ok()?))
    });
    parsed.ok_or_else(|| format!("{text:?} is not a header: write it like 'x-user-id: ann'"))
}

impl ExplainCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let (policies, client_ip) = Config::load_policies(&self.config)?;
        if self.logs.is_given() {
            let counts = ReasonCounts::count(&self.logs, &policies, &client_ip)?;
            let json = self.json.then(|| counts.to_json(&policies));
            output::print(json, |output| counts.table(&policies).write(output))?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut request = Request::new(());
        *request.method_mut() = self.method;
        *request.uri_mut() = self.path;
        request.headers_mut().extend(self.host.map(|host| (http::header::HOST, host)));
        for (name, value) in self.headers {
            request.headers_mut().append(name, value);
        }
        for (name, _) in &self.attributes {
            policies.check_attribute(name).with_context(|| format!("--attribute {name}"))?;
        }
        let custom = CustomAttributes(BTreeMap::from_iter(self.attributes));
        request.extensions_mut().insert(custom);
        let (parts, ()) = request.into_parts();
        let attributes = RequestParts::new(&parts, Some(self.ip), &client_ip);
        let explanations = policies.explain(&attributes);
        let json = self.json.then(|| to_json(&policies, &explanations));
        output::print(json, |output| table(&policies, &explanations).write(output))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Number of requests by whether a policy is exempt from them, and by the reason.
type Reasons = BTreeMap<(bool, String), u64>;

/// Requests of a log by policy.
struct ReasonCounts<'p> {
    requests: u64,
    by_policy: Vec<(&'p str, Reasons)>,
}

impl<'p> ReasonCounts<'p> {
    fn count(logs: &LogArgs, policies: &'p Policies, client_ip: &ClientIp) -> anyhow::Result<Self> {
        let names = policies.iter().map(|policy| (policy.name(), BTreeMap::new()));
        let mut counts = Self { requests: 0, by_policy: names.collect() };
        logs.open()?.for_each(|record| {
            counts.requests += 1;
            let explanations = policies.explain(&RequestAttributes::new(record, client_ip));
            for (explanation, (_, reasons)) in explanations.into_iter().zip(&mut counts.by_policy) {
                *reasons.entry((!explanation.applies, explanation.reason)).or_default() += 1;
            }
            Ok(())
        })?;
        Ok(counts)
    }

    fn table(&self, policies: &Policies) -> TextTable {
        let mut table = TextTable::new(&["policy", "applies", "mode", "reason"], &["requests"]);
        for (policy, reasons) in &self.by_policy {
            for ((is_exempt, reason), count) in reasons {
                let applies = if *is_exempt { "no" } else { "yes" };
                let mode = mode(policies, policy);
                let texts = [policy, applies, mode].map(str::to_owned);
                table.add(texts.into_iter().chain([printable(reason), grouped(*count)]));
            }
        }
        table
    }

    fn to_json(&self, policies: &Policies) -> String {
        let reason = |((is_exempt, reason), count): (&(bool, String), &u64)| json!({"applies": !is_exempt, "reason": reason, "requests": count});
        let policies = self.by_policy.iter().map(|(name, reasons)| {
            let reasons: Vec<_> = reasons.iter().map(reason).collect();
            json!({"policy": name, "mode": mode(policies, name), "reasons": reasons})
        });
        json!({"requests": self.requests, "policies": policies.collect::<Vec<_>>()}).to_string()
    }
}

/// Returns the mode of a policy.
fn mode(policies: &Policies, name: &str) -> &'static str {
    policies.get(name).map_or("", |policy| policy.mode().as_str())
}

fn table(policies: &Policies, explanations: &[Explanation<'_>]) -> TextTable {
    let mut table = TextTable::new(&COLUMNS, &[""; 0]);
    for Explanation { policy, applies, key, reason, .. } in explanations {
        let applies = if *applies { "yes" } else { "no" };
        let key = printable(key.as_deref().unwrap_or_default());
        let mode = mode(policies, policy).to_owned();
        table.add([(*policy).to_owned(), applies.to_owned(), mode, key, printable(reason)]);
    }
    table
}

fn to_json(policies: &Policies, explanations: &[Explanation<'_>]) -> String {
    let policies =
        explanations.iter().map(|Explanation { policy, applies, key, reason, .. }| {
            json!({
                "policy": policy,
                "applies": applies,
                "mode": mode(policies, policy),
                "key": key,
                "reason": reason,
            })
        });
    json!({"policies": policies.collect::<Vec<_>>()}).to_string()
}
