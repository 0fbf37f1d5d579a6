//! Values in policies that no request has, because they are written for another program:
//! regular expressions, URLs, parameters of a router. A limit that never applies would
//! silently limit nothing.

use super::KeySource;

/// Characters that no host of a request has.
const NOT_IN_HOSTS: [char; 16] =
    [' ', '\t', '/', '^', '$', '|', '(', ')', '\\', ',', '!', '?', '#', '@', '{', '}'];

/// Returns why no request matches this pattern of an attribute, and what would be right.
pub(super) fn in_pattern(attribute: &KeySource, text: &str) -> Option<String> {
    match attribute.as_str() {
        "method" => in_method(text),
        "host" => in_host(text),
        "path" => in_path(text),
        _ => None,
    }
}

/// Returns what was probably meant by a path pattern that is valid, but matches only paths with the
/// characters of a parameter or of a regular expression.
pub(super) fn meant_by_path(text: &str) -> Option<String> {
    let is_parameter = |segment: &str| {
        let enclosed = |open, close| segment.starts_with(open) && segment.ends_with(close);
        (segment.starts_with(':') && segment.len() > 1) || enclosed('{', '}') || enclosed('<', '>')
    };
    if text.contains(".*") || text.ends_with('$') {
        return Some(without_expression(text));
    }
    let segments = text.split('/').map(|segment| if is_parameter(segment) { "*" } else { segment });
    let meant = segments.collect::<Vec<_>>().join("/");
    (meant != text).then_some(meant)
}

fn in_method(text: &str) -> Option<String> {
    let is_letter = |it: char| it.is_ascii_alphanumeric() || "-_*".contains(it);
    if !text.is_empty() && text.chars().all(is_letter) {
        return None;
    }
    if let Some(method) = text.strip_prefix('!') {
        return Some(format!(
            "a pattern excludes nothing: list the methods to limit, or write `unless: [{{method: \
             {method}}}]`"
        ));
    }
    let words = text.split(|it| !is_letter(it)).filter(|word| !word.is_empty());
    let words: Vec<String> = words.map(str::to_ascii_uppercase).collect();
    Some(match words.as_slice() {
        [] => "a method is one word: write it, such as `GET`".to_owned(),
        [word] => format!("a method is one word: write `{word}`"),
        words => format!("a method is one word: write a list, `[{}]`", words.join(", ")),
    })
}

fn in_host(text: &str) -> Option<String> {
    if !text.contains(NOT_IN_HOSTS) {
        return None;
    }
    let without_scheme = text.split_once("://").map_or(text, |(_, rest)| rest);
    let host = without_scheme.split('/').next().unwrap_or_default();
    if host != text && !host.is_empty() && in_host(host).is_none() {
        return Some(format!("a host has neither scheme nor path: write `{host}`"));
    }
    let reason = "a host is a name without other characters, not an expression: write \
                  `example.com` or `*.example.com`, or a list of some";
    Some(reason.to_owned())
}

fn in_path(text: &str) -> Option<String> {
    if text.starts_with('^') {
        let meant = without_expression(text);
        return Some(format!(
            "a path is no regular expression: write a pattern, such as `{meant}`"
        ));
    }
    if let Some(path) = text.strip_prefix('!').filter(|path| path.starts_with('/')) {
        return Some(format!(
            "a pattern excludes nothing: list the paths to limit, or write `unless: [{{path: \
             {path}}}]`"
        ));
    }
    let (scheme, rest) = text.split_once("://")?;
    let is_scheme = |it: char| it.is_ascii_alphanumeric() || "+.-".contains(it);
    if scheme.is_empty() || !scheme.chars().all(is_scheme) {
        return None;
    }
    let path = rest.find('/').map_or("/**", |start| &rest[start..]);
    let reason = format!("a path has neither scheme nor host: write `{path}`");
    Some(format!("{reason}, and the host in `match.host`"))
}

/// Returns the pattern that a simple regular expression of a path stands for.
fn without_expression(text: &str) -> String {
    let text = text.trim_start_matches('^').trim_end_matches('$');
    let text = text.replace("/.*", "/**").replace("[^/]*", "*").replace("[^/]+", "*");
    let text = text.replace(".*", "**").replace(".+", "**").replace('\\', "");
    if text.contains(['(', '[', '|', '?', '+', '{']) { "/api/**".to_owned() } else { text }
}
