//! Servers that run while they are measured, and end with us.

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tidegate_bench::results::root;

/// A child process that is ended when it is dropped.
pub(crate) struct Server {
    name: String,
    child: Child,
}

impl Server {
    /// Starts it, and waits until it listens on all these ports.
    pub(crate) fn start(name: &str, command: &mut Command, ports: &[u16]) -> Result<Self> {
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut server = Self {
            name: name.to_owned(),
            child: child.with_context(|| format!("{name} does not start"))?,
        };
        let deadline = Instant::now() + Duration::from_secs(15);
        for &port in ports {
            while TcpStream::connect(("127.0.0.1", port)).is_err() {
                if let Some(status) = server.child.try_wait()? {
                    bail!("{name} ended at once: {status}");
                }
                ensure!(Instant::now() < deadline, "{name} does not listen on port {port}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(server)
    }

    /// The processor time that it has taken so far, in seconds.
    pub(crate) fn processor_time(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))
            .with_context(|| format!("{} has gone", self.name))?;
        // The name, in brackets, may hold spaces.
        let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let ticks = |field: usize| {
            after_name.split_whitespace().nth(field).and_then(|ticks| ticks.parse::<f64>().ok())
        };
        let (user, system) = ticks(11).zip(ticks(12)).context("a line of /proc/PID/stat")?;
        // Linux shows a hundred ticks a second to every program, whatever it uses itself.
        Ok((user + system) / 100.0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port on the loopback that nobody uses.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// One of our own binaries, as built for release.
pub(crate) fn our_binary(name: &str) -> Result<PathBuf> {
    let beside = std::env::current_exe()?.with_file_name(name);
    let places = [beside, root().join("target/release").join(name)];
    places
        .into_iter()
        .find(|path| path.exists())
        .with_context(|| format!("{name} is not built: see the Makefile"))
}

/// A peer's server, where `make bench` or the user has installed it; `None` if nobody has.
pub(crate) fn peer_binary(name: &str) -> Option<PathBuf> {
    let here = root().join("bench/target/peers/bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::iter::once(here).chain(std::env::split_paths(&path));
    folders.find_map(|folder| Some(folder.join(name)).filter(|path| path.exists()))
}

/// Runs a tool to its end; an error if it is missing or fails.
pub(crate) fn output_of(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{name} is missing: make bench-tools"))?;
    ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
