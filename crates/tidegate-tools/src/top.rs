//! `tidegate top`: live view of a running service in a terminal.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use clap::builder::FalseyValueParser;
use serde::Deserialize as _;
use serde_json::Value;
use tidegate_config::duration;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};

use self::client::EventStream;
use self::data::{Lookup, View};
use self::events::ServerEvent;
use self::line::{DIM, PLAIN, ScreenLine};
use self::terminal::{KeyPress, Screen};
use crate::tool::{output, style};

mod client;
mod data;
mod draw;
mod events;
mod line;
mod sections;
mod terminal;
pub(crate) mod text;

pub(crate) use client::AdminClient;

/// Pause before a new attempt to connect.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);
/// Time for the first events, which the service sends at once or within a second.
const FIRST_EVENTS_TIMEOUT: Duration = Duration::from_secs(10);
const FLEET: &str = "/v1/fleet";
/// Time between two requests for the state of the fleet, which is read from Redis.
const FLEET_INTERVAL: Duration = Duration::from_secs(3);
/// Maximum length of a key to look up.
const MAX_KEY_CHARS: usize = 1_024;
/// Width of a block in a pipe.
const BLOCK_COLUMNS: usize = 160;

/// Options of the view.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct TopOptions {
    /// Time between two updates, and over which rates are averaged; 100ms to 60s
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_INTERVAL")]
    #[arg(default_value = "2s", value_parser = duration::parse)]
    pub interval: Duration,

    /// Timeout of a request
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_TIMEOUT")]
    #[arg(default_value = "5s", value_parser = duration::parse)]
    pub timeout: Duration,

    /// Print once and exit
    #[arg(long, env = "TIDEGATE_ONCE", value_parser = FalseyValueParser::new())]
    pub once: bool,

    /// Print JSON, one object per interval
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    pub json: bool,
}

impl TopOptions {
    /// Number of samples, one per second, in the interval.
    fn samples(self) -> usize {
        usize::try_from(self.interval.as_millis().div_ceil(1_000)).unwrap_or(usize::MAX)
    }
}

/// Message of a task to the view.
enum Update {
    Event(ServerEvent),
    Lost(String),
    /// Answer about all instances.
    Fleet(Value),
    /// Answer for this key.
    LookedUp(String, Result<Lookup, String>),
}

/// Shows the view until the user ends it.
pub(crate) async fn run(client: AdminClient, options: TopOptions) -> anyhow::Result<()> {
    let client = Arc::new(client);
    let mut view = View::new(client.authority());
    // An error of the first connection ends the command. Later ones are shown.
    let mut stream = client.live().await?;
    let first = timeout(FIRST_EVENTS_TIMEOUT, read_first(&mut stream, &mut view)).await;
    first.with_context(|| format!("no data within {FIRST_EVENTS_TIMEOUT:?}"))??;
    if options.once {
        // A service of an earlier release does not know its fleet.
        if let Ok(fleet) = client.get_json(FLEET).await {
            view.set_fleet(fleet);
        }
        return print(&view, options);
    }
    let (sender, updates) = mpsc::channel(64);
    tokio::spawn(follow_fleet(Arc::clone(&client), sender.clone()));
    tokio::spawn(follow(Arc::clone(&client), stream, sender.clone()));
    if options.json || !terminal::can_draw() {
        print_blocks(view, updates, options).await
    } else {
        let mode = ScreenMode::Overview;
        let session = ScreenSession { client, sender, view, options, mode, is_looking_up: false };
        session.run(updates).await
    }
}

/// Reads events until there is something of everything.
async fn read_first(stream: &mut EventStream, view: &mut View) -> anyhow::Result<()> {
    while !view.is_complete() {
        for event in stream.next().await? {
            view.apply(&event).with_context(|| format!("event {}", event.name.escape_debug()))?;
        }
    }
    Ok(())
}

/// Sends the state of the fleet from time to time.
async fn follow_fleet(client: Arc<AdminClient>, sender: mpsc::Sender<Update>) {
    loop {
        if let Ok(fleet) = client.get_json(FLEET).await
            && sender.send(Update::Fleet(fleet)).await.is_err()
        {
            return;
        }
        tokio::time::sleep(FLEET_INTERVAL).await;
    }
}

