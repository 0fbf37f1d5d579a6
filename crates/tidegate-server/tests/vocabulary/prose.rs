//! Prose and names of a file: comments, string literals, documents.

/// One line of prose with its number in the file.
pub(super) type Line = (usize, String);

/// Prose and names of one file.
#[derive(Default)]
pub(super) struct Contents {
    /// Blocks of consecutive lines, in Markdown.
    pub(super) blocks: Vec<Vec<Line>>,
    pub(super) identifiers: Vec<Line>,
    /// Names after `fn`.
    pub(super) functions: Vec<Line>,
}

/// Words up to the next full stop, question mark, colon or bracket.
#[derive(Default)]
pub(super) struct Clause {
    pub(super) words: Vec<(usize, String)>,
    /// The first clause of its sentence.
    pub(super) is_first: bool,
    pub(super) is_question: bool,
}

/// Splits a paragraph into clauses; the content of code spans is left out.
pub(super) fn clauses(lines: &[Line]) -> Vec<Clause> {
    let mut found = Vec::new();
    let mut clause = Clause { is_first: true, ..Clause::default() };
    let mut in_code = false;
    for (number, line) in lines {
        let mut word = String::new();
        let mut chars = line.chars().peekable();
        while let Some(char) = chars.next() {
            if char == '`' {
                in_code = !in_code;
                word.push('`');
                continue;
            }
            if char.is_alphanumeric() || matches!(char, '_' | '\'' | '-') {
                if !in_code {
                    word.extend(char.to_lowercase());
                }
                continue;
            }
            if in_code {
                continue;
            }
            if !word.is_empty() {
                clause.words.push((*number, std::mem::take(&mut word)));
            }
            let at_end = chars.peek().is_none_or(|next| next.is_whitespace() || *next == '*');
            let ends_sentence = matches!(char, '.' | '!' | '?') && at_end;
            let ends_clause = matches!(char, ':' | ';') && at_end;
            if ends_sentence || ends_clause || matches!(char, '(' | ')' | '|') {
                clause.is_question = char == '?';
                found.push(std::mem::take(&mut clause));
                clause.is_first = ends_sentence;
            } else if char == ',' {
                clause.words.push((*number, ",".into()));
            }
        }
        if !word.is_empty() {
            clause.words.push((*number, word));
        }
    }
    found.push(clause);
    found
}

/// Splits Markdown into paragraphs, list items, table rows and lines of code.
pub(super) fn paragraphs(block: &[Line]) -> Vec<Vec<Line>> {
    let mut found: Vec<Vec<Line>> = vec![Vec::new()];
    let mut in_fence = false;
    for (number, line) in block {
        let text = line.trim();
        if text.starts_with("```") {
            in_fence = !in_fence;
            found.push(Vec::new());
            continue;
        }
        let is_item = text.starts_with(['-', '*', '+', '|', '>', '#'])
            || text.split_once(". ").is_some_and(|(head, _)| head.parse::<u32>().is_ok());
        if text.is_empty() || is_item || in_fence {
            found.push(Vec::new());
        }
        if let Some(last) = found.last_mut() {
            last.push((*number, text.to_owned()));
        }
    }
    found
}

