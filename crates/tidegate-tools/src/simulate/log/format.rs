//! [`TextFormat`]: a format as the directives of a server describe it, and its scanner.

use std::borrow::Cow;

use anyhow::ensure;

use super::field::{Core, Field};
use super::line::LineParts;
use super::scan::{quoted, unescaped};

/// More than the number of fields of a format.
const MAX_FIELDS: usize = 1_000;

/// Formats with their names: directives, or a syntax that names its values. A line may have less than
/// its format: everything after the request.
#[rustfmt::skip]
pub(super) const FORMATS: &[(&str, &str)] = &[
    ("json caddy traefik cloudflare envoy-json envoy istio gcp azure", "json"),
    ("vhost_combined",
     "$host $remote_addr $_ $remote_user [$time_local] \"$request\" $status $bytes \
      \"$http_referer\" \"$http_user_agent\" \"$maybe_forwarded\""),
    ("lighttpd",
     "$remote_addr $host $remote_user [$time_local] \"$request\" $status $bytes \
      \"$http_referer\" \"$http_user_agent\""),
    ("nginx",
     "$remote_addr - [$_] - $remote_user [$time_local] \"$request\" $status $bytes \
      \"$http_referer\" \"$http_user_agent\""),
    ("combined common nginx apache traefik gunicorn morgan",
     "$remote_addr $_ $remote_user [$time_local] \"$request\" $status $bytes \
      \"$http_referer\" \"$http_user_agent\" \"$maybe_forwarded\""),
    ("tomcat",
     "$remote_addr $_ $remote_user [$time_local] \"$request\" $status $bytes $_ \
      \"$http_user_agent\""),
    ("api-gateway",
     "$remote_addr $_ $remote_user [$time_local]\"$request\" $status $bytes $_"),
    ("apisix",
     "$remote_addr $_ $remote_user [$time_local] $host \"$request\" $status $bytes $_ \
      \"$http_referer\" \"$http_user_agent\""),
    ("apache",
     "[$time_local] $remote_addr TLS$_ $_ \"$request\" $bytes"),
    ("envoy istio",
     "[$time] \"$method $target $_\" $status $_ $_ $bytes $_ $_ \"$http_x_forwarded_for\" \
      \"$http_user_agent\" \"$_\" \"$authority\" \"$_\""),
    ("envoy istio",
     "[$time] \"$method $target $_\" $status $_ $_ $_ \"$_\" $_ $bytes $_ $_ \
      \"$http_x_forwarded_for\" \"$http_user_agent\" \"$_\" \"$authority\" \"$_\" $_ $_ $_ \
      $remote_addr $_ $_"),
    ("istio",
     "[$time] \"$method $target $_\" $status $_ \"$_\" \"$_\" $_ $bytes $_ $_ \
      \"$http_x_forwarded_for\" \"$http_user_agent\" \"$_\" \"$authority\" \"$_\" $_ $_ $_ \
      $remote_addr $_ $_"),
    ("haproxy",
     "$remote_addr:$_ [$time_local] $_ $_ $_/$_/$_/$_/$_ $status $bytes $_ $_ $_ $_ $_ \
      \"$request\""),
    ("alb",
     "$_ $time $_ $remote_addr:$_ $_ $_ $_ $_ $status $_ $_ $bytes \"$request\" \
      \"$http_user_agent\""),
    ("elb",
     "$time $_ $remote_addr:$_ $_ $_ $_ $_ $status $_ $_ $bytes \"$request\" \
      \"$http_user_agent\""),
    ("s3",
     "$_ $_ [$time_local] $remote_addr $remote_user $_ $_ $_ \"$request\" $status $_ $bytes \
      $_ $_ $_ \"$http_referer\" \"$http_user_agent\""),
    ("squid",
     "$time $_ $remote_addr $_/$status $bytes $method $target $remote_user"),
    ("uvicorn",
     "$remote_addr - \"$request\" $status"),
    ("uwsgi",
     "[$_] $remote_addr ($_) {$_} [$time] $method $target => generated $bytes bytes in $_ \
      msecs (HTTP/$_ $status)"),
    ("gin",
     "$time | $status | $_ | $remote_addr | $method \"$target\""),
    ("rails",
     "Started $method \"$target\" for $remote_addr at $time"),
    ("nginx-proxy-manager",
     "[$time_local] $_ $_ $status - $method $_ $host \"$target\" [Client $remote_addr] \
      [Length $bytes] [Gzip $_] [Sent-to $_] \"$http_user_agent\" \"$http_referer\""),
    ("ltsv", "ltsv"),
    ("logfmt heroku", "logfmt"),
    ("csv tsv w3c iis cloudfront", "csv"),
];

