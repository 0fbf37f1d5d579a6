//! [`Sequence`]: pseudo-random steps generated from a seed.

use std::fmt;
use std::time::Duration;

use crate::algorithm::{Algorithm, Encoding};
use crate::calendar::{Calendar, CalendarUnit};
use crate::charge::Charge;
use crate::hold::{Hold, HoldTerms, OnExpire};
use crate::quota::Quota;
use crate::store::Action;

const STEPS: u64 = 60;
const KEYS: [&str; 2] = ["user123", "{2001:db8::1}"];

#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// Policy names, each with the quotas that it has over time.
    policies: Vec<(String, Vec<Quota>)>,
    holds: Vec<Hold>,
    pub(super) steps: Vec<Step>,
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Advance(Advance),
    Rewind(Duration),
    Decide(Action, Vec<ChargeSpec>),
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Advance {
    By(Duration),
    /// Advances by the last `retry_after`, or a microsecond less.
    RetryAfter {
        early: bool,
    },
}

/// The charge of a step, as indices into the keys, policies and quotas.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChargeSpec {
    key: usize,
    policy: usize,
    quota: usize,
    cost: u64,
    /// For a refund: how many decisions ago the refunded charge was made.
    pub(super) refunded: Option<usize>,
    /// Index of the hold.
    hold: Option<usize>,
}

impl Advance {
    pub(super) fn duration(self, retry_after: Duration) -> Duration {
        match self {
            Self::By(duration) => duration,
            Self::RetryAfter { early } => {
                retry_after.saturating_sub(Duration::from_micros(u64::from(early)))
            }
        }
    }
}

impl Sequence {
    /// Generates a sequence with quotas of these algorithms.
    pub(super) fn from_seed(seed: u64, algorithms: &[Algorithm]) -> Self {
        let random = &mut Random(seed);
        let policies: Vec<(String, Vec<Quota>)> = (0..=random.below(2))
            .map(|index| (format!("policy-{index}"), quotas(algorithms, random)))
            .collect();
        let mut sequence = Self { policies, holds: Vec::new(), steps: Vec::new() };
        for _ in 0..STEPS {
            let step = sequence.step(random);
            sequence.steps.push(step);
        }
        sequence.with_rare_actions(seed)
    }

    /// Gives the quotas of every fifth seed, and of every second sequence of holds, the periods of
    /// calendars as windows.
    pub(super) fn with_calendars(mut self, seed: u64) -> Self {
        let random = &mut Random(seed.rotate_left(16));
        if !seed.is_multiple_of(if self.holds.is_empty() { 5 } else { 2 }) {
            return self;
        }
        let can_change = |quota: &Quota| !quota.is_concurrency() && quota.limit() == quota.burst();
        let policies = self.policies.iter_mut().map(|(_, quotas)| quotas);
        let policies = policies.filter(|quotas| quotas.iter().all(can_change));
        for quota in policies.flatten() {
            if quota.algorithm() == Algorithm::FixedWindow && random.one_in(4) {
                continue;
            }
            let unit = random.pick(&CalendarUnit::ALL);
            let zone = random.pick(&["UTC", "Europe/Berlin", "America/St_Johns", "Pacific/Apia"]);
            let calendar = Calendar::new(unit, zone).expect("a zone");
            let anchors = Calendar::anchors(unit);
            let calendar = match anchors.get(random.index(anchors.len())) {
                Some(anchor) => calendar.with_anchor(anchor).expect("an anchor of this unit"),
                None => calendar,
            };
            let in_calendar = Quota::calendar_window(quota.limit(), calendar).expect("valid");
            *quota = in_calendar.with_holds(*quota.holds());
        }
        let time = Duration::from_micros(random.below(800 * 86_400_000_000));
        self.steps.insert(0, Step::Advance(Advance::By(time)));
        self
    }

