//! [`TextFormat`]: a format as the directives of a server describe it, and its scanner.

use std::borrow::Cow;

use anyhow::ensure;

use super::field::{Core, Field, unescaped};
use super::line::LineParts;
use super::members::Syntax;

/// Syntax of a format.
#[derive(Debug, Clone, Copy)]
pub(super) enum FormatSyntax<'f> {
    /// Directives.
    Text(&'f str),
    Members(Syntax),
    Columns,
}

/// Formats with their names. A line may have less than its format: everything after the request.
#[rustfmt::skip]
pub(super) const FORMATS: &[(&str, FormatSyntax<'static>)] = &[
    ("json caddy traefik cloudflare envoy-json envoy istio gcp azure",
     FormatSyntax::Members(Syntax::Json)),
    ("vhost_combined", FormatSyntax::Text(
         "$host $remote_addr $_ $remote_user [$time_local] \"$request\" $status $bytes \
          \"$http_referer\" \"$http_user_agent\"")),
    ("combined common nginx apache traefik gunicorn morgan", FormatSyntax::Text(
         "$remote_addr $_ $remote_user [$time_local] \"$request\" $status $bytes \
          \"$http_referer\" \"$http_user_agent\" \"$maybe_forwarded\"")),
    ("envoy istio", FormatSyntax::Text(
         "[$time] \"$method $target $_\" $status $_ $_ $bytes $_ $_ \"$http_x_forwarded_for\" \
          \"$http_user_agent\" \"$_\" \"$authority\" \"$_\"")),
    ("envoy istio", FormatSyntax::Text(
         "[$time] \"$method $target $_\" $status $_ $_ $_ \"$_\" $_ $bytes $_ $_ \
          \"$http_x_forwarded_for\" \"$http_user_agent\" \"$_\" \"$authority\" \"$_\" $_ $_ $_ \
          $remote_addr $_ $_")),
    ("haproxy", FormatSyntax::Text(
         "$remote_addr [$time_local] $_ $_ $_/$_/$_/$_/$_ $status $bytes $_ $_ $_ $_ $_ \
          \"$request\"")),
    ("alb", FormatSyntax::Text(
         "$_ $time $_ $remote_addr $_ $_ $_ $_ $status $_ $_ $bytes \"$request\" \
          \"$http_user_agent\"")),
    ("elb", FormatSyntax::Text(
         "$time $_ $remote_addr $_ $_ $_ $_ $status $_ $_ $bytes \"$request\" \
          \"$http_user_agent\"")),
    ("s3", FormatSyntax::Text(
         "$_ $_ [$time_local] $remote_addr $remote_user $_ $_ $_ \"$request\" $status $_ $bytes \
          $_ $_ $_ \"$http_referer\" \"$http_user_agent\"")),
    ("squid", FormatSyntax::Text(
         "$time $_ $remote_addr $_/$status $bytes $method $target $remote_user")),
    ("uvicorn", FormatSyntax::Text(
         "$remote_addr - \"$request\" $status")),
    ("gin", FormatSyntax::Text(
         "$time | $status | $_ | $remote_addr | $method \"$target\"")),
    ("rails", FormatSyntax::Text(
         "Started $method \"$target\" for $remote_addr at $time")),
    ("ltsv", FormatSyntax::Members(Syntax::Ltsv)),
    ("logfmt heroku", FormatSyntax::Members(Syntax::Logfmt)),
    ("csv tsv w3c iis cloudfront", FormatSyntax::Columns),
];

/// Field of a format, and the text after it.
#[derive(Debug, Clone)]
struct Piece {
    field: Field,
    after: Box<str>,
    is_quoted: bool,
    /// Number of words of the value.
    words: usize,
}

/// Format of lines: texts, and the fields between them.
#[derive(Debug, Clone)]
pub(super) struct TextFormat {
    start: Box<str>,
    pieces: Vec<Piece>,
    /// Number of pieces up to the time.
    time_end: usize,
}

impl TextFormat {
    /// Compiles directives of nginx (`$remote_addr`), Apache (`%h`) or Envoy (`%START_TIME%`).
    pub(super) fn compile(text: &str) -> anyhow::Result<Self> {
        let text = text.replace("\\\"", "\"").replace("\\t", "\t");
        let mut start = String::new();
        let mut pieces: Vec<(Field, String, usize)> = Vec::new();
        let mut rest = text.as_str();
        while let Some(first) = rest.chars().next() {
            let found = match first {
                '$' => nginx(rest),
                '%' => envoy(rest).or_else(|| apache(rest)).map(|(field, used)| (field, used, 1)),
                _ => None,
            };
            let literal =
                |pieces: &mut Vec<(Field, String, usize)>, start: &mut String, text: &str| {
                    pieces.last_mut().map_or(start, |(_, after, _)| after).push_str(text);
                };
            let Some((field, used, words)) = found else {
                ensure!(
                    !"$%".contains(first) || rest.starts_with("%%"),
                    "{rest:?} is no directive"
                );
                let doubled = rest.starts_with("%%");
                literal(&mut pieces, &mut start, &rest[..first.len_utf8()]);
                rest = &rest[first.len_utf8() + usize::from(doubled)..];
                continue;
            };
            // Apache writes brackets around a time without a format of its own.
            let is_bracketed = &rest[..used] == "%t";
            // An address of IPv6 has colons, too, and a target may have a query: they are one.
            let is_rest = match pieces.last() {
                Some((Field::Core(Core::Address, _), after, _)) => {
                    after == ":" && field == Field::Skip
                }
                Some((Field::Core(Core::Target, _), after, _)) => {
                    after.is_empty() && matches!(field, Field::Core(Core::Query, _))
                }
                _ => false,
            };
            if is_bracketed {
                literal(&mut pieces, &mut start, "[");
            }
            if is_rest {
                pieces.last_mut().into_iter().for_each(|(_, after, _)| after.clear());
            } else {
                let after = if is_bracketed { "]".to_owned() } else { String::new() };
                pieces.push((field, after, words));
            }
            rest = &rest[used..];
        }
        let has = |wanted: &[Core]| {
            pieces
                .iter()
                .any(|(field, ..)| matches!(field, Field::Core(core, _) if wanted.contains(core)))
        };
        ensure!(has(&[Core::Request, Core::Target]), "it has no $request, and no path");
        let is_time = |field: &Field| matches!(field, Field::Core(Core::Time | Core::Date, _));
        let time_end = pieces.iter().rposition(|(field, ..)| is_time(field)).map_or(0, |at| at + 1);
        let mut before = start.as_str();
        let mut compiled = Vec::with_capacity(pieces.len());
        for (field, after, words) in &pieces {
            let is_quoted = before.ends_with('"') && after.starts_with('"');
            let text: Box<str> = after.as_str().into();
            compiled.push(Piece { field: field.clone(), after: text, is_quoted, words: *words });
            before = after;
        }
        Ok(Self { start: start.into(), pieces: compiled, time_end })
    }

    /// Returns whether it has this part of a request.
    pub(super) fn has(&self, wanted: Core) -> bool {
        self.pieces
            .iter()
            .any(|piece| matches!(piece.field, Field::Core(core, _) if core == wanted))
    }

    /// Returns whether lines start with a host.
    pub(super) fn starts_with_host(&self) -> bool {
        matches!(self.pieces[..], [Piece { field: Field::Core(Core::Host, _), .. }, ..])
    }

    /// Reads the fields of a line. Returns whether the line has all of them, and nothing else.
    pub(super) fn scan<'l>(
        &self,
        line: &'l str,
        parts: &mut LineParts<'l, '_>,
    ) -> Result<bool, &'static str> {
        let mut rest = line.strip_prefix(&*self.start).ok_or("it does not have the format")?;
        let count =
            if parts.only_time && self.time_end > 0 { self.time_end } else { self.pieces.len() };
        for piece in &self.pieces[..count] {
            let (value, after) = piece.split(rest)?;
            let length = value.len();
            parts.add(&piece.field, value);
            match after {
                Some(after) => rest = after,
                // The line ends early, and the required parts are checked later.
                None => return Ok(piece.after.is_empty() && rest.len() == length),
            }
        }
        Ok(rest.is_empty())
    }
}

