//! Path normalization: the upstream gets the path that the policies matched.
//!
//! If `/limited/../open` were forwarded as it is, an application could see another resource than
//! the policies.

use std::borrow::Cow;

use http::Uri;
use tidegate::Policies;

/// Rewrites the target to the normal form of its path, before policies match it. The query is
/// unchanged. A path that the policies reject stays as it is, because it is not forwarded.
pub(super) fn normalize(uri: &mut Uri, policies: &Policies) {
    let Some(target) = uri.path_and_query() else { return };
    // `OPTIONS *` has no path.
    if !target.path().starts_with('/') {
        return;
    }
    let Ok(Cow::Owned(path)) = policies.normalize_path(target.path()) else { return };
    let Ok(target) = format!("{path}{}", &target.as_str()[target.path().len()..]).parse() else {
        return;
    };
    let mut parts = std::mem::take(uri).into_parts();
    parts.path_and_query = Some(target);
    *uri = Uri::from_parts(parts).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RULES: &str = "
paths: {encoded_slashes: keep, parameters: keep}
policies: [{name: all, match: {path: '/**'}, limit: 1, window: 1s}]
";

    fn normalized(uri: &str, policies: &Policies) -> String {
        let mut uri: Uri = uri.parse().expect("a URI");
        normalize(&mut uri, policies);
        uri.to_string()
    }

    #[test]
    fn path_is_normalized_and_the_query_stays() {
        let policies = tidegate_config::parse_policies("rules.yaml", RULES).expect("valid");
        for (uri, expected) in [
            ("/a/b", "/a/b"),
            ("/a//b/", "/a/b/"),
            ("/limited/../open", "/open"),
            ("/limited/%2e%2E/open", "/open"),
            ("/a/./b/.%2e/c%20d", "/a/c%20d"),
            ("/api/items/%%32e%%32e/7", "/api/items/%252e%252e/7"),
            ("/a%2fb;c", "/a%2Fb;c"),
            ("/a/../b?c=/../d&%2e", "/b?c=/../d&%2e"),
            ("/a/../b?", "/b?"),
            ("http://h", "http://h/"),
            ("http://h/a/../b?c", "http://h/b?c"),
            ("*", "*"),
        ] {
            assert_eq!(normalized(uri, &policies), expected, "{uri}");
        }
    }

    proptest! {
        #[test]
        fn normal_form_of_a_target_is_stable(
            path in r"/(/|\.|%2e|%2E|a|b|%2F|%|2e|;|%32){0,16}",
        ) {
            let policies = tidegate_config::parse_policies("rules.yaml", RULES).expect("valid");
            let once = normalized(&path, &policies);
            prop_assert_eq!(normalized(&once, &policies), once);
        }
    }
}