    /// Gives the policies of every fourth seed blocks, of one length or several.
    pub(super) fn with_blocks(mut self, seed: u64) -> Self {
        let random = &mut Random(!seed.rotate_left(32));
        for (_, quotas) in self.policies.iter_mut().filter(|_| seed.is_multiple_of(4)) {
            let window = quotas[0].window_micros();
            let lengths: Vec<Duration> = (0..random.pick(&[1, 1, 2, 3, 10]))
                .map(|_| {
                    let micros = random.pick(&[
                        1_000,
                        window / 3,
                        window,
                        2 * window,
                        60_000_000,
                        3_600_000_007,
                        86_400_000_000,
                        366 * 86_400_000_000,
                    ]);
                    Duration::from_micros(micros.clamp(1_000, 366 * 86_400_000_000))
                })
                .collect();
            let may_block = |quota: &&mut Quota| !quota.count_denied() && !quota.is_concurrency();
            for quota in quotas.iter_mut().filter(may_block) {
                *quota = quota.clone().with_block_for(&lengths).expect("valid lengths");
            }
        }
        self
    }

    /// Returns whether charges may have holds.
    pub(super) fn has_holds(&self) -> bool {
        !self.holds.is_empty()
    }

    /// Generates a sequence of holds, on rates and on units in flight.
    pub(super) fn of_holds(seed: u64) -> Self {
        let random = &mut Random(seed);
        let second = 1_000_000;
        let ttls = [second, 10 * second, 60 * second, 61 * second, 3_600 * second];
        let mut policies: Vec<(String, Vec<Quota>)> = Vec::new();
        for index in 0..=random.below(2) {
            let ttl = random.pick(&ttls);
            let on_expire = random.pick(&OnExpire::ALL);
            let max_ttl = random.pick(&[ttl, 2 * ttl, 24 * 3_600 * second]);
            let terms = HoldTerms::new(Duration::from_micros(ttl), Duration::from_micros(max_ttl))
                .expect("within the range");
            let quotas = if random.one_in(3) {
                let limit = random.pick(&[1, 2, 3, 10, 100]);
                let quota = |limit| Quota::concurrency(limit).expect("valid");
                vec![quota(limit), quota(2 * limit)]
            } else {
                quotas(&Algorithm::RATES, random)
            };
            // A reload may change the terms.
            let changed = &mut Random(!seed);
            let terms_vary = seed.is_multiple_of(3);
            let with_terms = |quota: Quota| {
                let on_expire = if terms_vary { changed.pick(&OnExpire::ALL) } else { on_expire };
                quota.with_holds(terms.with_on_expire(on_expire))
            };
            let quotas = quotas.into_iter().map(with_terms).collect();
            policies.push((format!("policy-{index}"), quotas));
        }
        let mut holds = Vec::new();
        for id in ["job-1", "job-2", "a:b*2", "*"] {
            let hold = || Hold::new(id).expect("valid");
            let ttl = Duration::from_micros(random.pick(&ttls));
            holds.push(hold());
            holds.push(hold().with_ttl(ttl).expect("valid"));
            holds.push(hold().settled(ttl.min(Duration::from_secs(600))).expect("valid"));
        }
        let mut sequence = Self { policies, holds, steps: Vec::new() };
        for _ in 0..2 * STEPS {
            let step = sequence.step_of_holds(random);
            sequence.steps.push(step);
        }
        sequence
    }

