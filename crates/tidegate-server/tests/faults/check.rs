use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::load::Stream;

/// Source of a decision, as the response reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Source {
    Store,
    /// Counts as a decision of the store, by design.
    DenyCache,
    Local,
    Allow,
    Deny,
    #[serde(skip)]
    None,
}

/// One request and its response.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) stream: usize,
    pub(crate) instance: usize,
    pub(crate) sent: Instant,
    pub(crate) responded: Instant,
    pub(crate) status: u16,
    pub(crate) allowed: bool,
    pub(crate) source: Source,
    /// Reason for a missing or malformed response.
    pub(crate) failure: Option<String>,
}

/// Probe of the service without Redis, measured from its scheduled time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Probe {
    pub(crate) scheduled: Instant,
    pub(crate) responded: Instant,
}

/// Metrics of an instance at a point in time, each summed over its labels.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) at: Instant,
    pub(crate) instance: usize,
    pub(crate) sums: BTreeMap<String, f64>,
}

/// Record of a whole run.
pub(crate) struct Run {
    pub(crate) streams: Vec<Stream>,
    pub(crate) records: Vec<Record>,
    canary: Vec<Probe>,
    usual: Duration,
    pub(crate) samples: Vec<Sample>,
}

impl Record {
    pub(crate) fn by_store(&self) -> bool {
        matches!(self.source, Source::Store | Source::DenyCache)
    }

    fn took(&self) -> Duration {
        self.responded - self.sent
    }
}

impl Run {
    pub(crate) fn new(
        streams: Vec<Stream>,
        mut records: Vec<Record>,
        mut canary: Vec<Probe>,
        mut samples: Vec<Sample>,
    ) -> Self {
        records.sort_by_key(|record| record.sent);
        canary.sort_by_key(|probe| probe.scheduled);
        samples.sort_by_key(|sample| sample.at);
        let mut delays: Vec<Duration> =
            canary.iter().map(|probe| probe.responded - probe.scheduled).collect();
        delays.sort_unstable();
        let usual = delays.get(delays.len() / 2).copied().unwrap_or_default();
        Self { streams, records, canary, usual, samples }
    }

    pub(crate) fn stream(&self, record: &Record) -> &Stream {
        &self.streams[record.stream]
    }