impl Piece {
    /// Splits a text into the value and the text after the literal, if it has the literal.
    fn split<'l>(&self, rest: &'l str) -> Result<(Cow<'l, str>, Option<&'l str>), &'static str> {
        let literal = &*self.after;
        let bytes = rest.as_bytes();
        let is_blank = literal.starts_with([' ', '\t']);
        let own_quotes = !self.is_quoted && is_blank && bytes.first() == Some(&b'"');
        if self.is_quoted || own_quotes {
            let start = usize::from(own_quotes);
            let (end, has_escapes) =
                quote_end(&bytes[start..]).ok_or("a quote in it is not closed")?;
            let (value, after) = (&rest[start..start + end], &rest[start + end + start..]);
            let value = Cow::Borrowed(value);
            let value = if has_escapes { unescaped(value) } else { value };
            return Ok((value, skip(after, literal)));
        }
        let (end, after) = self.bare_end(rest);
        let value = Cow::Borrowed(&rest[..end]);
        let may_have_escapes =
            matches!(self.field, Field::Attribute(_) | Field::Core(Core::Target | Core::User, _));
        Ok((if may_have_escapes { unescaped(value) } else { value }, after))
    }

    /// Returns the end of a value without quotes, and the text after the literal.
    fn bare_end<'l>(&self, rest: &'l str) -> (usize, Option<&'l str>) {
        let literal = &*self.after;
        let Some(first) = literal.bytes().next() else {
            let is_end = |c: char| match self.field {
                Field::Core(Core::Host, _) => c == '/',
                Field::Core(Core::Time | Core::Request, _) | Field::Attribute(_) => false,
                _ => c == ' ' || c == '\t',
            };
            let end = rest.find(is_end).unwrap_or(rest.len());
            return (end, Some(&rest[end..]).filter(|after| after.starts_with('/')));
        };
        let (mut from, mut words) = (0, self.words);
        while let Some(at) = rest.as_bytes()[from..].iter().position(|byte| *byte == first) {
            let Some(after) = skip(&rest[from + at..], literal) else {
                from += at + 1;
                continue;
            };
            words -= 1;
            if words == 0 {
                return (from + at, Some(after));
            }
            from = rest.len() - after.len();
        }
        (rest.len(), None)
    }
}

