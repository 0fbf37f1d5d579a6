//! [`RequestFilter`]: the requests of a log that are replayed.

use anyhow::{Context as _, ensure};
use glob::Pattern;
use tidegate::Attributes as _;

use super::record::Record;
use super::time::TimeParser;

/// Attributes of all lines.
const ATTRIBUTES: [&str; 7] = ["method", "path", "host", "ip", "status", "bytes", "remote_user"];

/// Conditions that a request has to meet.
#[derive(Debug, Default)]
pub(super) struct RequestFilter {
    from: Option<u64>,
    until: Option<u64>,
    conditions: Vec<Condition>,
}

/// `status=401`, or `path!=/health/*`.
#[derive(Debug)]
struct Condition {
    name: String,
    value: Pattern,
    is_negated: bool,
}

impl RequestFilter {
    /// Checks that lines have the attributes, or `columns` of their own.
    pub(super) fn check(&self, columns: &[&str]) -> anyhow::Result<()> {
        for Condition { name, .. } in &self.conditions {
            let kind = name.split_once('.').map(|(kind, _)| kind);
            let is_known = ATTRIBUTES.contains(&name.as_str())
                || kind.is_some_and(|kind| ["header", "query", "cookie"].contains(&kind));
            ensure!(
                is_known || columns.contains(&name.as_str()),
                "--where {name}: requests have {}, header.NAME, query.NAME and cookie.NAME; write \
                 NAME=VALUE or NAME!=VALUE",
                ATTRIBUTES.join(", ")
            );
        }
        Ok(())
    }

    pub(super) fn new(
        from: Option<&str>,
        until: Option<&str>,
        conditions: &[String],
    ) -> anyhow::Result<Self> {
        let time = |flag: &str, text: Option<&str>| {
            let parsed = text.map(|text| {
                TimeParser::default().parse(text).with_context(|| {
                    format!("{flag} {text:?} is not a time: write it like 2026-11-16T07:44:08Z")
                })
            });
            parsed.transpose()
        };
        let conditions = conditions.iter().map(|text| Condition::parse(text));
        let filter = Self {
            from: time("--from", from)?,
            until: time("--until", until)?,
            conditions: conditions.collect::<anyhow::Result<_>>()?,
        };
        let is_empty = filter.from.zip(filter.until).is_some_and(|(from, until)| from >= until);
        ensure!(!is_empty, "--until must be after --from");
        Ok(filter)
    }

    pub(super) fn accepts(&self, record: &Record) -> bool {
        self.from.is_none_or(|from| record.time >= from)
            && self.until.is_none_or(|until| record.time < until)
            && self.conditions.iter().all(|condition| condition.accepts(record))
    }
}

impl Condition {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let parts = text.split_once('=').filter(|(name, _)| !name.trim_end_matches('!').is_empty());
        let (name, value) =
            parts.with_context(|| format!("--where {text:?}: write it like status=401"))?;
        let value = Pattern::new(value).with_context(|| format!("--where {text:?}"))?;
        let is_negated = name.ends_with('!');
        Ok(Self { name: name.trim_end_matches('!').to_owned(), value, is_negated })
    }

    /// An attribute that the request lacks is an empty text.
    fn accepts(&self, record: &Record) -> bool {
        let value = record.get(&self.name).unwrap_or_default();
        self.value.matches(&value) != self.is_negated
    }
}
