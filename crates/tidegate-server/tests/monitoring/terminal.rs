//! [`Terminal`]: `tidegate top` in a pseudo terminal, of which it is the session leader.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::support::TEST_TIMEOUT;

pub(crate) const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
pub(crate) const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

pub(crate) struct Terminal {
    keyboard: File,
    device: OwnedFd,
    output: Arc<Mutex<Vec<u8>>>,
    process: Child,
    /// Settings before the start.
    modes: LocalModes,
}

impl Terminal {
    pub(crate) fn start(columns: u16, rows: u16, arguments: &[&str]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo terminal");
        grantpt(&master).expect("ours");
        unlockpt(&master).expect("ours");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let device = open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("opened");
        resize(&device, columns, rows);
        let modes = tcgetattr(&device).expect("a terminal").local_modes;
        let stream = || device.try_clone().expect("a descriptor");
        // Only the terminal of a session sends signals for Ctrl-C.
        let process = Command::new("setsid")
            .args(["--ctty", env!("CARGO_BIN_EXE_tidegate"), "top"])
            .args(arguments)
            .env_clear()
            .envs([("TERM", "xterm-256color"), ("PATH", "/usr/bin:/bin")])
            .stdin(stream())
            .stdout(stream())
            .stderr(stream())
            .spawn()
            .expect("setsid of util-linux");
        let keyboard = File::from(master);
        let output = Arc::new(Mutex::new(Vec::new()));
        let mut reader = keyboard.try_clone().expect("a descriptor");
        let collected = Arc::clone(&output);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                collected.lock().expect("no panic").extend_from_slice(&buffer[..length]);
            }
        });
        Self { keyboard, device, output, process, modes }
    }

    pub(crate) fn resize(&self, columns: u16, rows: u16) {
        resize(&self.device, columns, rows);
    }

    pub(crate) fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("the terminal is open");
    }

    /// Returns everything that was written.
    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&self.output.lock().expect("no panic")).into_owned()
    }

    /// Returns the lines of the last complete frame, without colours.
    pub(crate) fn screen(&self) -> Vec<String> {
        let output = self.output();
        let Some((frames, _)) = output.rsplit_once("\x1b[J") else { return Vec::new() };
        let frame = frames.rsplit("\x1b[H").next().unwrap_or_default();
        // The terminal has added a carriage return to each line break.
        let lines = without_escapes(frame);
        lines.split('\n').map(|line| line.trim_end_matches('\r').to_owned()).collect()
    }

    /// Waits until the screen fulfils a condition, and returns its lines.
    pub(crate) fn wait_for(&self, what: &str, fulfils: impl Fn(&str) -> bool) -> Vec<String> {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let lines = self.screen();
            if fulfils(&lines.join("\n")) {
                return lines;
            }
            assert!(Instant::now() < deadline, "timeout: {what}\n{}", lines.join("\n"));
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Waits for the exit, and checks that the terminal is as before.
    pub(crate) fn wait_for_exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TEST_TIMEOUT;
        let status = loop {
            if let Some(status) = self.process.try_wait().expect("our own child") {
                break status;
            }
            assert!(Instant::now() < deadline, "no exit\n{}", self.output());
            std::thread::sleep(std::time::Duration::from_millis(20));
        };
        assert_eq!(tcgetattr(&self.device).expect("a terminal").local_modes, self.modes);
        while !self.output().ends_with(LEAVE) {
            assert!(Instant::now() < deadline, "{:?}", self.output());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        status
    }

    /// Asserts that the output has no control character except our own escapes.
    pub(crate) fn assert_harmless(&self) {
        let output = self.output().replace(ENTER, "").replace(LEAVE, "");
        let left = without_escapes(&output).replace(['\r', '\n'], "");
        let hostile: Vec<char> = left.chars().filter(|c| c.is_control()).collect();
        assert!(hostile.is_empty(), "{hostile:?} in {left:?}");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn resize(terminal: &OwnedFd, columns: u16, rows: u16) {
    let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).expect("a terminal");
}

/// Removes colours, cursor positions and deletions: `ESC [ digits letter`.
fn without_escapes(text: &str) -> String {
    let mut parts = text.split("\x1b[");
    let mut output = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
        match rest.strip_prefix(['m', 'H', 'J', 'K']) {
            Some(rest) => output.push_str(rest),
            None => output.extend(["\x1b[", part]),
        }
    }
    output
}
