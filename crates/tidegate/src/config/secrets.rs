//! What an error may show of a configuration: nothing that could be a secret.
//!
//! It goes by where a line stands, not by what is in it, and needs no document that parses: a
//! section is a field at the left margin and all that is indented below it. Sections are masked
//! unless they are known to hold no secrets; in those, too, what stands under a field of a masked
//! one (wrongly indented, say).

/// Sections without secrets. The others are masked whatever their name: a misspelt `auth` holds a
/// token all the same.
const OPEN: [&str; 7] =
    ["listen", "client_ip", "headers", "envoy", "gateway", "attributes", "policies"];

/// Where a secret stands, in whatever section it has got into.
const HOLDERS: [&str; 8] =
    ["auth", "store", "api_token", "admin_token", "redis", "sentinel", "username", "password"];

/// Other names that a masked line may show.
const NAMES: [&str; 11] = [
    "tls",
    "prefix",
    "timeout",
    "instances",
    "max_keys",
    "master",
    "nodes",
    "ca",
    "certificate",
    "key",
    "client_ca",
];

pub(super) const MASK: &str = "…";

/// The lines as YAML counts them.
pub(super) fn lines(text: &str) -> impl Iterator<Item = &str> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    // A carriage return alone ends a line; with a line feed behind it the two are one end.
    text.split('\n').flat_map(|line| line.strip_suffix('\r').unwrap_or(line).split('\r'))
}

/// Whether this line, counted from 0, may hold a secret.
pub(super) fn may_be_secret(text: &str, number: usize) -> bool {
    let before: Vec<&str> = lines(text).take(number + 1).collect();
    let Some(here) = before.get(number) else { return true };
    let mut margin = indent(here) + 1;
    for line in before
        .iter()
        .rev()
        .filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'))
    {
        let at = indent(line);
        if at >= margin {
            continue;
        }
        margin = at;
        if fields(line).any(|field| HOLDERS.iter().any(|name| is_near(field, name))) {
            return true;
        }
        if !line.starts_with([' ', '\t', '-']) {
            return !fields(line)
                .next()
                .is_some_and(|section| OPEN.contains(&section) && line.starts_with(section));
        }
        // A list may stand as far left as the field that it belongs to.
        margin = margin.max(1);
    }
    true
}

/// The line as it may be shown.
pub(super) fn shown(text: &str, number: usize) -> String {
    let line = lines(text).nth(number).unwrap_or_default();
    if may_be_secret(text, number) {
        masked(line)
    } else {
        without_userinfo(&line.chars().take(120).collect::<String>())
    }
}

/// Only the name of its field, if it is one that we know.
fn masked(line: &str) -> String {
    let start = indent(line);
    let (margin, rest) = line.split_at_checked(start).unwrap_or(("", line));
    match rest.split_once(':') {
        Some((field, "")) if is_name(field) => format!("{margin}{field}:"),
        Some((field, _)) if is_name(field) => format!("{margin}{field}: {MASK}"),
        _ => format!("{margin}{MASK}"),
    }
}

/// Whether this is the name of a field, if perhaps misspelt.
pub(super) fn is_name(word: &str) -> bool {
    OPEN.iter().chain(&HOLDERS).chain(&NAMES).any(|name| is_near(word, name))
}

fn is_near(word: &str, name: &str) -> bool {
    let length = word.chars().count();
    let like_a_name = (3..=32).contains(&length) && word.chars().all(is_of_name);
    word == name || (like_a_name && strsim::damerau_levenshtein(word, name) <= (length / 4).max(1))
}

pub(super) fn is_of_name(character: char) -> bool {
    character.is_alphanumeric() || "_-.".contains(character)
}

/// Spaces, and the dashes of lists.
fn indent(line: &str) -> usize {
    let mut rest = line.trim_start();
    while let Some(item) = rest.strip_prefix("- ") {
        rest = item.trim_start();
    }
    line.len() - rest.len()
}

/// The words before colons, but for those of URLs.
fn fields(line: &str) -> impl Iterator<Item = &str> {
    let colons = line.match_indices(':').filter(|(colon, _)| !line[*colon..].starts_with("://"));
    colons.filter_map(|(colon, _)| {
        let word = line[..colon].trim_end().trim_end_matches(['"', '\'']);
        word.rsplit(|character| !is_of_name(character)).next().filter(|word| !word.is_empty())
    })
}

/// Without what stands in quotes.
pub(super) fn without_quoted(message: &str) -> String {
    let mut shown = String::with_capacity(message.len());
    let mut quote = None;
    let mut escaped = false;
    for character in message.chars() {
        match quote {
            None => match character {
                '"' | '`' => {
                    quote = Some(character);
                    shown.push_str(MASK);
                }
                _ => shown.push(character),
            },
            Some(end) if character == end && !escaped => quote = None,
            Some(_) => {}
        }
        escaped = character == '\\' && !escaped;
    }
    shown
}