/// Words of `snake_case`, `CamelCase` or `UPPER_CASE`, in lower case.
pub(super) fn words_of_name(name: &str) -> Vec<String> {
    let is_upper = name.chars().all(|char| !char.is_lowercase());
    let mut words = vec![String::new()];
    for char in name.chars() {
        if char == '_' || (char.is_uppercase() && !is_upper) {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| char != '_') {
            word.extend(char.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Comments, string literals and names of a Rust file.
pub(super) fn rust_contents(text: &str) -> Contents {
    let mut contents = Contents::default();
    let mut comment: Vec<Line> = Vec::new();
    let chars: Vec<char> = text.chars().collect();
    let at = |index: usize| chars.get(index).copied().unwrap_or('\0');
    let mut index = 0;
    let mut line = 1;
    let mut previous = String::new();
    while index < chars.len() {
        let char = chars[index];
        if char == '/' && at(index + 1) == '/' {
            let end = (index..chars.len()).find(|end| at(*end) == '\n').unwrap_or(chars.len());
            let content: String = chars[index..end].iter().collect();
            if comment.last().is_some_and(|(last, _)| last + 1 != line) {
                contents.blocks.push(std::mem::take(&mut comment));
            }
            comment.push((line, content.trim_start_matches(['/', '!']).to_owned()));
            index = end;
        } else if char == '"' {
            let raw = matches!(previous.as_str(), "r" | "br" | "cr")
                .then(|| chars[..index].iter().rev().take_while(|char| **char == '#').count());
            let (end, lines) = string_literal(&chars, index + 1, line, raw);
            line += chars[index..end].iter().filter(|char| **char == '\n').count();
            index = end;
            previous.clear();
            if lines.iter().any(|(_, text)| text.trim().contains(' ')) {
                contents.blocks.push(lines);
            }
        } else if char == '\'' {
            let is_char = at(index + 1) == '\\' || at(index + 2) == '\'';
            let close = (index + 2..chars.len()).find(|close| at(*close) == '\'');
            // The quote of '\'' follows the escaped one.
            let close = close.filter(|_| is_char).map_or(index, |close| {
                if at(index + 1) == '\\' && close == index + 2 { close + 1 } else { close }
            });
            index = close + 1;
            previous.clear();
        } else if char.is_alphabetic() || char == '_' {
            let is_part = |end: &usize| at(*end).is_alphanumeric() || at(*end) == '_';
            let end = (index..chars.len()).find(|end| !is_part(end)).unwrap_or(chars.len());
            let name: String = chars[index..end].iter().collect();
            if previous == "fn" {
                contents.functions.push((line, name.clone()));
            }
            contents.identifiers.push((line, name.clone()));
            previous = name;
            index = end;
        } else {
            line += usize::from(char == '\n');
            if !char.is_whitespace() && char != '#' {
                previous.clear();
            }
            index += 1;
        }
    }
    contents.blocks.push(comment);
    contents
}

/// The end and the lines of a string literal whose content starts at `start`. `raw` is the number
/// of `#` before a raw one.
fn string_literal(
    chars: &[char],
    start: usize,
    mut line: usize,
    raw: Option<usize>,
) -> (usize, Vec<Line>) {
    let mut lines = vec![(line, String::new())];
    let mut index = start;
    while let Some(char) = chars.get(index) {
        let hashes = raw.unwrap_or(0);
        let closes = *char == '"'
            && chars[index + 1..].iter().take(hashes).filter(|char| **char == '#').count()
                == hashes;
        if closes {
            return (index + 1 + hashes, lines);
        }
        if *char == '\\' && raw.is_none() {
            let is_break = matches!(chars.get(index + 1), Some('n' | '\n'));
            line += usize::from(chars.get(index + 1) == Some(&'\n'));
            if is_break {
                lines.push((line, String::new()));
            }
            index += 2;
            continue;
        }
        line += usize::from(*char == '\n');
        if *char == '\n' {
            lines.push((line, String::new()));
        } else if let Some((_, text)) = lines.last_mut() {
            text.push(*char);
        }
        index += 1;
    }
    (chars.len(), lines)
}

/// Comments that start with `marker`, at the start of a line or after a space.
pub(super) fn comments(text: &str, marker: &str) -> Contents {
    let mut contents = Contents::default();
    for (index, line) in text.lines().enumerate() {
        let start = line
            .match_indices(marker)
            .find(|(start, _)| *start == 0 || line[..*start].ends_with(char::is_whitespace));
        let Some((start, _)) = start else { continue };
        let content = line[start..].trim_start_matches(['#', '-']).to_owned();
        let line = (index + 1, content);
        match contents.blocks.last_mut() {
            Some(block) if block.last().is_some_and(|(last, _)| last + 1 == line.0) => {
                block.push(line);
            }
            _ => contents.blocks.push(vec![line]),
        }
    }
    contents
}
