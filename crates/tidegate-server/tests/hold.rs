//! `tidegate hold` as a process, on a real Redis.

#[path = "../../tidegate/tests/support/server.rs"]
mod server;

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use server::Redis;

/// Deadline of everything that another process does.
const DEADLINE: Duration = Duration::from_secs(60);
/// Exit code of a denial, which no command of these tests has.
const CONFLICT: &str = "75";

fn tidegate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("hold").args(arguments).stdin(Stdio::null()).env_clear();
    command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command
}

/// Returns the command with these flags, on a limit of 1 of the key `job`.
fn hold(redis: &Redis, flags: &[&str], command: &[&str]) -> Command {
    let url = redis.url();
    let own = ["job", "--limit", "1", "--conflict-exit-code", CONFLICT, "--redis", &url];
    let timeout: &[&str] = if flags.contains(&"--timeout") { &[] } else { &["--timeout", "5s"] };
    tidegate(&[&own[..], timeout, flags, &["--"], command].concat())
}

fn run(redis: &Redis, flags: &[&str], command: &[&str]) -> Output {
    hold(redis, flags, command).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// A holder whose command has printed its process id.
struct Holder {
    process: Child,
    command: String,
}

impl Holder {
    /// Starts a shell script within a permit, and waits until it has printed its process id.
    fn start(redis: &Redis, flags: &[&str], script: &str) -> Self {
        let mut command = hold(redis, flags, &["sh", "-c", script]);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().expect("the binary runs");
        let mut line = String::new();
        let output = process.stdout.as_mut().expect("piped");
        BufReader::new(output).read_line(&mut line).expect("the id of the command");
        Self { process, command: line.trim().to_owned() }
    }

    fn signal(&self, name: &str) {
        send(name, &self.process.id().to_string());
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.process.try_wait().expect("our own child") {
                return status;
            }
            assert!(Instant::now() < deadline, "the holder does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        send("KILL", &self.command);
    }
}

/// Sends a signal to a process, which may have ended.
fn send(name: &str, id: &str) {
    let kill = Command::new("kill").args([&format!("-{name}"), id]).stderr(Stdio::null()).status();
    kill.expect("kill runs");
}

/// A command that runs until it gets a signal.
const FOREVER: &str = "echo $$; exec sleep 1000";

#[test]
fn exit_code_is_that_of_the_command() {
    let redis = Redis::start();
    let output = run(&redis, &[], &["sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!((text(&output.stdout), text(&output.stderr)), ("out\n".into(), "err\n".into()));
    let killed = run(&redis, &[], &["sh", "-c", "kill -KILL $$"]);
    assert_eq!(killed.status.code(), Some(128 + 9));
    let missing = run(&redis, &[], &["/no/such/command"]);
    assert_eq!(missing.status.code(), Some(127));
    assert!(text(&missing.stderr).starts_with("error: /no/such/command: No such file"));
    let folder = run(&redis, &[], &["/"]);
    assert_eq!(folder.status.code(), Some(126), "{folder:?}");
    // Each has released the unit.
    assert_eq!(run(&redis, &[], &["true"]).status.code(), Some(0));
    redis.assert_every_key_expires();
}

#[test]
fn second_holder_waits_for_the_first() {
    let redis = Redis::start();
    let mut first = Holder::start(&redis, &[], FOREVER);
    let denied = run(&redis, &[], &["echo", "not run"]);
    assert_eq!((denied.status.code(), text(&denied.stdout)), (Some(75), String::new()));
    let message = text(&denied.stderr);
    assert!(message.starts_with("denied   1 of 1 in flight, free in "), "{message}");
    let own_default = tidegate(&["job", "--limit", "1", "--redis", &redis.url(), "--", "true"])
        .output()
        .expect("the binary runs");
    assert_eq!(own_default.status.code(), Some(1), "the default of a conflict");
    assert_eq!(run(&redis, &["--wait", "300ms"], &["true"]).status.code(), Some(75));
    let other =
        tidegate(&["other", "--limit", "1", "--redis", &redis.url(), "--", "true"]).status();
    assert_eq!(other.expect("the binary runs").code(), Some(0), "another key");
    let waiting = hold(&redis, &["--wait", "10m"], &["echo", "run"]).stdout(Stdio::piped()).spawn();
    let waiting = waiting.expect("the binary runs");
    first.signal("TERM");
    assert_eq!(first.wait().code(), Some(128 + 15), "the signal has ended the command");
    let second = waiting.wait_with_output().expect("it ends");
    assert_eq!((second.status.code(), text(&second.stdout)), (Some(0), "run\n".to_owned()));
}

#[test]
fn signals_are_passed_to_the_command() {
    let redis = Redis::start();
    for (signal, code) in [("INT", 3), ("TERM", 4), ("HUP", 5), ("QUIT", 6)] {
        // Not `wait`, which a shell without job control does not interrupt.
        let script = format!("trap 'exit {code}' {signal}; echo $$; while :; do sleep 0.05; done");
        let mut holder = Holder::start(&redis, &[], &script);
        holder.signal(signal);
        assert_eq!(holder.wait().code(), Some(code), "{signal}");
        assert_eq!(run(&redis, &[], &["true"]).status.code(), Some(0), "{signal}: released");
    }
}

#[test]
fn slot_of_a_killed_holder_is_free_after_its_lease() {
    let redis = Redis::start();
    let mut holder = Holder::start(&redis, &["--ttl", "15s"], FOREVER);
    holder.signal("KILL");
    holder.wait();
    let killed_at = Instant::now();
    let denied = run(&redis, &[], &["true"]);
    // Unless this machine stood still for most of the lease.
    if killed_at.elapsed() < Duration::from_secs(10) {
        assert_eq!(denied.status.code(), Some(75), "the lease of a killed holder goes on");
    }
    let next = run(&redis, &["--wait", "1m"], &["true"]);
    assert_eq!(next.status.code(), Some(0), "{}", text(&next.stderr));
    redis.assert_every_key_expires();
}

#[test]
fn permit_is_renewed_while_the_command_runs() {
    let redis = Redis::start();
    let _holder = Holder::start(&redis, &["--ttl", "5s"], FOREVER);
    // Longer than the lease.
    let denied = run(&redis, &["--wait", "7s"], &["true"]);
    assert_eq!(denied.status.code(), Some(75), "{}", text(&denied.stderr));
}

#[test]
fn lost_permit_is_a_warning() {
    let redis = Redis::start();
    let mut holder = Holder::start(&redis, &["--ttl", "5s"], FOREVER);
    redis.signal("STOP");
    let mut lines = BufReader::new(holder.process.stderr.take().expect("piped")).lines();
    let warning = lines.next().expect("a warning").expect("text");
    assert!(warning.starts_with("warning: the units are lost, because"), "{warning}");
    redis.signal("CONT");
    holder.signal("TERM");
    assert_eq!(holder.wait().code(), Some(128 + 15), "the command ran on");
}

#[test]
fn units_are_still_held_after_a_lost_answer() {
    let redis = Redis::start();
    let mut holder = Holder::start(&redis, &["--ttl", "15s", "--timeout", "1s"], FOREVER);
    redis.signal("STOP");
    let mut lines = BufReader::new(holder.process.stderr.take().expect("piped")).lines();
    let warning = lines.next().expect("a warning").expect("text");
    assert!(warning.starts_with("warning: a renewal was not answered"), "{warning}");
    redis.signal("CONT");
    // Longer than the lease, and than what was left of it.
    let denied = run(&redis, &["--wait", "16s"], &["true"]);
    assert_eq!(denied.status.code(), Some(75), "{}", text(&denied.stderr));
    holder.signal("TERM");
    assert_eq!(holder.wait().code(), Some(128 + 15));
    let more: Vec<String> = lines.map(|line| line.expect("text")).collect();
    assert_eq!(more, [] as [String; 0], "no other warning");
}

#[test]
fn lost_answer_is_no_error_while_there_is_time_to_wait() {
    let redis = Redis::start();
    redis.pause_writes();
    let flags = ["--wait", "10m", "--timeout", "200ms"];
    let mut command = hold(&redis, &flags, &["echo", "run"]);
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut waiting = command.spawn().expect("the binary runs");
    let mut lines = BufReader::new(waiting.stderr.take().expect("piped")).lines();
    let warning = lines.next().expect("a warning").expect("text");
    assert!(warning.starts_with("warning: ") && warning.ends_with("trying again"), "{warning}");
    redis.resume_writes();
    let mut output = String::new();
    waiting.stdout.take().expect("piped").read_to_string(&mut output).expect("text");
    assert_eq!(output, "run\n");
    assert_eq!(waiting.wait().expect("it ends").code(), Some(0));
    redis.assert_every_key_expires();
}

#[test]
fn errors_say_what_would_be_right() {
    let redis = Redis::start();
    let url = redis.url();
    for (arguments, message) in [
        (&["job", "--limit", "1", "--", "true"][..], "--redis URL is missing: without it, counts"),
        (&["job", "--limit", "1", "--redis", &url], "<COMMAND>"),
        (&["job", "--redis", &url, "--", "true"], "--limit <N>"),
        (&["job", "--limit", "0", "--redis", &url, "--", "true"], "from 1 to"),
        (
            &["job", "--limit", "2", "--cost", "3", "--redis", &url, "--", "true"],
            "cost 3 can never be admitted",
        ),
        (
            &["job", "--limit", "1", "--ttl", "4s", "--redis", &url, "--", "true"],
            "a lease is from 5s to 1d",
        ),
        (&["job", "--limit", "1", "--redis", "redis://127.0.0.1:1", "--", "true"], "--redis"),
        (&["", "--limit", "1", "--redis", &url, "--", "true"], "the key is empty"),
    ] {
        let output = tidegate(arguments).output().expect("the binary runs");
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.starts_with("error:") && error.contains(message), "{arguments:?}: {error}");
    }
}