/// Contents of a value without quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueKind {
    /// No blanks, if nothing follows it.
    Word,
    /// No blanks.
    Number,
    /// Blanks after commas.
    List,
    /// Neither blanks nor slashes, if nothing follows it.
    Host,
    Text,
}

/// Field of a format, and the text after it.
#[derive(Debug, Clone)]
struct Piece {
    field: Field,
    kind: ValueKind,
    /// Blanks in it are one space.
    after: String,
    /// Number of words of the value.
    words: usize,
}

/// Format of lines: texts, and the fields between them.
#[derive(Debug, Clone)]
pub(super) struct TextFormat {
    start: String,
    pieces: Vec<Piece>,
    /// Number of pieces up to the time.
    time_end: usize,
}

impl TextFormat {
    /// Compiles directives of nginx (`$remote_addr`), Apache (`%h`) or Envoy (`%START_TIME%`).
    pub(super) fn compile(text: &str) -> anyhow::Result<Self> {
        // Apache writes brackets around a time without a format of its own.
        let text = text.replace("\\\"", "\"").replace("\\t", "\t").replace("%t", "[$time]");
        let mut start = String::new();
        let mut pieces: Vec<Piece> = Vec::new();
        let mut rest = text.as_str();
        while let Some(first) = rest.chars().next() {
            let found = match first {
                '$' => nginx(rest),
                '%' => envoy(rest).or_else(|| apache(rest)),
                _ => None,
            };
            if let Some((field, words, after)) = found {
                let kind = ValueKind::of(&field);
                pieces.push(Piece { field, kind, after: String::new(), words });
                rest = after;
                continue;
            }
            let is_doubled = rest.starts_with("%%");
            ensure!(!"$%".contains(first) || is_doubled, "{rest:?} is no directive");
            let literal = pieces.last_mut().map_or(&mut start, |piece| &mut piece.after);
            let literal_char = if first == '\t' { ' ' } else { first };
            if literal_char != ' ' || !literal.ends_with(' ') {
                literal.push(literal_char);
            }
            rest = &rest[first.len_utf8() + usize::from(is_doubled)..];
        }
        let is_time = |piece: &Piece| piece.is_any(&[Core::Time, Core::Date]);
        let time_end = pieces.iter().rposition(is_time).map_or(0, |at| at + 1);
        let format = Self { start, pieces, time_end };
        ensure!(format.has(&[Core::Request, Core::Target]), "it has no $request, and no path");
        Ok(format)
    }

    /// Returns whether it has one of these parts of a request.
    pub(super) fn has(&self, wanted: &[Core]) -> bool {
        self.pieces.iter().any(|piece| piece.is_any(wanted))
    }

    /// Returns whether the client is unknown, or what lines start with.
    pub(super) fn may_lack_address(&self) -> bool {
        !self.has(&[Core::Address]) || self.pieces[0].is_any(&[Core::Address])
    }

    /// Returns whether a line that fits so well has all fields.
    pub(super) fn is_complete(&self, fit: usize) -> bool {
        fit % MAX_FIELDS == self.pieces.len()
    }

    /// Returns whether lines start with a host, or have it in the place of the identity.
    pub(super) fn starts_with_host(&self) -> bool {
        self.pieces.iter().take(2).any(|piece| piece.is_any(&[Core::Host]))
    }