    pub(crate) fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Record> + 'a {
        self.records.iter().filter(move |record| self.stream(record).name == name)
    }

    /// Returns the requests sent in this period.
    pub(crate) fn sent_between(&self, from: Instant, to: Instant) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(move |record| (from..to).contains(&record.sent))
    }

    /// Returns the maximum number of allowed requests in any window of this length within a period.
    ///
    /// A request was allowed at some time between its send and its response. Only requests that
    /// certainly fall into the window are counted, so there are no false accusations.
    pub(crate) fn max_allowed(
        &self,
        name: &str,
        window: Duration,
        from: Instant,
        to: Instant,
    ) -> usize {
        let within =
            |record: &&Record| record.allowed && record.sent >= from && record.responded <= to;
        let admitted: Vec<&Record> = self.of(name).filter(within).collect();
        let count = |(first, start): (usize, &&Record)| {
            let end = start.sent + window;
            // An event that is exactly one window old is outside.
            let inside = admitted[first..].iter().take_while(|record| record.sent < end);
            inside.filter(|record| record.responded < end).count()
        };
        admitted.iter().enumerate().map(count).max().unwrap_or(0)
    }

    pub(crate) fn max_allowed_overall(&self, name: &str, window: Duration) -> usize {
        let Some((first, last)) = self.span() else { return 0 };
        self.max_allowed(name, window, first, last)
    }

    pub(crate) fn span(&self) -> Option<(Instant, Instant)> {
        let last = self.records.iter().map(|record| record.responded).max()?;
        Some((self.records.first()?.sent, last))
    }

    /// Returns the latency of a response minus the delay of this machine: the worst excess of the
    /// canary over its median during the request. On an idle machine nothing is subtracted.
    pub(crate) fn adjusted_latency(&self, record: &Record) -> Duration {
        // A probe takes a few seconds at most, older ones are skipped.
        let from = self
            .canary
            .partition_point(|probe| probe.scheduled + Duration::from_secs(6) < record.sent);
        let during =
            self.canary[from..].iter().take_while(|probe| probe.scheduled < record.responded);
        let overlapping = during.filter(|probe| probe.responded > record.sent);
        let late = overlapping
            .map(|probe| (probe.responded - probe.scheduled).saturating_sub(self.usual))
            .max();
        record.took().saturating_sub(late.unwrap_or_default())
    }

    /// Returns the maximum delay of this machine, by its canary.
    pub(crate) fn max_delay(&self) -> Duration {
        let late = self
            .canary
            .iter()
            .map(|probe| (probe.responded - probe.scheduled).saturating_sub(self.usual));
        late.max().unwrap_or_default()
    }

    /// Returns the slowest response.
    pub(crate) fn slowest(&self) -> Option<(Duration, &Record)> {
        let timed = self.records.iter().map(|record| (self.adjusted_latency(record), record));
        timed.max_by_key(|(took, _)| *took)
    }

    /// Returns the 99th percentile of the latency of requests sent in this period.
    pub(crate) fn p99(&self, from: Instant, to: Instant) -> Duration {
        let mut times: Vec<Duration> =
            self.sent_between(from, to).map(|record| self.adjusted_latency(record)).collect();
        times.sort_unstable();
        times
            .get((times.len() * 99).div_ceil(100).saturating_sub(1))
            .copied()
            .unwrap_or(Duration::MAX)
    }

    /// Returns the time until every instance had a request of these streams allowed by the store. A
    /// denial would prove less, because it writes nothing.
    pub(crate) fn recovered_after(
        &self,
        moment: Instant,
        streams: impl Fn(&Stream) -> bool,
    ) -> Option<Duration> {
        let instances = self.records.iter().map(|record| record.instance).max()? + 1;
        let first = |instance: usize| {
            let fit = |record: &&Record| record.instance == instance && record.sent >= moment;
            let good = |record: &&Record| {
                record.by_store() && record.allowed && streams(self.stream(record))
            };
            self.records
                .iter()
                .filter(fit)
                .filter(good)
                .map(|record| record.responded - moment)
                .min()
        };
        (0..instances).map(first).collect::<Option<Vec<_>>>()?.into_iter().max()
    }

    /// Returns the requests of a period that were decided without the store for no valid reason.
    ///
    /// An instance that allowed requests of a key itself has debits to settle for one window. Until
    /// they are settled, or while they exceed the limit, it decides for that key itself.
    pub(crate) fn without_store(
        &self,
        from: Instant,
        to: Instant,
        window: Duration,
    ) -> Vec<&Record> {
        let admitted_itself = |record: &&Record| record.allowed && record.source == Source::Local;
        let before = self.records.iter().filter(|record| record.sent < from);
        let lenders: Vec<&Record> = before.filter(admitted_itself).collect();
        let owes = |record: &Record| {
            let own =
                |lent: &&&Record| (lent.stream, lent.instance) == (record.stream, record.instance);
            record.source == Source::Local
                && lenders.iter().filter(own).any(|lent| lent.responded + window > record.sent)
        };
        self.sent_between(from, to).filter(|record| !record.by_store() && !owes(record)).collect()
    }

    /// Returns all fleet sizes in the metrics of the instances.
    pub(crate) fn fleet_sizes(&self) -> BTreeSet<String> {
        self.samples
            .iter()
            .map(|sample| sample.value("tidegate_fleet_instances").to_string())
            .collect()
    }

    /// Returns the time until every instance showed a state in its metrics.
    pub(crate) fn shown_after(
        &self,
        moment: Instant,
        shows: impl Fn(&Sample) -> bool,
    ) -> Option<Duration> {
        let instances = self.records.iter().map(|record| record.instance).max()? + 1;
        let first = |instance: usize| {
            let fit = |sample: &&Sample| sample.instance == instance && sample.at >= moment;
            self.samples
                .iter()
                .filter(fit)
                .find(|sample| shows(sample))
                .map(|sample| sample.at - moment)
        };
        (0..instances).map(first).collect::<Option<Vec<_>>>()?.into_iter().max()
    }
}

impl Sample {
    pub(crate) fn value(&self, metric: &str) -> f64 {
        self.sums.get(metric).copied().unwrap_or(0.0)
    }

