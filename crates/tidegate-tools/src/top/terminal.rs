//! [`Screen`]: the terminal while the view is shown, and its state before.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use anyhow::bail;
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use tokio::sync::mpsc;

use super::draw::Size;
use super::line::ScreenLine;

/// Alternate screen, no cursor, no line wrap.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &[u8] = b"\x1b[?7h\x1b[?25h\x1b[?1049l";
const FALLBACK_SIZE: Size = Size { columns: 80, rows: 24 };

/// Terminal to restore, while the view is shown.
static SHOWN: Mutex<Option<Shown>> = Mutex::new(None);

struct Shown {
    input: OwnedFd,
    /// Settings of the input from before. `None` if it is not a terminal.
    settings: Option<Termios>,
    output: File,
}

/// Terminal that shows the view. Its state is restored on drop, and on a panic.
pub(super) struct Screen {
    has_colours: bool,
}

/// Key that the user pressed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum KeyPress {
    Character(char),
    Enter,
    Backspace,
    Escape,
    /// Ctrl-U: deletes the line.
    Clear,
    /// Ctrl-C of a terminal that sends no signal for it.
    Interrupt,
}

impl Screen {
    pub(super) fn enter() -> io::Result<Self> {
        let input = io::stdin().as_fd().try_clone_to_owned()?;
        let output = io::stdout().as_fd().try_clone_to_owned()?;
        Self::enter_on(input, output.into())
    }

    fn enter_on(input: OwnedFd, mut output: File) -> io::Result<Self> {
        restore_on_panic();
        let settings = tcgetattr(&input).ok();
        if let Some(mut settings) = settings.clone() {
            // Keys arrive one by one. Ctrl-C still sends its signal; Ctrl-Z would leave the shell
            // with our screen.
            settings.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
            settings.special_codes[SpecialCodeIndex::VSUSP] = 0;
            settings.special_codes[SpecialCodeIndex::VMIN] = 1;
            settings.special_codes[SpecialCodeIndex::VTIME] = 0;
            tcsetattr(&input, OptionalActions::Now, &settings)?;
        }
        let entered = output.write_all(ENTER);
        *shown() = Some(Shown { input, settings, output });
        let screen = Self { has_colours: has_colours() };
        entered.map(|()| screen)
    }

    pub(super) fn size() -> Size {
        let size =
            tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0);
        size.map_or(FALLBACK_SIZE, |size| Size {
            columns: usize::from(size.ws_col),
            rows: usize::from(size.ws_row),
        })
    }

    /// Draws the lines over the earlier ones.
    pub(super) fn draw(&self, lines: &[ScreenLine], size: Size) -> anyhow::Result<()> {
        let mut frame = "\x1b[H".to_owned();
        for (index, line) in lines.iter().take(size.rows).enumerate() {
            if index > 0 {
                frame.push_str("\r\n");
            }
            line.write(&mut frame, size.columns, self.has_colours);
            frame.push_str("\x1b[K");
        }
        frame.push_str("\x1b[J");
        match &mut *shown() {
            Some(shown) => shown.output.write_all(frame.as_bytes())?,
            // A panic of another task has restored the terminal.
            None => bail!("the view ended after a panic"),
        }
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn shown() -> MutexGuard<'static, Option<Shown>> {
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Restores the terminal, unless it was restored before.
fn restore() {
    let Some(mut shown) = shown().take() else { return };
    let _ = shown.output.write_all(LEAVE);
    if let Some(settings) = shown.settings {
        let _ = tcsetattr(&shown.input, OptionalActions::Now, &settings);
    }
}

/// Restores the terminal before a panic is reported, so that the report can be read.
fn restore_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            hook(panic);
        }));
    });
}

/// Returns whether the output is a terminal that can draw.
pub(super) fn can_draw() -> bool {
    io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

fn has_colours() -> bool {
    anstream::AutoStream::choice(&io::stdout()) != anstream::ColorChoice::Never
}

/// Starts a thread that reads keys. It ends with the process, because a read cannot be cancelled.
pub(super) fn read_keys() -> mpsc::Receiver<KeyPress> {
    let (sender, receiver) = mpsc::channel(64);
    std::thread::spawn(move || {
        let mut buffer = [0; 1024];
        while let Ok(length @ 1..) = io::stdin().lock().read(&mut buffer) {
            for key in keys(&buffer[..length]) {
                if sender.blocking_send(key).is_err() {
                    return;
                }
            }
        }
    });
    receiver
}

/// Decodes the bytes of one read. The bytes of an arrow or a function key, which start with an
/// escape, arrive together and are ignored.
fn keys(bytes: &[u8]) -> Vec<KeyPress> {
    if bytes.len() > 1 && bytes[0] == 0x1b {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(bytes);
    let key = |character: char| match character {
        '\x03' => Some(KeyPress::Interrupt),
        '\r' | '\n' => Some(KeyPress::Enter),
        '\x08' | '\x7f' => Some(KeyPress::Backspace),
        '\x15' => Some(KeyPress::Clear),
        '\x1b' => Some(KeyPress::Escape),
        _ if character.is_control() => None,
        _ => Some(KeyPress::Character(character)),
    };
    text.chars().filter_map(key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_decoded() {
        let typed = |bytes: &[u8]| keys(bytes);
        assert_eq!(typed(b"q"), [KeyPress::Character('q')]);
        assert_eq!(typed("é\r".as_bytes()), [KeyPress::Character('é'), KeyPress::Enter]);
        assert_eq!(typed(b"\x1b"), [KeyPress::Escape]);
        assert_eq!(typed(b"\x1b[A"), [], "an arrow is not the key Escape");
        assert_eq!(
            typed(b"\x7f\x15\x03"),
            [KeyPress::Backspace, KeyPress::Clear, KeyPress::Interrupt]
        );
        assert_eq!(typed(b"\x00\x01\t"), []);
    }

    /// Returns both sides of a pseudo terminal.
    fn pseudo_terminal() -> (File, OwnedFd) {
        use rustix::fs::{Mode, OFlags, open};
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo terminal");
        grantpt(&master).expect("ours");
        unlockpt(&master).expect("ours");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let terminal = open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("opened");
        (master.into(), terminal)
    }

    #[test]
    fn panic_restores_the_terminal() {
        let (mut master, terminal) = pseudo_terminal();
        let before = tcgetattr(&terminal).expect("a terminal").local_modes;
        let panicked = std::panic::catch_unwind(|| {
            let input = terminal.try_clone().expect("a descriptor");
            let output = terminal.try_clone().expect("a descriptor");
            let _screen = Screen::enter_on(input, output.into()).expect("entered");
            let inside = tcgetattr(&terminal).expect("a terminal").local_modes;
            assert!(!inside.intersects(LocalModes::ICANON | LocalModes::ECHO));
            panic!("a defect");
        });
        let payload = panicked.expect_err("a panic");
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"a defect"));
        assert_eq!(tcgetattr(&terminal).expect("a terminal").local_modes, before);
        let codes = [ENTER, LEAVE].concat();
        let mut output = vec![0; codes.len()];
        // The terminal may pass them on one by one.
        master.read_exact(&mut output).expect("the escape codes");
        assert_eq!(output, codes);
    }
}