    /// Reads the fields of a line. Returns how well it fits: the number of fields that it has, and
    /// above all whether it has nothing else.
    pub(super) fn scan<'l>(
        &self,
        line: &'l str,
        parts: &mut LineParts<'l, '_>,
    ) -> Result<usize, &'static str> {
        let mut rest = skip(line, &self.start).ok_or("it does not have the format")?;
        let mut is_quoted = self.start.ends_with('"');
        let mut count = 0;
        for piece in &self.pieces {
            if parts.only_time && count == self.time_end && count > 0 {
                break;
            }
            let quote = is_quoted && piece.after.starts_with('"');
            let (value, after) = piece.split(rest, quote)?;
            parts.add(&piece.field, value);
            rest = after;
            count += 1;
            // If the line ends early, the required parts are checked later.
            let Some(after) = skip(rest, &piece.after[usize::from(quote)..]) else { break };
            rest = after;
            is_quoted = piece.after.ends_with('"');
        }
        Ok(count + if rest.is_empty() { MAX_FIELDS } else { 0 })
    }
}

impl ValueKind {
    fn of(field: &Field) -> Self {
        match field {
            Field::Core(Core::Address | Core::Forwarded, _) => Self::List,
            Field::Attribute(name) if name.ends_with("forwarded-for") => Self::List,
            Field::Core(Core::Time | Core::Request, _) | Field::Attribute(_) => Self::Text,
            Field::Core(Core::Status | Core::Bytes, _) => Self::Number,
            Field::Core(Core::Host, _) => Self::Host,
            _ => Self::Word,
        }
    }
}

impl Piece {
    fn is_any(&self, wanted: &[Core]) -> bool {
        matches!(self.field, Field::Core(core, _) if wanted.contains(&core))
    }

    /// Splits a text into the value and the text after it, and after its quote.
    fn split<'l>(
        &self,
        rest: &'l str,
        is_quoted: bool,
    ) -> Result<(Cow<'l, str>, &'l str), &'static str> {
        let own_quote = || rest.strip_prefix('"').filter(|_| self.after.starts_with(' '));
        if let Some(text) = if is_quoted { Some(rest) } else { own_quote() } {
            return quoted(text).ok_or("a quote in it is not closed");
        }
        let (value, after) = rest.split_at(self.bare_end(rest));
        let has_escapes =
            matches!(self.field, Field::Attribute(_) | Field::Core(Core::Target | Core::User, _));
        Ok((if has_escapes { unescaped(value) } else { value.into() }, after))
    }

    /// Returns the end of a value without quotes.
    fn bare_end(&self, rest: &str) -> usize {
        let bytes = rest.as_bytes();
        let is_blank = |at: usize| matches!(bytes.get(at), Some(b' ' | b'\t'));
        let is_inside = |at: usize| self.kind == ValueKind::List && bytes[..at].ends_with(b",");
        let mut places = 0..rest.len();
        let Some(first) = self.after.bytes().next() else {
            let end = places.find(|at| match self.kind {
                ValueKind::Text => false,
                ValueKind::Host => bytes[*at] == b'/' || is_blank(*at),
                _ => is_blank(*at) && !is_inside(*at),
            });
            return end.unwrap_or(rest.len());
        };
        // An address of IPv6 has colons before that of its port.
        if first == b':' && self.is_any(&[Core::Address]) {
            let word = places.find(|at| is_blank(*at)).unwrap_or(rest.len());
            return rest[..word].rfind(':').unwrap_or(word);
        }
        let mut words = 1;
        let end = places.find(|at| {
            let at = *at;
            if bytes[at] != first && !is_blank(at) {
                return false;
            }
            // A literal that starts with a space is at the start of the blanks, if it is there.
            let is_inner = is_blank(at) && at > 0 && is_blank(at - 1);
            let is_end = (bytes[at] == first || first == b' ')
                && !is_inner
                && words >= self.words
                && !is_inside(at)
                && (self.after.len() == 1 || skip(&rest[at..], &self.after).is_some());
            words += usize::from(is_blank(at) && !is_blank(at + 1));
            is_end || self.kind == ValueKind::Number && is_blank(at) && at > 0
        });
        end.unwrap_or(rest.len())
    }
}