/// Sends the events of the stream, and connects again when it is lost.
async fn follow(client: Arc<AdminClient>, mut stream: EventStream, sender: mpsc::Sender<Update>) {
    loop {
        let error = loop {
            match stream.next().await {
                Ok(events) => {
                    for event in events {
                        if sender.send(Update::Event(event)).await.is_err() {
                            return;
                        }
                    }
                }
                Err(error) => break error,
            }
        };
        let mut error = format!("{error:#}");
        stream = loop {
            if sender.send(Update::Lost(error)).await.is_err() {
                return;
            }
            tokio::time::sleep(RECONNECT_INTERVAL).await;
            match client.live().await {
                Ok(stream) => break stream,
                Err(again) => error = format!("{again:#}"),
            }
        };
    }
}

/// Prints the view once.
fn print(view: &View, options: TopOptions) -> anyhow::Result<()> {
    let mut text = String::new();
    if options.json {
        text = text::printable_json(&view.to_json(options.samples()).to_string());
        text.push('\n');
    } else {
        for line in draw::block(view, options.samples(), BLOCK_COLUMNS) {
            line.write(&mut text, usize::MAX, true);
            text.push('\n');
        }
        if !options.once {
            text.push('\n');
        }
    }
    // Removes the colours if the output is not a terminal.
    let mut output = anstream::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()?;
    Ok(())
}

/// Prints the answer of a look-up.
pub(crate) fn print_lookup(body: &Value, json: Option<String>) -> anyhow::Result<()> {
    let lookup = Lookup::deserialize(body).context("not an answer of Tidegate")?;
    output::print(json, |output| {
        for line in sections::looked_up(&lookup, BLOCK_COLUMNS) {
            let mut text = String::new();
            line.write(&mut text, usize::MAX, true);
            writeln!(output, "{text}")?;
        }
        Ok(())
    })?;
    Ok(())
}

