//! Server processes for the duration of a suite, and tools.

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tidegate_bench::results::{Results, root};

/// A child process that is ended on drop.
pub(crate) struct Server {
    name: String,
    child: Child,
}

impl Server {
    /// Starts the server and waits until it listens on all ports.
    pub(crate) fn start(name: &str, command: &mut Command, ports: &[u16]) -> Result<Self> {
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut server = Self {
            name: name.to_owned(),
            child: child.with_context(|| format!("{name} failed to start"))?,
        };
        let deadline = Instant::now() + Duration::from_secs(15);
        for &port in ports {
            while TcpStream::connect(("127.0.0.1", port)).is_err() {
                if let Some(status) = server.child.try_wait()? {
                    bail!("{name} exited at startup: {status}");
                }
                ensure!(Instant::now() < deadline, "{name} does not listen on port {port}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(server)
    }

    /// Returns the CPU time that the process has used, in seconds.
    pub(crate) fn cpu_seconds(&self) -> Result<f64> {
        let id = self.child.id().to_string();
        cpu_seconds(&id).with_context(|| format!("{} is not running", self.name))
    }

    /// Records the resident memory of the process and of its workers, now and at most.
    pub(crate) fn record_memory(
        &self,
        case: &str,
        name: &str,
        results: &mut Results,
    ) -> Result<()> {
        let id = self.child.id();
        let workers = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        for (metric, field) in [("resident_mb", "VmRSS:"), ("peak_mb", "VmHWM:")] {
            let mut kilobytes = 0.0;
            for process in workers.split_whitespace().chain([id.to_string().as_str()]) {
                let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
                let line = status.lines().find_map(|line| line.strip_prefix(field));
                let number = line.and_then(|line| line.split_whitespace().next());
                kilobytes += number.context("a line of /proc/PID/status")?.parse::<f64>()?;
            }
            results.add(case, name, metric, kilobytes / 1024.0);
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // On SIGTERM, nginx ends its workers too. The process may have exited already.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        for _ in 0..100 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the CPU time that this process has used, in seconds.
pub(crate) fn own_cpu_seconds() -> Result<f64> {
    cpu_seconds("self")
}

fn cpu_seconds(process: &str) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name, in parentheses, may contain spaces.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = |field: usize| {
        after_name.split_whitespace().nth(field).and_then(|ticks| ticks.parse::<f64>().ok())
    };
    let (user, system) = ticks(11).zip(ticks(12)).context("a line of /proc/PID/stat")?;
    // Linux reports 100 ticks per second to user space, independent of its own timer.
    Ok((user + system) / 100.0)
}

/// Returns an unused loopback port.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Returns the path of a binary of this repository: of the profile `dist`, or of this workspace.
pub(crate) fn own_binary(name: &str) -> Result<PathBuf> {
    let beside = std::env::current_exe()?.with_file_name(name);
    // With CARGO_TARGET_DIR, both workspaces build into one folder.
    let shared = beside.with_file_name("../dist").join(name);
    let places = [root().join("target/dist").join(name), shared, beside];
    places
        .into_iter()
        .find(|path| path.exists())
        .with_context(|| format!("{name} is not built (make bench-build)"))
}

/// Returns the path of a server of another project, installed by `make bench` or by the user.
pub(crate) fn peer_binary(name: &str) -> Option<PathBuf> {
    let here = root().join("bench/target/peers/bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::iter::once(here).chain(std::env::split_paths(&path));
    folders.find_map(|folder| Some(folder.join(name)).filter(|path| path.exists()))
}

/// Runs a tool and returns its output; fails if the tool is missing or fails.
pub(crate) fn run_tool(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{name} is missing: make bench-tools"))?;
    ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