    fn step_of_holds(&self, random: &mut Random) -> Step {
        let second = 1_000_000;
        match random.below(100) {
            0..8 => {
                let rest = random.pick(&[1, second / 2, second, 9 * second, 60 * second]);
                Step::Advance(Advance::By(Duration::from_micros(rest)))
            }
            8..30 => self.step(random),
            _ => {
                let action = random.pick(&[
                    Action::Acquire,
                    Action::Acquire,
                    Action::Acquire,
                    Action::Commit,
                    Action::Commit,
                    Action::Renew,
                    Action::Refund,
                    Action::Peek,
                ]);
                let hold = random.index(self.holds.len());
                let Step::Decide(action, mut specs) = self.decide(action, random) else {
                    return self.step(random);
                };
                for spec in &mut specs {
                    // Units in flight are not settled at once.
                    let quota = &self.policies[spec.policy].1[spec.quota];
                    let is_settled = self.holds[hold].is_settled() && quota.is_concurrency();
                    spec.hold = Some(hold - usize::from(is_settled));
                    if action == Action::Commit {
                        spec.cost = random.pick(&[0, 1, spec.cost, spec.cost, 2 * spec.cost]);
                    }
                }
                Step::Decide(action, specs)
            }
        }
    }

    /// Generates a sequence in which one log grows to hundreds or thousands of requests, while
    /// others leave it.
    pub(super) fn of_long_log(seed: u64) -> Self {
        let random = &mut Random(seed);
        let window = random.pick(&[60_000_000, 86_400_000_000, 30 * 86_400_000_000]);
        let encoding = if seed.is_multiple_of(4) { Encoding::SortedSet } else { Encoding::Packed };
        let count_denied = random.one_in(3);
        // A packed log of more than 1,000 requests has another form.
        let limit =
            if random.one_in(3) { 2_000 + random.below(2_000) } else { 200 + random.below(600) };
        let quota = |limit: u64| {
            let quota =
                Quota::sliding_log(limit, Duration::from_micros(window)).expect("within the range");
            let quota = quota.with_encoding(encoding).expect("a log");
            quota.with_count_denied(count_denied).expect("a log")
        };
        let quotas = vec![quota(limit), quota(limit / 2), quota(limit * 2)];
        let policies = vec![("long".to_owned(), quotas)];
        let mut sequence = Self { policies, holds: Vec::new(), steps: Vec::new() };
        // Some logs have only costs of 1, because those are packed more tightly.
        let costs =
            if random.one_in(2) { vec![1] } else { vec![1, 1, 1, 1, 1, 1, 1, 2, 3, limit / 10] };
        let spec = |cost: u64| {
            vec![ChargeSpec { key: 0, policy: 0, quota: 0, cost, refunded: None, hold: None }]
        };
        for _ in 0..(2 * limit).max(2_000) {
            let cost = random.pick(&costs);
            sequence.steps.push(match random.below(1_000) {
                0..60 => sequence.step(random),
                60..600 => Step::Advance(Advance::By(Duration::from_micros(
                    random.below(3 * window / limit),
                ))),
                _ => Step::Decide(Action::Acquire, spec(cost)),
            });
        }
        sequence.with_rare_actions(seed)
    }

    /// Replaces some acquires by partial charges and reports, whose cost may be 0 or exceed the
    /// burst, sets the charge time of some refunds, and the cost of some peeks to 0. Only even
    /// seeds change, so that regressions found with odd seeds stay reproducible.
    fn with_rare_actions(mut self, seed: u64) -> Self {
        let random = &mut Random(!seed);
        for step in self.steps.iter_mut().filter(|_| seed.is_multiple_of(2)) {
            let Step::Decide(action, specs) = step else { continue };
            match action {
                Action::Acquire if random.one_in(6) => {
                    *action = if random.one_in(2) { Action::ChargeUpTo } else { Action::Report };
                    for spec in specs {
                        let min_cost = u64::from(*action != Action::ChargeUpTo);
                        spec.cost = random.pick(&[
                            min_cost,
                            spec.cost,
                            spec.cost,
                            2 * spec.cost,
                            Quota::MAX_LIMIT,
                        ]);
                    }
                }
                Action::Refund => {
                    let refunded = random.pick(&[0, 0, 0, 1, 1, 2, 3, 5, 10, 25]);
                    for spec in specs {
                        spec.refunded = Some(refunded);
                    }
                }
                Action::Peek if random.one_in(6) => specs.iter_mut().for_each(|spec| spec.cost = 0),
                _ => {}
            }
        }
        self
    }

