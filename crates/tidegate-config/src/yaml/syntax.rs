//! Usual mistakes in YAML, recognized by the text around an error. The parser's own messages name
//! its state, not the mistake.

use serde_saphyr::Error;

use super::redaction::{is_name_char, lines};

/// Cause of an error: its line and column, from 1, and what would be right. The message never
/// quotes the text, which may be a secret.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cause {
    pub(crate) line: usize,
    pub(crate) column: usize,
    pub(crate) message: String,
}

const INDENTATION: &str = "the indentation does not fit the lines above: fields of one level \
                           start in the same column";
const NO_SPACE: &str = "a space is missing after the colon: write each field as `name: value`";

/// Returns the cause of an error, if it is a usual mistake.
pub(crate) fn cause(text: &str, error: &Error) -> Option<Cause> {
    let location = error.location()?;
    let line = usize::try_from(location.line()).ok()?;
    let column = usize::try_from(location.column()).ok()?;
    let place = Place { text, line, column };
    match error {
        Error::ExternalMessage { msg, .. } => place.cause_of_syntax_error(msg),
        Error::UnknownAnchor { .. } => place.cause_of_first_character(),
        Error::Unexpected { expected: "mapping start" | "map", .. } => place.cause_of_no_fields(),
        Error::SerdeUnknownField { field, .. } if field.contains(':') => Some(place.here(NO_SPACE)),
        Error::SerdeInvalidType { unexpected, .. } if unexpected == "unit value" => {
            let word = place.rest()?.split([',', '}', ' ']).next()?;
            lacks_space_after_colon(word).then(|| place.here(NO_SPACE))
        }
        Error::SerdeMissingField { field, .. } => place.cause_of_missing_field(field),
        _ => None,
    }
}

/// Returns a note for a value of the wrong type at this position: a text in braces or brackets is
/// read as fields or a list.
pub(crate) fn note_on_type(text: &str, line: usize, column: usize) -> &'static str {
    match (Place { text, line, column }).character() {
        Some('{') => " (a text that starts with { must be in quotes)",
        Some('[') => " (a text that starts with [ must be in quotes)",
        _ => "",
    }
}

/// Position in a document.
#[derive(Clone, Copy)]
struct Place<'a> {
    text: &'a str,
    line: usize,
    column: usize,
}

impl<'a> Place<'a> {
    fn here(&self, message: &str) -> Cause {
        Cause { line: self.line, column: self.column, message: message.to_owned() }
    }

