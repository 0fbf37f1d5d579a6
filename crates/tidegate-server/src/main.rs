//! Entry point of the `tidegate` binary: argument parsing, dispatch and exit code.

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

mod admin;
mod api;
mod auth;
mod backend;
mod bench;
mod body_reader;
mod cli;
mod config;
mod doctor;
mod duration;
mod envoy;
#[cfg(test)]
#[path = "../../tidegate/tests/support/fuzz.rs"]
mod fuzz;
mod gateway;
mod hot_keys;
mod key_hash;
mod listener;
mod logs;
mod metrics;
mod observer;
mod plan;
mod reload;
mod resp;
mod serve;
mod simulate;
mod state;
mod tls;
mod tool;
mod top;

/// Fastest of the allocators that were benchmarked: a request makes many small allocations.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    logs::panics::install_hook();
    let arguments = match cli::CommandLine::try_parse() {
        Ok(arguments) => arguments,
        // `--help` and `--version` are reported as errors by clap, but print to stdout.
        Err(error) if !error.use_stderr() => error.exit(),
        // Without a subcommand, the help text explains more than one error line.
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            return ExitCode::from(2);
        }
        Err(error) => {
            anstream::eprintln!("{}", cli::one_line(&error));
            return ExitCode::from(2);
        }
    };
    match arguments.run() {
        Ok(code) => code,
        // A closed pipe (`… | head`) is not an error.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // The alternate form prints the whole chain of causes on one line.
            anstream::eprintln!("{}error:{} {error:#}", tool::style::ERROR, tool::style::RESET);
            ExitCode::from(2)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