    pub(super) fn charge(&self, spec: &ChargeSpec) -> Charge<'_> {
        let (name, quotas) = &self.policies[spec.policy];
        let charge = Charge::new(KEYS[spec.key], &quotas[spec.quota]);
        let charge = charge.with_policy(name).with_cost(spec.cost);
        spec.hold.map_or(charge, |hold| charge.with_hold(&self.holds[hold]))
    }

    /// Returns a charge for each count that the sequence may touch.
    pub(super) fn all_charges(&self) -> impl Iterator<Item = Charge<'_>> {
        let policies = self.policies.iter();
        policies.flat_map(|(name, quotas)| {
            KEYS.map(|key| Charge::new(key, &quotas[0]).with_policy(name))
        })
    }

    /// Returns charges for the counts whose policy has several windows, one for each quota.
    pub(super) fn charges_of_changed_windows(&self) -> impl Iterator<Item = Charge<'_>> {
        let window = |quota: &Quota| (quota.window(), quota.calendar().is_some());
        let changes =
            move |quotas: &[Quota]| quotas.iter().any(|quota| window(quota) != window(&quotas[0]));
        let policies = self.policies.iter().filter(move |(_, quotas)| changes(quotas));
        policies.flat_map(|(name, quotas)| {
            KEYS.into_iter().flat_map(move |key| {
                quotas.iter().map(move |quota| Charge::new(key, quota).with_policy(name))
            })
        })
    }

    fn step(&self, random: &mut Random) -> Step {
        match random.below(100) {
            0..10 => Step::Advance(Advance::RetryAfter { early: random.one_in(2) }),
            10..30 => {
                let quota = &self.policies[random.index(self.policies.len())].1[0];
                Step::Advance(Advance::By(Duration::from_micros(edge_case_time(quota, random))))
            }
            30..33 => {
                let quota = &self.policies[random.index(self.policies.len())].1[0];
                let back = random.pick(&[
                    1,
                    quota.window_micros() / 3,
                    quota.window_micros() * 2,
                    3_600_000_000,
                ]);
                Step::Rewind(Duration::from_micros(back))
            }
            33..75 => self.decide(Action::Acquire, random),
            75..85 => self.decide(Action::Peek, random),
            85..97 => Step::Decide(Action::Refund, vec![self.spec(0, random)]),
            _ => Step::Decide(Action::Reset, vec![self.spec(0, random)]),
        }
    }

    fn decide(&self, action: Action, random: &mut Random) -> Step {
        let key = random.index(KEYS.len());
        if self.policies.len() > 1 && random.one_in(3) {
            let first = random.index(self.policies.len());
            let second = (first + 1) % self.policies.len();
            let specs =
                [first, second].map(|policy| ChargeSpec { policy, ..self.spec(key, random) });
            // The quota and cost were drawn for another policy: limit them to this one.
            let specs = specs.map(|spec| {
                let quotas = &self.policies[spec.policy].1;
                let quota = spec.quota.min(quotas.len() - 1);
                ChargeSpec { quota, cost: spec.cost.min(quotas[quota].burst()), ..spec }
            });
            return Step::Decide(action, specs.to_vec());
        }
        Step::Decide(action, vec![self.spec(key, random)])
    }

    fn spec(&self, key: usize, random: &mut Random) -> ChargeSpec {
        let policy = random.index(self.policies.len());
        let quotas = &self.policies[policy].1;
        let quota = if random.one_in(8) { random.index(quotas.len()) } else { 0 };
        let max = quotas[quota].burst();
        let any = 1 + random.below(max);
        let cost = random.pick(&[1, 1, 1, 2, max / 3, max / 2, max - 1, max, any]);
        ChargeSpec { key, policy, quota, cost: cost.clamp(1, max), refunded: None, hold: None }
    }
}

