//! `tidegate completions` and `tidegate man`: files for shells and for man, made from the flags.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use super::CommandLine;

/// Print the completions of a shell
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tidegate completions bash > /etc/bash_completion.d/tidegate
  tidegate completions zsh > /usr/local/share/zsh/site-functions/_tidegate
  tidegate completions fish > ~/.config/fish/completions/tidegate.fish")]
pub(super) struct CompletionsCommand {
    /// Shell that reads the completions
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Print the manual page, or write those of all commands into a folder
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tidegate man | man -l -
  tidegate man --out /usr/local/share/man/man1")]
pub(super) struct ManCommand {
    /// Folder for one page per command
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl CompletionsCommand {
    pub(super) fn run(&self) -> anyhow::Result<ExitCode> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut CommandLine::command(), "tidegate", &mut script);
        std::io::stdout().write_all(&script)?;
        Ok(ExitCode::SUCCESS)
    }
}

impl ManCommand {
    pub(super) fn run(&self) -> anyhow::Result<ExitCode> {
        let command = CommandLine::command();
        match &self.out {
            Some(folder) => {
                std::fs::create_dir_all(folder)
                    .and_then(|()| clap_mangen::generate_to(command, folder))
                    .with_context(|| folder.display().to_string())?;
            }
            None => {
                let mut page = Vec::new();
                clap_mangen::Man::new(command).render(&mut page)?;
                std::io::stdout().write_all(&page)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
