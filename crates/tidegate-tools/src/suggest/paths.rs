//! Groups of paths: segments that are numbers, ids or rare become `*`.

use std::collections::{BTreeMap, HashMap};

/// Maximum number of different templates; further paths are in no group.
const MAX_TEMPLATES: usize = 20_000;
/// Segments of a path that are compared.
const MAX_SEGMENTS: usize = 4;
/// A segment stays, and a group is one, from this share of the requests on: one in 50.
const MIN_SHARE: u64 = 50;
/// Length from which a segment with a digit, or of hexadecimal digits only, is an id.
const MIN_ID_LENGTH: usize = 16;
const MIN_HASH_LENGTH: usize = 8;

/// Paths with `*` in the place of ids, and their number of requests.
#[derive(Debug, Default)]
pub(super) struct PathTemplates {
    numbers: HashMap<String, u32>,
    /// The first one has the paths of no group.
    counts: Vec<(String, u64)>,
}

impl PathTemplates {
    /// Counts a path, and returns the number of its template.
    pub(super) fn number(&mut self, path: &str) -> u32 {
        if self.counts.is_empty() {
            self.counts.push((String::new(), 0));
        }
        let template = template(path);
        let next = u32::try_from(self.counts.len()).unwrap_or_default();
        let number = match self.numbers.get(&template) {
            Some(number) => *number,
            None if self.counts.len() > MAX_TEMPLATES => 0,
            None => {
                self.numbers.insert(template.clone(), next);
                self.counts.push((template, 0));
                next
            }
        };
        self.counts[number as usize].1 += 1;
        number
    }

    /// Returns the templates in the order of their numbers.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.counts.iter().map(|(name, _)| name.as_str())
    }
}

/// Returns a normalized path with `*` in the place of segments that are ids, or that have characters
/// of patterns.
fn template(path: &str) -> String {
    let mut segments = path.split('/').filter(|segment| !segment.is_empty());
    let mut template = String::new();
    for segment in segments.by_ref().take(MAX_SEGMENTS) {
        template.extend(["/", if is_id(segment) { "*" } else { segment }]);
    }
    match segments.next() {
        Some(_) => template + "/**",
        None if template.is_empty() => "/".to_owned(),
        None => template,
    }
}

/// Returns whether a segment is a number, a UUID, a hash or a similar id, or has characters that
/// have a meaning in patterns.
fn is_id(segment: &str) -> bool {
    let has_digit = segment.bytes().any(|byte| byte.is_ascii_digit());
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._~-".contains(&byte);
    let is_hexadecimal = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-';
    let is_number = |byte: u8| byte.is_ascii_digit() || b".-".contains(&byte);
    !segment.bytes().all(is_plain)
        || segment.bytes().all(is_number)
        || has_digit
            && (segment.len() >= MIN_ID_LENGTH && !segment.contains('.')
                || segment.len() >= MIN_HASH_LENGTH && segment.bytes().all(is_hexadecimal))
}

/// Returns the patterns of the groups with most requests.
pub(super) fn groups(templates: &PathTemplates, count: usize) -> Vec<String> {
    let total: u64 = templates.counts.iter().map(|(_, count)| count).sum();
    let is_frequent = |count: u64| count * MIN_SHARE >= total;
    let named = templates.counts.get(1..).unwrap_or_default();
    let mut paths: Vec<(Vec<String>, u64)> = named
        .iter()
        .map(|(name, count)| (name[1..].split('/').map(str::to_owned).collect(), *count))
        .collect();
    // From the first segment on, because a rare one makes those below it the same.
    for depth in 0..MAX_SEGMENTS {
        let mut below: HashMap<Vec<String>, u64> = HashMap::new();
        for (path, count) in paths.iter().filter(|(path, _)| path.len() > depth) {
            *below.entry(path[..=depth].to_vec()).or_default() += count;
        }
        for (path, _) in paths.iter_mut().filter(|(path, _)| path.len() > depth) {
            if !is_frequent(below[&path[..=depth]]) && path[depth] != "**" {
                "*".clone_into(&mut path[depth]);
            }
        }
    }
    let mut groups: BTreeMap<String, u64> = BTreeMap::new();
    for (path, count) in paths {
        *groups.entry(format!("/{}", path.join("/"))).or_default() += count;
    }
    let mut groups: Vec<(String, u64)> =
        groups.into_iter().filter(|(_, count)| is_frequent(*count)).collect();
    groups.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    groups.truncate(count);
    groups.into_iter().map(|(pattern, _)| pattern).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_become_stars_and_names_stay() {
        for (path, expected) in [
            ("/", "/"),
            ("", "/"),
            ("/api/users/42", "/api/users/*"),
            ("/api/v1/items/", "/api/v1/items"),
            ("/o/3fa85f64-5717-4562-b3fc-2c963f66afa6/x", "/o/*/x"),
            ("/c/deadbeef01", "/c/*"),
            ("/c/facade", "/c/facade"),
            ("/t/aGVsbG8gd29ybGQ0Mg", "/t/*"),
            ("/img/photo-of-2026-and-more.png", "/img/photo-of-2026-and-more.png"),
            ("/a/b/c/d/e/f", "/a/b/c/d/**"),
            ("/s/a%20b/x*y/<i>", "/s/*/*/*"),
        ] {
            assert_eq!(template(path), expected, "{path}");
        }
    }

    #[test]
    fn rare_segments_are_one_group_and_frequent_ones_their_own() {
        let mut templates = PathTemplates::default();
        for number in 0..1_000 {
            templates.number(&format!("/users/{number}"));
            templates.number(&format!("/page/name{}", number % 100));
            templates.number("/page/home");
        }
        templates.number("/favicon.ico");
        assert_eq!(groups(&templates, 8), ["/page/*", "/page/home", "/users/*"]);
    }
}
