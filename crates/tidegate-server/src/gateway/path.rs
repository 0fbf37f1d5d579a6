//! The path as it is forwarded: what the policies have matched.
//!
//! They look at a path without its dot segments. An application that looks at the beginning alone
//! would be told of another place by `/limited/../open`, and one that resolves them by
//! `/open/../limited`.

use std::borrow::Cow;

use http::Uri;
use http::uri::PathAndQuery;

/// The target without dot segments in its path, `%2e` for a dot or not; all other bytes stay as
/// they came.
pub(super) fn forwarded(uri: &Uri) -> Option<PathAndQuery> {
    let Some(whole) = uri.path_and_query() else { return Some(PathAndQuery::from_static("/")) };
    match resolved(whole.path()) {
        Cow::Borrowed(_) => Some(whole.clone()),
        Cow::Owned(path) => format!("{path}{}", &whole.as_str()[whole.path().len()..]).parse().ok(),
    }
}

fn resolved(path: &str) -> Cow<'_, str> {
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
            // Empty segments are none to policies: two dots lead back over the last that is one.
            let last = kept.iter().rposition(|segment| !segment.is_empty());
            kept.truncate(last.unwrap_or(0));
        }
        if segments.peek().is_none() {
            // `/a/.` is the folder `/a/`.
            kept.push("");
        }
    }
    Cow::Owned(format!("/{}", kept.join("/")))
}

/// 1 or 2 if the segment is so many dots, otherwise 0.
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
    fn dot_segments_are_resolved_and_the_rest_stays() {
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
            assert_eq!(resolved(path), expected, "{path}");
        }
        let forward =
            |uri: &str| forwarded(&uri.parse().expect("a URI")).expect("a path").to_string();
        assert_eq!(forward("/a/../b?c=/../d&%2e"), "/b?c=/../d&%2e");
        assert_eq!(forward("/a/../b?"), "/b?");
        assert_eq!(forward("http://h"), "/");
    }

    proptest! {
        #[test]
        fn what_is_forwarded_is_what_was_matched(path in r"/(/|\.|%2e|%2E|a|b|%2F|%|2e){0,16}") {
            let forwarded = resolved(&path);
            prop_assert_eq!(normalize_path(&forwarded), normalize_path(&path));
            prop_assert!(!forwarded.split('/').any(|segment| dots(segment) > 0), "{}", forwarded);
        }
    }
}