/// Returns the text after a literal. A space in it stands for any number of blanks.
fn skip<'l>(text: &'l str, literal: &str) -> Option<&'l str> {
    let bytes = text.as_bytes();
    let mut at = 0;
    for expected in literal.bytes() {
        let is_blank = |at: usize| matches!(bytes.get(at), Some(b' ' | b'\t'));
        if expected == b' ' && is_blank(at) {
            while is_blank(at) {
                at += 1;
            }
        } else if bytes.get(at) == Some(&expected) {
            at += 1;
        } else {
            return None;
        }
    }
    text.get(at..)
}

/// Returns the place of the quote that ends a text, and whether there is a backslash before it. A
/// quote inside the text has one.
pub(super) fn quote_end(bytes: &[u8]) -> Option<(usize, bool)> {
    let mut at = bytes.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
    let has_escapes = bytes[at] == b'\\';
    while bytes[at] == b'\\' {
        let rest = bytes.get(at + 2..)?;
        at += 2 + rest.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
    }
    Some((at, has_escapes))
}

/// Returns the field and length of a directive of nginx, and the number of words of its value:
/// `${time:2}` has two.
fn nginx(text: &str) -> Option<(Field, usize, usize)> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let name = text.strip_prefix('$')?;
    if let Some(inner) = name.strip_prefix('{') {
        let (inner, _) = inner.split_once('}')?;
        let (name, words) = inner.split_once(':').unwrap_or((inner, "1"));
        return Some((
            Field::named(name),
            inner.len() + 3,
            words.parse().ok().filter(|words| *words > 0)?,
        ));
    }
    let length = name.find(|c| !is_part(c)).unwrap_or(name.len());
    (length > 0).then(|| (Field::named(&name[..length]), length + 1, 1))
}

/// Returns the field and length of a directive of Envoy, such as `%REQ(:PATH)%`.
fn envoy(text: &str) -> Option<(Field, usize)> {
    let inner = text.strip_prefix('%')?;
    let is_part = |c: char| c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit();
    let length = inner.find(|c| !is_part(c)).filter(|length| *length > 1)?;
    let (name, rest) = inner.split_at(length);
    let (argument, rest) = match rest.strip_prefix('(') {
        Some(rest) => rest.split_once(')')?,
        None => ("", rest),
    };
    let end = rest.find('%')?;
    let used = text.len() - rest.len() + end + 1;
    let field = match name {
        "REQ" => match argument.split('?').next().unwrap_or_default() {
            pseudo if pseudo.starts_with(':') => Field::named(&pseudo[1..]),
            "X-ENVOY-ORIGINAL-PATH" => Field::named("requesturi"),
            header => Field::named(&format!("header.{}", header.to_ascii_lowercase())),
        },
        name => Field::named(name),
    };
    Some((field, used))
}

/// Returns the field and length of a directive of Apache, or of gunicorn in `%(…)s`.
fn apache(text: &str) -> Option<(Field, usize)> {
    let mut rest = text.strip_prefix('%')?;
    let is_gunicorn = rest.starts_with('(');
    rest = rest.strip_prefix('(').unwrap_or(rest);
    rest = rest.trim_start_matches(|c: char| c.is_ascii_digit() || "!,<>".contains(c));
    let (argument, rest) = match rest.strip_prefix('{') {
        Some(inner) => inner.split_once('}')?,
        None => ("", rest),
    };
    let letter = rest.chars().next().filter(char::is_ascii_alphabetic)?;
    let rest = &rest[1..];
    let rest = if is_gunicorn { rest.strip_prefix(")s")? } else { rest };
    let name = match (letter, argument) {
        ('a', "") if is_gunicorn => "user_agent",
        ('f', "") if is_gunicorn => "referer",
        ('h' | 'a', _) => "remote_addr",
        ('u', _) => "remote_user",
        ('t', _) => "time",
        ('r', _) => "request",
        ('s', _) => "status",
        ('b' | 'B' | 'O', _) => "bytes",
        ('m', _) => "method",
        ('U', _) => "path",
        ('q', _) => "query",
        ('v' | 'V', _) => "host",
        ('i', name) => return Some((Field::header(name), text.len() - rest.len())),
        ('C', name) => {
            let cookie = Field::Attribute(format!("cookie.{name}").into());
            return Some((cookie, text.len() - rest.len()));
        }
        _ => "_",
    };
    Some((Field::named(name), text.len() - rest.len()))
}