/// Generates a quota with edge-case numbers, and variants with another limit or window.
fn quotas(algorithms: &[Algorithm], random: &mut Random) -> Vec<Quota> {
    let algorithm = random.pick(algorithms);
    let window = random.pick(&[
        1_000,
        1_000_000,
        1_000_003,
        60_000_000,
        3_600_000_000,
        5_000_000_000,
        86_400_000_000,
        30 * 86_400_000_000,
        366 * 86_400_000_000,
    ]);
    let largest =
        if algorithm == Algorithm::SlidingLog { Quota::MAX_LOG_LIMIT } else { Quota::MAX_LIMIT };
    let limit = random.pick(&[1, 2, 3, 5, 7, 10, 30, 100, 999_983, 1_000_000, largest]);
    let packed = random.one_in(2)
        || (algorithm == Algorithm::SlidingLog && 2 * limit > Quota::MAX_SORTED_SET_LIMIT);
    let count_denied = random.one_in(4);
    let burst = if random.one_in(4) {
        random.pick(&[1, 2, limit / 2, limit + 1, 3 * limit])
    } else {
        limit
    };
    let quota = |limit: u64, burst: u64| {
        let quota =
            Quota::new(algorithm, limit, Duration::from_micros(window)).expect("within the range");
        match algorithm {
            Algorithm::SlidingLog => {
                with_encoding(quota, packed).with_count_denied(count_denied).expect("a log")
            }
            Algorithm::SlidingCounter => with_encoding(quota, packed),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                quota.clone().with_burst(burst.clamp(1, Quota::MAX_LIMIT)).unwrap_or(quota)
            }
            Algorithm::FixedWindow | Algorithm::Concurrency => quota,
        }
    };
    let mut quotas = vec![quota(limit, burst)];
    // With a separate burst, the drain time of a bucket, and so its expiry, would depend on the
    // limit.
    if burst == limit {
        for other in [limit.div_ceil(2), (2 * limit).min(largest)] {
            quotas.push(quota(other, other));
        }
    }
    // Drawn last, so that the other quotas of a seed stay the same.
    if random.one_in(2) {
        let other = random.pick(&[60, 10, 3]);
        let windows = [window * other, window / other]
            .map(|window| window.clamp(1_000, 366 * 86_400_000_000));
        let changed = Quota::new(algorithm, limit, Duration::from_micros(windows[random.index(2)]));
        let changed = changed.expect("within the range");
        quotas.push(match algorithm {
            Algorithm::SlidingLog => {
                with_encoding(changed, packed).with_count_denied(count_denied).expect("a log")
            }
            Algorithm::SlidingCounter => with_encoding(changed, packed),
            _ => changed,
        });
    }
    quotas
}

/// Returns this log or counter, packed or readable.
fn with_encoding(quota: Quota, packed: bool) -> Quota {
    let encoding = match quota.algorithm() {
        _ if packed => Encoding::Packed,
        Algorithm::SlidingCounter => Encoding::Hash,
        _ => Encoding::SortedSet,
    };
    quota.with_encoding(encoding).expect("a log or a counter")
}

fn edge_case_time(quota: &Quota, random: &mut Random) -> u64 {
    let window = quota.window_micros();
    let unit = (window / quota.limit()).max(1);
    let any = random.below(2 * window);
    random.pick(&[
        1,
        unit - 1,
        unit,
        unit + 1,
        window / 10,
        window - 1,
        window,
        window + 1,
        2 * window,
        any,
    ])
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, quotas) in &self.policies {
            writeln!(f, "{name}: {quotas:#?}")?;
        }
        for (index, step) in self.steps.iter().enumerate() {
            writeln!(f, "{index:3} {step:?}")?;
        }
        Ok(())
    }
}

/// A `SplitMix64` generator: small and portable.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("less than a usize")
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }
}