    pub(crate) fn breaker_is_open(&self) -> bool {
        self.value("tidegate_store_breaker_open") > 0.0
    }

    pub(crate) fn store_is_down(&self) -> bool {
        self.sums.get("tidegate_store_up").is_some_and(|up| *up < 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn run(start: Instant, requests: &[(u32, u32, bool)], canary: &[(u32, u32)]) -> Run {
        let record = |(sent, responded, allowed): &(u32, u32, bool)| Record {
            stream: 0,
            instance: 0,
            sent: start + MS * *sent,
            responded: start + MS * *responded,
            status: if *allowed { 200 } else { 429 },
            allowed: *allowed,
            source: Source::Store,
            failure: None,
        };
        let probe = |(scheduled, responded): &(u32, u32)| Probe {
            scheduled: start + MS * *scheduled,
            responded: start + MS * *responded,
        };
        let (records, canary) =
            (requests.iter().map(record).collect(), canary.iter().map(probe).collect());
        Run::new(vec![Stream::policy("hot", "k", 1)], records, canary, Vec::new())
    }

    #[test]
    fn only_certain_admissions_are_counted() {
        let start = Instant::now();
        let all = run(
            start,
            &[(0, 1, true), (10, 11, true), (20, 21, false), (99, 99, true), (100, 101, true)],
            &[],
        );
        assert_eq!(
            all.max_allowed_overall("hot", MS * 100),
            3,
            "the denied request and the one a window later do not count"
        );
        assert_eq!(all.max_allowed_overall("hot", MS * 102), 4);
        assert_eq!(all.max_allowed("hot", MS * 100, start + MS * 5, start + MS * 200), 3);
        assert_eq!(all.max_allowed("hot", MS * 100, start + MS * 5, start + MS * 100), 2);
        let slow = run(start, &[(0, 1, true), (50, 150, true)], &[]);
        assert_eq!(
            slow.max_allowed_overall("hot", MS * 100),
            1,
            "the decision may have happened later"
        );
    }

    #[test]
    fn instance_with_debits_decides_itself_for_a_window() {
        let start = Instant::now();
        let mut all =
            run(start, &[(0, 1, true), (50, 51, true), (99, 100, false), (102, 103, false)], &[]);
        all.records[0].source = Source::Local;
        let none = |all: &Run| all.without_store(start + MS * 10, start + MS * 200, MS * 100).len();
        assert_eq!(none(&all), 0);
        all.records[2].source = Source::Local;
        assert_eq!(none(&all), 0, "debits are pending");
        all.records[3].source = Source::Local;
        assert_eq!(none(&all), 1, "debits are settled");
        all.records[2].source = Source::Deny;
        assert_eq!(none(&all), 2, "this source creates no debits");
        all.records[2].source = Source::Local;
        all.records[0].instance = 1;
        assert_eq!(none(&all), 2, "the debits are of another instance");
    }

    #[test]
    fn only_the_machine_delay_is_subtracted() {
        let start = Instant::now();
        let calm: Vec<(u32, u32)> = (0..30).map(|n| (n * 10, n * 10 + 1)).collect();
        let requests = [(0, 200, false), (205, 206, false)];
        let all = run(start, &requests, &calm);
        assert_eq!(
            all.adjusted_latency(&all.records[0]),
            MS * 200,
            "nothing is subtracted on an idle machine"
        );
        assert_eq!(all.slowest().map(|(took, _)| took), Some(MS * 200));
        let mut stalled = calm.clone();
        stalled[10] = (100, 171);
        let all = run(start, &requests, &stalled);
        assert_eq!(all.adjusted_latency(&all.records[0]), MS * 130);
        assert_eq!(
            all.adjusted_latency(&all.records[1]),
            MS,
            "a stall at another time excuses nothing"
        );
    }

    #[test]
    fn p99_excludes_the_slowest_hundredth() {
        let start = Instant::now();
        let mut requests: Vec<(u32, u32, bool)> = (0..99).map(|n| (n, n + 2, true)).collect();
        requests.push((99, 999, true));
        assert_eq!(run(start, &requests, &[]).p99(start, start + MS * 1000), MS * 2);
        requests.push((100, 999, true));
        assert_eq!(run(start, &requests, &[]).p99(start, start + MS * 1000), MS * 899);
    }
}
