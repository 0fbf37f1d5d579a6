//! Runs the steps of a page in a shell, as a reader would: in an empty folder, in a network of its
//! own, so that the ports of the pages are free.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::page::{Action, Step, matches};
use crate::root;

/// Folders of the repository that the commands of pages use.
const FOLDERS: [&str; 3] = ["crates", "deploy", "docs"];

/// Functions for the script: a service is started in place of the one that ran before it, and is
/// ready when it answers.
const FUNCTIONS: &str = r#"
declare -A running
start() {
  local step=$1 program=$2 url=$3
  if [ -n "${running[$program]:-}" ]; then
    kill "${running[$program]}" && wait "${running[$program]}"
  fi
  bash "$steps/$step.sh" > "$steps/$step.out" 2>&1 < /dev/null &
  running[$program]=$!
  for try in $(seq 400); do
    if curl -s -o "$steps/probe" --max-time 1 "$url" < /dev/null || [ $? = 28 ]; then
      echo 0 > "$steps/$step.status"
      return
    fi
    sleep 0.05
  done
  echo "not ready at $url" >> "$steps/$step.out"
  echo 1 > "$steps/$step.status"
}
run() {
  . "$steps/$1.sh" > "$steps/$1.out" 2>&1 < /dev/null
  echo $? > "$steps/$1.status"
}
ip link set lo up
"#;

/// Runs the steps, and returns a description of each that failed.
pub(crate) fn run(steps: &[Step]) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (work, scripts) = (folder.path().join("work"), folder.path().join("steps"));
    for path in [&work, &scripts] {
        std::fs::create_dir(path).expect("a folder");
    }
    for name in FOLDERS {
        std::os::unix::fs::symlink(root().join(name), work.join(name)).expect("a link");
    }
    let mut script = format!("steps={}\n{FUNCTIONS}\n", scripts.display());
    for (number, Step { action, .. }) in steps.iter().enumerate() {
        let path = scripts.join(format!("{number}.sh"));
        match action {
            // The file is written when its turn comes, because a page may show it twice.
            Action::File { name, text } => {
                std::fs::write(scripts.join(format!("{number}.file")), text).expect("written");
                std::fs::write(path, format!("cp \"$steps/{number}.file\" {name}\n"))
                    .expect("written");
                let _ = writeln!(script, "run {number}");
            }
            Action::Service { command, ready } => {
                std::fs::write(path, format!("exec {command}\n")).expect("written");
                let program = command.split(' ').next().unwrap_or_default();
                let _ = writeln!(script, "start {number} {program} {ready}");
            }
            Action::Run { command, .. } => {
                std::fs::write(path, format!("{command}\n")).expect("written");
                let _ = writeln!(script, "run {number}");
            }
        }
    }
    let errors = run_script(&script, &work);
    let failure = |(number, step): (usize, &Step)| {
        failure(step, &scripts, number).map(|text| format!("{}: {text}", step.line))
    };
    let mut failures: Vec<String> = steps.iter().enumerate().filter_map(failure).collect();
    if !failures.is_empty() && !errors.is_empty() {
        failures.push(format!("0: the shell: {errors}"));
    }
    failures
}

/// Runs a script in namespaces of its own, whose processes end with it. Returns its errors.
fn run_script(script: &str, folder: &Path) -> String {
    let binary = Path::new(env!("CARGO_BIN_EXE_tidegate")).parent().expect("a folder");
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{}:{path}", binary.display(), root().join(".venv/bin").display());
    let output = Command::new("timeout")
        .args(["60", "unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"])
        .args(["bash", "-c", script])
        .current_dir(folder)
        .env_clear()
        .env("PATH", path)
        .env("HOME", folder)
        .stdin(Stdio::null())
        .output()
        .expect("timeout and unshare: coreutils and util-linux");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns what is wrong with a step, if anything.
fn failure(step: &Step, scripts: &Path, number: usize) -> Option<String> {
    let read = |kind: &str| {
        std::fs::read(scripts.join(format!("{number}.{kind}")))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    };
    let found = read("out").unwrap_or_default();
    let Ok(status) = read("status") else {
        return Some(format!("not run, in 60 seconds (needs user namespaces): {found}"));
    };
    match &step.action {
        // The exit code of a command that prints a denial is not 0.
        Action::Run { command, output: Some(expected) } => (!matches(expected, &found))
            .then(|| format!("{command}\nexpected:\n{expected}\nfound:\n{found}")),
        Action::Run { command, output: None } | Action::Service { command, .. } => {
            (status.trim() != "0").then(|| format!("{command}\nexit code {status}{found}"))
        }
        Action::File { name, .. } => (status.trim() != "0").then(|| format!("{name}: {found}")),
    }
}
