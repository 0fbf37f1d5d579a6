//! Command line interface, one file per command.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use tidegate_tools::cli::{
    acquire, bench, config, doctor, events, fleet, health, hold, lookup, overrides, plan, reset,
    simulate, suggest, top,
};
use tidegate_tools::tool::style;

mod arguments;
mod gateway;
mod generate;
mod listen;
mod ratelimit;
mod serve;
mod service;
mod variables;

use arguments::FromVariables;
use ratelimit::RatelimitCommand;

/// Distributed rate limiter: decides, exactly and fast, whether a request is allowed now.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, propagate_version = true, styles = style::HELP)]
pub(crate) struct CommandLine {
    #[command(subcommand)]
    command: AnyCommand,
}

#[derive(Debug, Subcommand)]
enum AnyCommand {
    Serve(serve::ServeCommand),
    Gateway(gateway::GatewayCommand),
    Acquire(acquire::AcquireCommand),
    Hold(hold::HoldCommand),
    Config(config::ConfigCommand),
    Doctor(doctor::DoctorCommand),
    Plan(plan::PlanCommand),
    Top(top::TopCommand),
    Override(overrides::OverrideCommand),
    Lookup(lookup::LookupCommand),
    Reset(reset::ResetCommand),
    Fleet(fleet::FleetCommand),
    Events(events::EventsCommand),
    Health(health::HealthCommand),
    Completions(generate::CompletionsCommand),
    Man(generate::ManCommand),
    // Boxed, because they have many flags.
    Simulate(Box<simulate::SimulateCommand>),
    Suggest(Box<suggest::SuggestCommand>),
    Bench(Box<bench::BenchCommand>),
}

/// Program that this process was started as.
pub(crate) enum Program {
    Tidegate(Box<CommandLine>),
    Ratelimit(RatelimitCommand),
}

impl Program {
    /// Parses the arguments, for the program with the name that the process was started by. Returns
    /// the flags that variables of the environment have set, too.
    pub(crate) fn parse() -> (Result<Self, clap::Error>, FromVariables) {
        if ratelimit::is_name(std::env::args_os().next().as_deref()) {
            let parsed = RatelimitCommand::try_parse().map(Self::Ratelimit);
            return (parsed, FromVariables::default());
        }
        let (parsed, variables) = arguments::parse();
        (parsed.map(Box::new).map(Self::Tidegate), variables)
    }

    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Tidegate(command) => command.run(),
            Self::Ratelimit(command) => command.run(),
        }
    }
}

impl CommandLine {
    fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            AnyCommand::Serve(serve) => serve.run(),
            AnyCommand::Gateway(gateway) => gateway.run(),
            AnyCommand::Acquire(acquire) => acquire.run(),
            AnyCommand::Hold(hold) => hold.run(),
            AnyCommand::Config(config) => config.run(),
            AnyCommand::Doctor(doctor) => doctor.run(),
            AnyCommand::Plan(plan) => plan.run(),
            AnyCommand::Top(top) => top.run(),
            AnyCommand::Override(overrides) => overrides.run(),
            AnyCommand::Lookup(lookup) => lookup.run(),
            AnyCommand::Reset(reset) => reset.run(),
            AnyCommand::Fleet(fleet) => fleet.run(),
            AnyCommand::Events(events) => events.run(),
            AnyCommand::Health(health) => health.run(),
            AnyCommand::Completions(completions) => completions.run(),
            AnyCommand::Man(man) => man.run(),
            AnyCommand::Simulate(simulate) => simulate.run(),
            AnyCommand::Suggest(suggest) => suggest.run(),
            AnyCommand::Bench(bench) => bench.run(),
        }
    }
}

/// Formats an argument error, with its suggestion, as one line.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("For more information"));
    let message = lines.collect::<Vec<_>>().join(" ");
    format!(
        "{}error:{}{} (see --help)",
        style::ERROR,
        style::RESET,
        message.trim_start_matches("error:")
    )
}
