//! Guesses of a format by one of its lines.

use std::net::IpAddr;

use super::address;
use super::detect::{LineFormat, prefix_time};
use super::field::{Core, FieldNames};
use super::format::TextFormat;
use super::line::{LineParts, request_line};
use super::members::{Members, Syntax};
use super::record::Record;
use super::scan;

/// Maximum number of words of a line that are read.
const MAX_WORDS: usize = 64;
/// Maximum number of names of members that are shown.
const MAX_NAMES: usize = 20;
const METHODS: [&str; 9] =
    ["GET", "POST", "PUT", "HEAD", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"];
/// Starts of the names of usual user agents.
const AGENTS: [&str; 4] = ["Mozilla/", "curl/", "python-", "Go-http"];

/// Guesses the directives of a line that has a time, a method and a path.
pub(super) fn guess(line: &str) -> Option<LineFormat> {
    [' ', '|', '\t', ';', ','].into_iter().find_map(|separator| guess_words(line, separator))
}

fn guess_words(line: &str, separator: char) -> Option<LineFormat> {
    let words = match separator {
        ' ' => scan::words(line, MAX_WORDS),
        _ => line.split(separator).map(str::trim).take(MAX_WORDS).collect(),
    };
    let (time, time_words) = prefix_time(&words).filter(|_| words.len() > 2)?;
    let is_quote = |c: char| matches!(c, '"' | '[' | ']' | '\'' | '(' | ')');
    let mut names = vec!["$_"; words.len()];
    names[time..time + time_words].fill("");
    // Names the first word after a place that has no name yet.
    let mut name = |directive, from: usize, is_such: &dyn Fn(&str) -> bool| {
        let is_it = |at: &usize| names[*at] == "$_" && is_such(words[*at].trim_matches(is_quote));
        let at = (from..words.len()).find(is_it)?;
        names[at] = directive;
        Some(at)
    };
    let is_method = |word: &str| METHODS.contains(&word);
    let is_target = |word: &str| word.starts_with('/') || word.contains("://");
    let is_request = |word: &str| {
        request_line(word).is_some_and(|(method, target)| is_method(method) && is_target(target))
    };
    let request = match name("$request", 0, &is_request) {
        Some(request) => request,
        None => name("$method", 0, &is_method)?.max(name("$target", 0, &is_target)?),
    };
    let client = name("$remote_addr", 0, &|word| address(word).is_some());
    // One address may be that of an upstream.
    let is_list = |word: &str| {
        word.contains(',') && word.split(',').all(|hop| hop.trim().parse::<IpAddr>().is_ok())
    };
    name("$http_x_forwarded_for", client.unwrap_or(words.len()), &is_list);
    let is_status = |word: &str| word.parse().is_ok_and(|it: u16| (100..600).contains(&it));
    let status = name("$status", request, &is_status).or_else(|| name("$status", 0, &is_status));
    let next = status.map_or(words.len(), |at| at + 1);
    let is_next_number = |word: &str| words.get(next) == Some(&word) && word.parse::<u64>().is_ok();
    name("$bytes", next, &is_next_number);
    name("$http_user_agent", 0, &|word| AGENTS.iter().any(|agent| word.starts_with(agent)));
    let time_name = format!("${{time:{time_words}}}");
    names[time] = if time_words > 1 { &time_name } else { "$time" };
    // The last value would have the rest of the line.
    let count = names.iter().rposition(|name| *name != "$_")? + 2;
    let mut directives = Vec::with_capacity(count);
    for (word, name) in words.iter().zip(names).take(count).filter(|(_, name)| !name.is_empty()) {
        // Quotes and brackets around a value stay in the format.
        let is_held = word.len() > 1 && word.starts_with(is_quote) && word.ends_with(is_quote);
        let (start, end) = if is_held { (&word[..1], &word[word.len() - 1..]) } else { ("", "") };
        directives.push(format!("{start}{name}{end}"));
    }
    let directives = directives.join(separator.encode_utf8(&mut [0; 4]));
    let mut found = LineFormat::of_text(TextFormat::compile(&directives).ok()?);
    found.guess = Some(directives);
    found.parse(line, &mut Record::default(), false).is_ok().then_some(found)
}

/// Describes a line whose format is unknown, and the flags that would read it.
pub(super) fn describe(line: &str) -> String {
    // Prose may have one name with a value, too.
    for (syntax, name, least) in [(Syntax::Json, "JSON", 0), (Syntax::Logfmt, "logfmt", 1)] {
        let mut record = Record::default();
        let mut members = Members::new(syntax, FieldNames::default());
        let mut parts = LineParts::new(&mut record, false);
        if members.scan(line, &mut parts).is_err() || members.names().nth(least).is_none() {
            continue;
        }
        let time = parts.take_time();
        let mut has = |core| parts.take(core).is_some();
        let request = has(Core::Request);
        let missing = [
            ("time", time.is_some()),
            ("method", has(Core::Method) || request),
            ("target", has(Core::Target) || request),
        ];
        let flags = missing.iter().filter(|(_, is_known)| !is_known);
        let flags: Vec<String> = flags.map(|(name, _)| format!("--field {name}=.NAME")).collect();
        let names = members.names().take(MAX_NAMES).collect::<Vec<_>>().join(", ");
        return match time {
            Some(time) if flags.is_empty() => format!(
                "it is {name}, but its time {time:?} or its request cannot be read: name other \
                 members of {names} with --field time=.NAME or --field target=.NAME"
            ),
            _ => format!(
                "it is {name} with the members {names}: say which ones have the request, with {}",
                flags.join(" ")
            ),
        };
    }
    if line.starts_with(['[', '{']) && line.contains("\":") {
        return "it is JSON, but not one object per line: `jq -c '.[]'` or the like makes it so"
            .to_owned();
    }
    let words = scan::words(line, MAX_WORDS);
    let is_bare = |c: char| matches!(c, '"' | '[' | ']');
    let any =
        |is_such: &dyn Fn(&str) -> bool| words.iter().any(|it| is_such(it.trim_matches(is_bare)));
    let found = [
        (prefix_time(&words).is_some(), "a time"),
        (any(&|word| address(word).is_some()), "an address"),
        (any(&|word| request_line(word).is_some()), "a request"),
    ];
    let found: Vec<&str> = found.into_iter().filter(|(is, _)| *is).map(|(_, what)| what).collect();
    let found = if found.is_empty() { "a text".to_owned() } else { found.join(" and ") };
    format!(
        "it has {} words and only {found}: describe them with --log-format, such as \
         '$remote_addr [$time_local] \"$request\" $status', or name columns in its first line \
         (time,ip,method,path)",
        words.len()
    )
}