/// Without user and password of URLs: `http://…@host`. (What our own messages say of URLs stays.)
pub(super) fn without_userinfo(text: &str) -> String {
    const OURS: &str = "[user:password@]";
    text.split(OURS).map(mask_userinfo).collect::<Vec<_>>().join(OURS)
}

fn mask_userinfo(text: &str) -> String {
    let Some(at) = text.rfind('@') else { return text.to_owned() };
    let before = &text[..at];
    // A password may hold any character: all from the first URL on, or else the word with a colon.
    let start = before.find("://").map(|scheme| scheme + 3).or_else(|| {
        let word = before
            .rfind(|c: char| c.is_whitespace() || "\"'[]{},".contains(c))
            .map_or(0, |end| end + 1);
        before[word..].contains(':').then_some(word)
    });
    match start {
        Some(start) => format!("{}{MASK}{}", &text[..start], &text[at..]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line that has this in it, as it would be shown.
    fn line_with(text: &str, part: &str) -> String {
        let number = lines(text).position(|line| line.contains(part)).expect("a line");
        shown(text, number)
    }

    #[test]
    fn a_line_is_masked_by_where_it_stands() {
        for (text, expected) in [
            ("auth:\n  api_tokn: S3CR3T\n", "  api_tokn: …"),
            ("auth:\n  api-tokn: S3CR3T\n", "  api-tokn: …"),
            ("auth:\n  bearer: S3CR3T\n", "  …"),
            ("auth: S3CR3T\n", "auth: …"),
            ("auth:\n  api_token:\n    - S3CR3T\n", "    - …"),
            ("auth:\n- S3CR3T\n", "- …"),
            ("auth:\n  api_token:\n    S3CR3T: x\n", "    …"),
            ("auth:\n  api_token: a\n  S3CR3T\n", "  …"),
            ("auth:\n  api_token: a\n# a comment\nS3CR3T\n", "…"),
            ("auht:\n  api_token: S3CR3T\n", "  api_token: …"),
            ("api_token: S3CR3T\n", "api_token: …"),
            ("policies: []\nS3CR3T: x\n", "…"),
            ("{policies: [], auth: {api_token: S3CR3T}}\n", "…"),
            ("--- {auth: S3CR3T}\n", "…"),
            ("policies: []\rauth: S3CR3T\r", "auth: …"),
            ("policies: []\r\nauth: S3CR3T\r\n", "auth: …"),
            ("\u{feff}auth: S3CR3T\n", "auth: …"),
            ("store:\n  sentinel:\n    passwrd: S3CR3T\n", "    passwrd: …"),
            ("store:\n  sentinel:\n    pwd: S3CR3T\n", "    …"),
            ("tls:\n  key: |\n    S3CR3T\n", "    …"),
            ("listen:\n  http: a\n  auth: {api_token: S3CR3T}\n", "  auth: …"),
            ("listen:\n  http: a\n  auth:\n    api_token:\n      - S3CR3T\n", "      - …"),
            ("listen: {http: a, 'api_token': S3CR3T}\n", "listen: …"),
            ("gateway:\n  upstreams: ['http://u:S3CR3T@h']\n", "  upstreams: ['http://…@h']"),
            (
                "gateway:\n  upstreams: [http://u:S3CR3T/@,@h, http://i]\n",
                "  upstreams: [http://…@h, http://i]",
            ),
            ("gateway:\n  upstreams: [u:S3CR3T@h]\n", "  upstreams: […@h]"),
        ] {
            assert_eq!(line_with(text, "S3CR3T"), expected, "{text}");
        }
    }

    #[test]
    fn everything_else_is_shown_in_full() {
        for (text, part) in [
            ("policies:\n  - name: a\n    algorithm: token_bucket\n", "token_bucket"),
            ("policies:\n- name: a\n  on_store_failure: password\n", "password"),
            (
                "policies:\n- name: a\n  match: {header.authorization: 'a@b.c', path: /auth}\n",
                "a@b.c",
            ),
            ("auth:\n  api_token: a\npolicies:\n  - {name: redis://h}\n", "name"),
            ("store: {redis: 'redis://h'}\nlisten: {http: localhost}\n", "localhost"),
        ] {
            let line = lines(text).find(|line| line.contains(part)).expect("a line");
            assert_eq!(line_with(text, part), line);
        }
    }

    #[test]
    fn what_is_quoted_in_a_message_is_left_out() {
        assert_eq!(without_quoted(r#""S3\"CR3T" is not a duration"#), "… is not a duration");
        assert_eq!(without_quoted("unknown `S3CR3T`, or \"S3CR3T"), "unknown …, or …");
    }
}