/// Returns the text after a literal. A space in it stands for any number of blanks.
fn skip<'l>(text: &'l str, literal: &str) -> Option<&'l str> {
    let bytes = text.as_bytes();
    let mut at = 0;
    for expected in literal.bytes() {
        if bytes.get(at) == Some(&expected) && expected != b' ' {
            at += 1;
            continue;
        }
        let is_blank = |byte: &&u8| matches!(byte, b' ' | b'\t');
        let blanks = bytes[at..].iter().take_while(is_blank).count();
        at += Some(blanks).filter(|blanks| expected == b' ' && *blanks > 0)?;
    }
    text.get(at..)
}

/// Field of a directive, the number of words of its value, and the text after the directive.
type Directive<'f> = Option<(Field, usize, &'f str)>;

/// Parses a directive of nginx. The value of `${time:2}` has two words.
fn nginx(text: &str) -> Directive<'_> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let name = text.strip_prefix('$')?;
    if let Some(inner) = name.strip_prefix('{') {
        let (inner, rest) = inner.split_once('}')?;
        let (name, words) = inner.split_once(':').unwrap_or((inner, "1"));
        return Some((Field::named(name), words.parse().ok().filter(|it| *it > 0)?, rest));
    }
    let (name, rest) = name.split_at(name.find(|c| !is_part(c)).unwrap_or(name.len()));
    (!name.is_empty()).then(|| (Field::named(name), 1, rest))
}

/// Parses a directive of Envoy, such as `%REQ(:PATH)%`.
fn envoy(text: &str) -> Directive<'_> {
    let inner = text.strip_prefix('%')?;
    let is_part = |c: char| c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit();
    let length = inner.find(|c| !is_part(c)).filter(|length| *length > 1)?;
    let (name, rest) = inner.split_at(length);
    let (argument, rest) = match rest.strip_prefix('(') {
        Some(rest) => rest.split_once(')')?,
        None => ("", rest),
    };
    let (_, rest) = rest.split_once('%')?;
    let field = match (name, argument.split('?').next().unwrap_or_default()) {
        ("REQ", "X-ENVOY-ORIGINAL-PATH") => Field::named("requesturi"),
        ("REQ", header) => header.strip_prefix(':').map_or(Field::header(header), Field::named),
        (name, _) => Field::named(name),
    };
    Some((field, 1, rest))
}

/// Parses a directive of Apache, or of gunicorn in `%(…)s`.
fn apache(text: &str) -> Directive<'_> {
    let rest = text.strip_prefix('%')?;
    let inner = rest.strip_prefix('(');
    let rest = inner.unwrap_or(rest);
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit() || "!,<>".contains(c));
    let (argument, rest) = match rest.strip_prefix('{') {
        Some(inner) => inner.split_once('}')?,
        None => ("", rest),
    };
    let letter = rest.chars().next().filter(char::is_ascii_alphabetic)?;
    let rest = if inner.is_some() { rest[1..].strip_prefix(")s")? } else { &rest[1..] };
    let name = match letter {
        'a' if argument.is_empty() && inner.is_some() => "user_agent",
        'f' if argument.is_empty() && inner.is_some() => "referer",
        'h' | 'a' => "remote_addr",
        'u' => "remote_user",
        't' => "time",
        'r' => "request",
        's' => "status",
        'b' | 'B' | 'O' => "bytes",
        'm' => "method",
        'U' => "path",
        'q' => "query",
        'v' | 'V' => "host",
        'i' => return Some((Field::header(argument), 1, rest)),
        'C' => return Some((Field::Attribute(format!("cookie.{argument}").into()), 1, rest)),
        _ => "_",
    };
    Some((Field::named(name), 1, rest))
}