    /// Returns a line, counted from 1.
    fn line(&self, number: usize) -> Option<&'a str> {
        lines(self.text).nth(number.checked_sub(1)?)
    }

    /// Returns the line from this position on.
    fn rest(&self) -> Option<&'a str> {
        let line = self.line(self.line)?;
        let (start, _) = line.char_indices().nth(self.column.checked_sub(1)?)?;
        line.get(start..)
    }

    fn character(&self) -> Option<char> {
        self.rest()?.chars().next()
    }

    /// Returns the lines after this one that are neither blank nor comments, with their numbers.
    fn next_lines(&self) -> impl Iterator<Item = (usize, &'a str)> {
        let numbered = (1..).zip(lines(self.text)).skip(self.line);
        numbered.filter(|(_, line)| !line.trim().is_empty() && !line.trim_start().starts_with('#'))
    }

    fn cause_of_syntax_error(&self, message: &str) -> Option<Cause> {
        let near = self.line(self.line).map(|line| (self.line, line)).into_iter();
        let mut near = near.chain(self.next_lines().take(1));
        if let Some(cause) = near.find_map(wrong_indentation_character) {
            return Some(cause);
        }
        if message.contains("tab") {
            return Some(self.here("a tab is not allowed here: use spaces"));
        }
        let line = self.line(self.line)?;
        if lacks_space_after_colon(line) {
            return Some(self.here(NO_SPACE));
        }
        if message.contains("quoted scalar") {
            return Some(self.unclosed_quote());
        }
        if message.contains("mapping values are not allowed") {
            let before: String = line.chars().take(self.column.saturating_sub(1)).collect();
            let has_value = before.contains(": ");
            let text = if has_value {
                "a text with a colon and a space must be in quotes"
            } else {
                INDENTATION
            };
            return Some(self.here(text));
        }
        if message.contains("flow mapping") || message.contains("flow sequence") {
            let is_bracket = self.character().is_some_and(|at| "{}[]".contains(at));
            let text = if is_bracket {
                "between braces or brackets, a text with braces or brackets must be in quotes, \
                 such as '/users/{id}'"
            } else {
                "a comma is missing here, or the { or [ before it is not closed"
            };
            return Some(self.here(text));
        }
        if message.contains("block collection") || message.contains("block mapping") {
            return Some(self.here(INDENTATION));
        }
        self.cause_of_first_character()
    }

    /// Explains a value that starts with a character of YAML's own.
    fn cause_of_first_character(&self) -> Option<Cause> {
        let first = self.character()?;
        let example = if first == '*' { ", such as '*.example.com'" } else { "" };
        "*&!@%`|>".contains(first).then(|| {
            self.here(&format!("a text that starts with {first} must be in quotes{example}"))
        })
    }

    /// Explains a line that should have fields: without a colon it is a text.
    fn cause_of_no_fields(&self) -> Option<Cause> {
        let line = self.line(self.line)?;
        if lacks_space_after_colon(line) {
            return Some(self.here(NO_SPACE));
        }
        let word = line.trim();
        let is_name = !word.is_empty() && word.chars().all(is_name_char);
        is_name.then(|| self.here("a colon is missing after this name"))
    }

    /// Explains a field that is there, but not with the indentation of the others.
    fn cause_of_missing_field(&self, field: &str) -> Option<Cause> {
        let is_field = |line: &str| {
            let rest = line.trim_start().strip_prefix(field);
            rest.is_some_and(|rest| rest.starts_with(':'))
        };
        let (number, line) = self
            .next_lines()
            .take(20)
            .take_while(|(_, line)| !line.trim_start().starts_with("- "))
            .find(|(_, line)| is_field(line))?;
        let column = line.len() - line.trim_start().len() + 1;
        (column != self.column).then(|| Cause {
            line: number,
            column,
            message: format!(
                "`{field}` must start in column {}, like the other fields of line {}",
                self.column, self.line
            ),
        })
    }

    /// Finds the line with the quote: the nearest one above with an odd number of quotes.
    fn unclosed_quote(&self) -> Cause {
        let numbers = (1..=self.line).rev();
        let unclosed = numbers.into_iter().find_map(|number| {
            let line = self.line(number)?;
            let quote =
                ['"', '\''].into_iter().find(|quote| line.matches(*quote).count() % 2 == 1)?;
            let column = line.chars().position(|character| character == quote)? + 1;
            Some(Cause { line: number, column, message: "this quote is not closed".to_owned() })
        });
        unclosed.unwrap_or_else(|| self.here("a quoted text does not end correctly"))
    }
}

/// Finds a character other than a space in the indentation of a line.
fn wrong_indentation_character((number, line): (usize, &str)) -> Option<Cause> {
    let (at, character) = line.chars().enumerate().find(|(_, character)| *character != ' ')?;
    let message = match character {
        '\t' => "a tab in the indentation: use spaces",
        other if other.is_whitespace() => {
            "a special space in the indentation, perhaps of a copied text: use plain spaces"
        }
        _ => return None,
    };
    Some(Cause { line: number, column: at + 1, message: message.to_owned() })
}

/// Returns whether the line is a field without a space after its colon, such as `limit:5`.
fn lacks_space_after_colon(line: &str) -> bool {
    let field = line.trim().trim_start_matches("- ");
    let Some((name, value)) = field.split_once(':') else { return false };
    let is_name = !name.is_empty() && name.chars().all(is_name_char);
    is_name && !value.is_empty() && !value.starts_with([' ', '\t']) && !value.starts_with("//")
}