/// Prints a block per interval, for a pipe.
async fn print_blocks(
    mut view: View,
    mut updates: mpsc::Receiver<Update>,
    options: TopOptions,
) -> anyhow::Result<()> {
    let mut ticks = interval(options.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut interrupt = std::pin::pin!(tokio::signal::ctrl_c());
    loop {
        tokio::select! {
            _ = &mut interrupt => return Ok(()),
            _ = ticks.tick() => {
                if view.lost.is_none() {
                    print(&view, options)?;
                }
            }
            update = updates.recv() => match update {
                Some(Update::Event(event)) => view.apply(&event)?,
                Some(Update::Lost(error)) => {
                    if view.lost.is_none() {
                        let _ = writeln!(std::io::stderr(), "connection lost, retrying: {error}");
                    }
                    view.lost = Some(error);
                }
                Some(Update::Fleet(fleet)) => view.set_fleet(fleet),
                Some(Update::LookedUp(..)) => {}
                None => bail!("the connection ended"),
            },
        }
    }
}

/// Part of the screen below the status.
enum ScreenMode {
    Overview,
    /// The user types a key.
    Prompt(String),
    /// The state of this key, once the service has answered. It is asked again per interval.
    Key(String, Option<Result<Lookup, String>>),
}

/// View in a terminal.
struct ScreenSession {
    client: Arc<AdminClient>,
    sender: mpsc::Sender<Update>,
    view: View,
    options: TopOptions,
    mode: ScreenMode,
    /// Whether a request for a key has no answer yet.
    is_looking_up: bool,
}

impl ScreenSession {
    async fn run(mut self, mut updates: mpsc::Receiver<Update>) -> anyhow::Result<()> {
        use tokio::signal::unix::{SignalKind, signal};
        let mut resized = signal(SignalKind::window_change())?;
        let mut terminated = signal(SignalKind::terminate())?;
        let mut interrupted = signal(SignalKind::interrupt())?;
        let mut keys = terminal::read_keys();
        let mut has_keys = true;
        let mut ticks = interval(self.options.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let screen = Screen::enter()?;
        loop {
            let is_due = tokio::select! {
                _ = interrupted.recv() => return Ok(()),
                _ = terminated.recv() => return Ok(()),
                _ = resized.recv() => true,
                _ = ticks.tick() => {
                    self.look_up();
                    true
                }
                key = keys.recv(), if has_keys => match key {
                    Some(KeyPress::Interrupt) => return Ok(()),
                    Some(KeyPress::Character('q' | 'Q')) if !self.is_typing() => return Ok(()),
                    Some(key) => {
                        self.press(key);
                        true
                    }
                    None => {
                        has_keys = false;
                        false
                    }
                },
                update = updates.recv() => match update {
                    Some(update) => self.update(update)?,
                    None => bail!("the connection ended"),
                },
            };
            if is_due {
                let size = Screen::size();
                screen.draw(&self.lines(size), size)?;
            }
        }
    }

    fn is_typing(&self) -> bool {
        matches!(self.mode, ScreenMode::Prompt(_))
    }

    /// Applies an update. Returns whether it must be shown at once.
    fn update(&mut self, update: Update) -> anyhow::Result<bool> {
        match update {
            Update::Event(event) => {
                let was_lost = self.view.lost.is_some();
                self.view.apply(&event)?;
                Ok(was_lost)
            }
            Update::Lost(error) => {
                self.view.lost = Some(error);
                Ok(true)
            }
            Update::Fleet(fleet) => {
                self.view.set_fleet(fleet);
                Ok(false)
            }
            Update::LookedUp(key, result) => {
                self.is_looking_up = false;
                match &mut self.mode {
                    ScreenMode::Key(shown, answer) if *shown == key => *answer = Some(result),
                    // The user has typed another key meanwhile.
                    ScreenMode::Key(..) => self.look_up(),
                    ScreenMode::Overview | ScreenMode::Prompt(_) => {}
                }
                Ok(true)
            }
        }
    }

    fn press(&mut self, key: KeyPress) {
        match (&mut self.mode, key) {
            (ScreenMode::Prompt(text), KeyPress::Character(character))
                if text.chars().count() < MAX_KEY_CHARS =>
            {
                text.push(character);
            }
            (ScreenMode::Prompt(_), KeyPress::Character(_)) => {}
            (ScreenMode::Prompt(text), KeyPress::Backspace) => {
                text.pop();
            }
            (ScreenMode::Prompt(text), KeyPress::Clear) => text.clear(),
            (ScreenMode::Prompt(text), KeyPress::Enter) if !text.is_empty() => {
                self.mode = ScreenMode::Key(std::mem::take(text), None);
                self.look_up();
            }
            (_, KeyPress::Escape | KeyPress::Enter) => self.mode = ScreenMode::Overview,
            (_, KeyPress::Character('/' | 'k')) => self.mode = ScreenMode::Prompt(String::new()),
            _ => {}
        }
    }

    /// Asks for the key that is shown, unless a request is in flight.
    fn look_up(&mut self) {
        let ScreenMode::Key(key, _) = &self.mode else { return };
        if std::mem::replace(&mut self.is_looking_up, true) {
            return;
        }
        let (client, sender, key) = (Arc::clone(&self.client), self.sender.clone(), key.clone());
        tokio::spawn(async move {
            let result = client.lookup(&key).await.map_err(|error| format!("{error:#}"));
            let _ = sender.send(Update::LookedUp(key, result)).await;
        });
    }

    fn lines(&self, size: draw::Size) -> Vec<ScreenLine> {
        let body = match &self.mode {
            ScreenMode::Overview | ScreenMode::Prompt(_) => None,
            ScreenMode::Key(key, None) => {
                Some(vec![ScreenLine::labelled("key ").with(style::NOTE, key).with(DIM, "  …")])
            }
            ScreenMode::Key(_, Some(Ok(lookup))) => Some(sections::looked_up(lookup, size.columns)),
            ScreenMode::Key(key, Some(Err(error))) => Some(vec![
                ScreenLine::labelled("key ").with(style::NOTE, key),
                ScreenLine::default().with(style::ERROR, error),
            ]),
        };
        let footer = match &self.mode {
            ScreenMode::Overview => ScreenLine::default().with(DIM, "q quit   / look up a key"),
            ScreenMode::Prompt(text) => {
                // The end of a long key is what the user types.
                let room = size.columns.saturating_sub(8);
                let start = text.chars().count().saturating_sub(room);
                let end: String = text.chars().skip(start).collect();
                ScreenLine::labelled("key: ").with(PLAIN, &end).with(style::NOTE, "_")
            }
            ScreenMode::Key(..) => {
                ScreenLine::default().with(DIM, "q quit   / look up a key   Esc back")
            }
        };
        draw::screen(&self.view, self.options.samples(), size, body.as_deref(), footer)
    }
}
