//! Steps of a page: the files, commands and services that it shows.
//!
//! A `sh` block is run, and must succeed. A command of a `console` block (after `$ `) must print
//! the lines below it. A block below a line that ends with a file name, such as "`app.py`:", is
//! that file. A comment `<!-- not run: reason -->` above a block exempts it.

/// Part of a page that a reader would do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Line of the page.
    pub(crate) line: usize,
    pub(crate) action: Action,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Writes a file.
    File { name: String, text: String },
    /// Starts a program that keeps running, and waits until it answers at a URL.
    Service { command: String, ready: &'static str },
    /// Runs commands; the output is compared if there is any to compare.
    Run { command: String, output: Option<String> },
}

/// Programs that keep running: the start of the command, and the URL at which they answer.
const SERVICES: [(&str, &str); 7] = [
    ("tidegate serve", "http://127.0.0.1:8082/readyz"),
    ("tidegate gateway", "http://127.0.0.1:8082/readyz"),
    ("python3 app.py", "http://127.0.0.1:3000/"),
    ("python3 -m http.server 3000", "http://127.0.0.1:3000/"),
    ("redis-server", "telnet://127.0.0.1:6379"),
    ("envoy", "telnet://127.0.0.1:8000"),
    ("caddy", "telnet://127.0.0.1:8000"),
];

/// Returns the steps of a page. The binary that was just built takes the place of `cargo run`, and
/// a chart is rendered instead of installed, because that needs no cluster.
pub(crate) fn steps(page: &str) -> Vec<Step> {
    let page = page.replace("cargo run --release --quiet --", "tidegate");
    let page = page.replace("cargo run --release --", "tidegate");
    let page = page.replace("helm install ", "helm template ");
    let mut steps = Vec::new();
    let mut lines = page.lines().enumerate();
    // Last line of text before a block.
    let mut above = "";
    while let Some((index, line)) = lines.next() {
        let Some(kind) = line.trim_start().strip_prefix("```") else {
            if !line.trim().is_empty() {
                above = line.trim();
            }
            continue;
        };
        let indent = line.len() - line.trim_start().len();
        let block: Vec<&str> = lines
            .by_ref()
            .map(|(_, line)| line.get(indent..).unwrap_or_default())
            .take_while(|line| !line.starts_with("```"))
            .collect();
        let line = index + 2;
        if above.starts_with("<!-- not run: ") {
        } else if let Some(name) = file_name(above) {
            let (name, text) = (name.to_owned(), block.join("\n") + "\n");
            steps.push(Step { line, action: Action::File { name, text } });
        } else if kind == "sh" {
            steps.push(Step { line, action: shell(&block) });
        } else if kind == "console" {
            steps.extend(console(line, &block));
        }
        above = "";
    }
    steps
}

/// Returns the file name at the end of a line such as "Save this as `app.py`:".
fn file_name(above: &str) -> Option<&str> {
    let name = above.strip_suffix("`:")?.rsplit('`').next()?;
    let is_file =
        name.contains('.') && name.chars().all(|c| c.is_alphanumeric() || "._-".contains(c));
    is_file.then_some(name)
}

fn shell(block: &[&str]) -> Action {
    let command = block.join("\n");
    match SERVICES.iter().find(|(start, _)| command.starts_with(start)) {
        Some((_, ready)) => Action::Service { command, ready },
        None => Action::Run { command, output: None },
    }
}

fn console(first_line: usize, block: &[&str]) -> Vec<Step> {
    let mut commands: Vec<(usize, String, String)> = Vec::new();
    let mut is_continued = false;
    for (index, line) in block.iter().enumerate() {
        match (line.strip_prefix("$ "), commands.last_mut()) {
            (Some(command), _) => {
                commands.push((first_line + index, command.to_owned(), String::new()));
                is_continued = command.ends_with('\\');
            }
            (None, Some((_, command, _))) if is_continued => {
                command.push('\n');
                command.push_str(line);
                is_continued = line.ends_with('\\');
            }
            (None, Some((.., output))) => {
                output.push_str(line);
                output.push('\n');
            }
            (None, None) => panic!("line {first_line}: output without a command"),
        }
    }
    let step = |(line, command, output)| {
        let output = Some(output);
        Step { line, action: Action::Run { command, output } }
    };
    commands.into_iter().map(step).collect()
}

/// Whether a text matches a pattern: `…` matches any characters of a line, and a line that is only
/// `…` matches any number of lines.
pub(crate) fn matches(pattern: &str, text: &str) -> bool {
    let pattern: Vec<&str> = pattern.lines().collect();
    let text: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines_match(&pattern, &text)
}

fn lines_match(pattern: &[&str], text: &[&str]) -> bool {
    match (pattern.split_first(), text.split_first()) {
        (None, None) => true,
        (Some((&"…", rest)), _) => (0..=text.len()).any(|skip| lines_match(rest, &text[skip..])),
        (Some((line, pattern)), Some((found, text))) => {
            line_matches(line, found) && lines_match(pattern, text)
        }
        _ => false,
    }
}

fn line_matches(pattern: &str, line: &str) -> bool {
    let mut parts = pattern.split('…');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        match rest.split_once(part) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[test]
fn steps_are_files_services_and_commands() {
    let page = "Save as `a.yaml`:\n\n```yaml\nx: 1\n```\n\n```sh\ntidegate serve --config a.yaml\n\
        ```\n```console\n$ echo a \\\n  b\na b\n$ true\n```\n\
        <!-- not run: takes minutes -->\n```sh\nmake\n```\n";
    let run = |command: &str, output: &str| Action::Run {
        command: command.to_owned(),
        output: Some(output.to_owned()),
    };
    let expected = [
        (4, Action::File { name: "a.yaml".to_owned(), text: "x: 1\n".to_owned() }),
        (
            8,
            Action::Service {
                command: "tidegate serve --config a.yaml".to_owned(),
                ready: "http://127.0.0.1:8082/readyz",
            },
        ),
        (11, run("echo a \\\n  b", "a b\n")),
        (14, run("true", "")),
    ];
    assert_eq!(steps(page), expected.map(|(line, action)| Step { line, action }));
}

#[test]
fn ellipses_match_any_text() {
    assert!(matches("a…c\n…\nend\n", "abbc\nx\ny\nend"));
    assert!(matches("a\n…\n", "a"));
    assert!(!matches("a…c\n", "abd"));
    assert!(!matches("a\nend\n", "a\nx\nend"));
    assert!(!matches("", "error"));
}
