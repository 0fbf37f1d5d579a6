//! The `tidegate` binary: parse, dispatch, exit code.

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

mod admin;
mod api;
mod backend;
mod cli;
mod config;
mod doctor;
mod engine;
mod envoy;
mod gateway;
mod hot_keys;
mod listener;
mod logs;
mod metrics;
mod observer;
mod reload;
mod serve;
mod tls;

/// A request is many small allocations; this one serves them fastest of those compared.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let arguments = match cli::Arguments::try_parse() {
        Ok(arguments) => arguments,
        // Help and the version are no errors, and have their own form.
        Err(error) if !error.use_stderr() => error.exit(),
        // Nothing was asked for: what there is.
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
        // Who reads our output has had enough, as `head` does: no error of ours.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever the causes are.
            anstream::eprintln!("{}error:{} {error:#}", cli::style::ERROR, cli::style::RESET);
            ExitCode::from(2)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
