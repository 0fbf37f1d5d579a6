//! Entry point of the `tidegate` binary: argument parsing, dispatch and exit code.

use std::process::ExitCode;

use clap::error::ErrorKind;
use tidegate_tools::tool::style;

mod cli;

/// Fastest of the allocators that were benchmarked: a request makes many small allocations.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tidegate_service::logs::panics::install_hook();
    let (parsed, variables) = cli::Program::parse();
    let program = match parsed {
        Ok(program) => program,
        // `--help` and `--version` are reported as errors by clap, but print to stdout.
        Err(error) if !error.use_stderr() => error.exit(),
        // Without a subcommand, the help text explains more than one error line.
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            return ExitCode::from(2);
        }
        Err(error) => {
            anstream::eprintln!("{}", variables.explain(cli::one_line(&error)));
            return ExitCode::from(2);
        }
    };
    match program.run() {
        Ok(code) => code,
        // A closed pipe (`… | head`) is not an error.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // The alternate form prints the whole chain of causes on one line.
            let message = variables.explain(format!("{error:#}"));
            anstream::eprintln!("{}error:{} {message}", style::ERROR, style::RESET);
            ExitCode::from(2)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
