//! Path normalization: the upstream gets the path that the policies matched.
//!
//! Policies match a path without its dot segments. If `/limited/../open` were forwarded as it is,
//! an application that only checks the prefix would see another resource than the policies.

use std::borrow::Cow;

use http::Uri;
use http::uri::PathAndQuery;

/// Returns the target without dot segments in its path, also if they are written with `%2e`. All
/// other bytes are unchanged.
pub(super) fn normalized(uri: &Uri) -> Option<PathAndQuery> {
    let Some(whole) = uri.path_and_query() else { return Some(PathAndQuery::from_static("/")) };
    match resolve_dots(whole.path()) {
        Cow::Borrowed(_) => Some(whole.clone()),
        Cow::Owned(path) => format!("{path}{}", &whole.as_str()[whole.path().len()..]).parse().ok(),
    }
}

fn resolve_dots(path: &str) -> Cow<'_, str> {
    if !path.starts_with('/') || !path.split('/').any(|segment| dots(segment) > 0) {
        return Cow::Borrowed(path);
    }
    let mut kept: Vec<&str> = Vec::new();
    let mut segments = path[1..].split('/').peekable();
    while let Some(segment) = segments.next() {
        let dots = dots(segment);
        if dots == 0 {
            kept.push(segment);
            continue;
        }
        if dots == 2 {
            // Policies ignore empty segments, so `..` removes the last one that is not empty.
            let last = kept.iter().rposition(|segment| !segment.is_empty());
            kept.truncate(last.unwrap_or(0));
        }
        if segments.peek().is_none() {
            // `/a/.` names the directory `/a/`.
            kept.push("");
        }
    }
    Cow::Owned(format!("/{}", kept.join("/")))
}

/// Returns the number of dots of a segment `.` or `..`, and 0 for any other segment.
fn dots(segment: &str) -> usize {
    let mut rest = segment.as_bytes();
    let mut count = 0;
    while count < 3 && !rest.is_empty() {
        rest = match rest {
            [b'.', rest @ ..] | [b'%', b'2', b'e' | b'E', rest @ ..] => rest,
            _ => return 0,
        };
        count += 1;
    }
    count % 3
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate::normalize_path;

    use super::*;

    #[test]
    fn only_dot_segments_are_resolved() {
        for (path, expected) in [
            ("/a/b", "/a/b"),
            ("/a//b/", "/a//b/"),
            ("/a/%41%2F..x/...", "/a/%41%2F..x/..."),
            ("/limited/../open", "/open"),
            ("/limited/%2e%2E/open", "/open"),
            ("/a/./b/.%2e/c%20d", "/a/c%20d"),
            ("/a/..", "/"),
            ("/a/b/.", "/a/b/"),
            ("/../../x", "/x"),
            ("/a//../b", "/b"),
            ("*", "*"),
        ] {
            assert_eq!(resolve_dots(path), expected, "{path}");
        }
        let forward =
            |uri: &str| normalized(&uri.parse().expect("a URI")).expect("a path").to_string();
        assert_eq!(forward("/a/../b?c=/../d&%2e"), "/b?c=/../d&%2e");
        assert_eq!(forward("/a/../b?"), "/b?");
        assert_eq!(forward("http://h"), "/");
    }

    proptest! {
        #[test]
        fn forwarded_path_is_the_matched_path(path in r"/(/|\.|%2e|%2E|a|b|%2F|%|2e){0,16}") {
            let forwarded = resolve_dots(&path);
            prop_assert_eq!(normalize_path(&forwarded), normalize_path(&path));
            prop_assert!(!forwarded.split('/').any(|segment| dots(segment) > 0), "{}", forwarded);
        }
    }
}
