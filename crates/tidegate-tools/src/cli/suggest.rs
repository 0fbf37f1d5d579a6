//! `tidegate suggest`: limits from an access log.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{bail, ensure};
use clap::builder::{FalseyValueParser, PossibleValuesParser};
use clap::{ArgGroup, Args};
use tidegate::ClientIp;
use tidegate_config::Config;

use crate::simulate::log::LogArgs;
use crate::simulate::output::OutputFile;
use crate::suggest::{MAX_GIVEN, MAX_GROUPS, Recorder, SuggestOptions, Suggestion, WINDOWS};
use crate::tool::output;
use crate::tool::table::{PageFormat, TextPage};

/// Suggest limits from access logs, and show which clients they would deny.
///
/// For all paths and for each group of them: the requests of each client in its busiest second, 10
/// seconds, minute, hour and day; what limits would deny, exactly; and policies in shadow mode.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("input").arg("access_log").required(true)))]
#[command(after_help = "\
Examples:
  What should the limit be, and who would be hit?
    tidegate suggest --access-log access.log

  The same as a page with plots, and the policies as a file to try:
    tidegate suggest --access-log access.log* --html limits.html --yaml limits.yaml
    tidegate simulate --access-log access.log* --config limits.yaml

  Per user of two parts of an API, and what 86 per window would deny:
    tidegate suggest --access-log requests.csv --key header.x-user-id \\
      --path '/api/orders/**' --path '/api/search' --limit 86

  A limit per hour that denies hardly any client:
    tidegate suggest --access-log access.log --window 1h --percentile 99.9 --margin 3")]
pub struct SuggestCommand {
    #[command(flatten)]
    logs: LogArgs,

    /// Attribute to count by; several are counted together
    #[arg(long = "key", value_name = "ATTRIBUTE", default_value = "ip", value_delimiter = ',')]
    key: Vec<String>,

    /// Group of paths, as `match` of a policy has it [default: those with 2 % of the requests are
    /// found; numbers, ids and rare names become *]
    #[arg(long = "path", value_name = "PATTERN")]
    paths: Vec<String>,

    /// Window of the suggested policies
    #[arg(long, value_name = "WINDOW", default_value = "1m")]
    #[arg(value_parser = PossibleValuesParser::new(WINDOWS.map(|(name, _)| name)))]
    window: String,

    /// Percentage of the clients whose busiest windows the limit is derived from
    #[arg(long, value_name = "P", default_value_t = 99.0)]
    percentile: f64,

    /// Factor between those requests and the limit
    #[arg(long, value_name = "FACTOR", default_value_t = 2.0)]
    margin: f64,

    /// Limit to try in all windows, besides round ones
    #[arg(long = "limit", value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limits: Vec<u64>,

    /// Number of denied keys that are named
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,

    /// Configuration file whose `client_ip` says what an address is
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,

    /// Print the tables in Markdown
    #[arg(long, value_parser = FalseyValueParser::new(), conflicts_with = "json")]
    markdown: bool,

    /// Write one page with the tables and plots, without references to other files
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Write the policies in shadow mode as a configuration file
    #[arg(long, value_name = "FILE")]
    yaml: Option<PathBuf>,
}

impl SuggestCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Self { percentile, margin, .. } = self;
        ensure!(
            percentile > 0.0 && percentile <= 100.0,
            "--percentile {percentile} is out of range: it must be above 0, and at most 100"
        );
        ensure!(
            (1.0..=1_000.0).contains(&margin),
            "--margin {margin} is out of range: it must be from 1 to 1000"
        );
        ensure!(self.paths.len() <= MAX_GROUPS, "--path can be given {MAX_GROUPS} times");
        ensure!(self.limits.len() <= MAX_GIVEN, "--limit can be given {MAX_GIVEN} times");
        let client_ip = match &self.config {
            Some(file) => Config::load_policies(file)?.1,
            None => ClientIp::default(),
        };
        let html = OutputFile::create("--html", self.html.as_ref())?;
        let yaml = OutputFile::create("--yaml", self.yaml.as_ref())?;
        let mut recorder = Recorder::new(&self.key, &self.paths, client_ip)?;
        let lines = self.logs.open()?.for_each(|request| recorder.record(request))?;
        let window = WINDOWS.iter().position(|(name, _)| *name == self.window);
        let options = SuggestOptions {
            percentile,
            margin,
            window: window.unwrap_or_default(),
            limits: self.limits,
            top: self.top,
        };
        let suggestion = Suggestion::new(recorder, lines, &options)?;
        if suggestion.is_empty() {
            bail!(
                "no request has the key {}: name an attribute of the log by --key",
                self.key.join(", ")
            );
        }
        if let Some(file) = html {
            file.complete(&suggestion.html()?)?;
        }
        if let Some(file) = yaml {
            file.complete(suggestion.yaml().as_bytes())?;
        }
        let json = self.json.then(|| serde_json::to_string(&suggestion)).transpose()?;
        let format = if self.markdown { PageFormat::Markdown } else { PageFormat::Terminal };
        output::print(json, |output| suggestion.write(&mut TextPage::new(output, format)))?;
        Ok(ExitCode::SUCCESS)
    }
}
