//! A sequence of steps, made from a seed.

use std::fmt;
use std::time::Duration;

use crate::algorithm::{Algorithm, Encoding};
use crate::charge::Charge;
use crate::quota::Quota;
use crate::store::Action;

const STEPS: u64 = 60;
const KEYS: [&str; 2] = ["user123", "{2001:db8::1}"];

#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// Each with the limits that it has at one time or another.
    policies: Vec<(String, Vec<Quota>)>,
    pub(super) steps: Vec<Step>,
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Advance(Advance),
    Back(Duration),
    Decide(Action, Vec<Part>),
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Advance {
    By(Duration),
    /// By the last `retry_after`, or a microsecond less.
    RetryAfter {
        early: bool,
    },
}

/// One charge of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    key: usize,
    policy: usize,
    quota: usize,
    cost: u64,
    /// A refund names the time of the charge made this number of decisions before, if any.
    pub(super) charged: Option<usize>,
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
    pub(super) fn from_seed(seed: u64) -> Self {
        let random = &mut Random(seed);
        let policies: Vec<(String, Vec<Quota>)> = (0..=random.below(2))
            .map(|index| (format!("policy-{index}"), quotas(random)))
            .collect();
        let mut sequence = Self { policies, steps: Vec::new() };
        for _ in 0..STEPS {
            let step = sequence.step(random);
            sequence.steps.push(step);
        }
        sequence.with_rare_actions(seed)
    }

    /// One log that grows to hundreds of requests and keeps turning over.
    pub(super) fn of_long_log(seed: u64) -> Self {
        let random = &mut Random(seed);
        let window = random.pick(&[60_000_000, 86_400_000_000, 30 * 86_400_000_000]);
        let encoding = if seed.is_multiple_of(4) { Encoding::SortedSet } else { Encoding::Packed };
        let count_denied = random.one_in(3);
        let limit = 200 + random.below(600);
        let quota = |limit: u64| {
            let quota =
                Quota::sliding_log(limit, Duration::from_micros(window)).expect("within the range");
            let quota = quota.with_encoding(encoding).expect("a log");
            quota.with_count_denied(count_denied).expect("a log")
        };
        let quotas = vec![quota(limit), quota(limit / 2), quota(limit * 2)];
        let mut sequence = Self { policies: vec![("long".to_owned(), quotas)], steps: Vec::new() };
        // Only cost 1 in some, for those are packed more tightly.
        let costs =
            if random.one_in(2) { vec![1] } else { vec![1, 1, 1, 1, 1, 1, 1, 2, 3, limit / 10] };
        let part = |cost: u64| vec![Part { key: 0, policy: 0, quota: 0, cost, charged: None }];
        for _ in 0..2_000 {
            let cost = random.pick(&costs);
            sequence.steps.push(match random.below(1_000) {
                0..60 => sequence.step(random),
                60..600 => Step::Advance(Advance::By(Duration::from_micros(
                    random.below(3 * window / limit),
                ))),
                _ => Step::Decide(Action::Acquire, part(cost)),
            });
        }
        sequence.with_rare_actions(seed)
    }

    /// Turns some acquires into takes and reports, which may cost more than could ever be admitted,
    /// or nothing; names the charges of some refunds; and asks some peeks for nothing. Only for
    /// even seeds, so that the odd ones go on showing what they once showed.
    fn with_rare_actions(mut self, seed: u64) -> Self {
        let random = &mut Random(!seed);
        for step in self.steps.iter_mut().filter(|_| seed.is_multiple_of(2)) {
            let Step::Decide(action, parts) = step else { continue };
            match action {
                Action::Acquire if random.one_in(6) => {
                    *action = if random.one_in(2) { Action::Take } else { Action::Report };
                    for part in parts {
                        let least = u64::from(*action != Action::Take);
                        part.cost = random.pick(&[
                            least,
                            part.cost,
                            part.cost,
                            2 * part.cost,
                            Quota::MAX_LIMIT,
                        ]);
                    }
                }
                Action::Refund => {
                    let charged = random.pick(&[0, 0, 0, 1, 1, 2, 3, 5, 10, 25]);
                    for part in parts {
                        part.charged = Some(charged);
                    }
                }
                Action::Peek if random.one_in(6) => parts.iter_mut().for_each(|part| part.cost = 0),
                _ => {}
            }
        }
        self
    }

    pub(super) fn charge(&self, part: &Part) -> Charge<'_> {
        let (name, quotas) = &self.policies[part.policy];
        Charge::new(KEYS[part.key], &quotas[part.quota]).with_policy(name).with_cost(part.cost)
    }

    /// Each count that the sequence may touch.
    pub(super) fn all_charges(&self) -> impl Iterator<Item = Charge<'_>> {
        let policies = self.policies.iter();
        policies.flat_map(|(name, quotas)| {
            KEYS.map(|key| Charge::new(key, &quotas[0]).with_policy(name))
        })
    }

    /// Each count whose policy has several windows, with each of its quotas.
    pub(super) fn charges_of_changed_windows(&self) -> impl Iterator<Item = Charge<'_>> {
        let changes =
            |quotas: &[Quota]| quotas.iter().any(|quota| quota.window() != quotas[0].window());
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
                Step::Advance(Advance::By(Duration::from_micros(interesting_time(quota, random))))
            }
            30..33 => {
                let quota = &self.policies[random.index(self.policies.len())].1[0];
                let back = random.pick(&[
                    1,
                    quota.window_micros() / 3,
                    quota.window_micros() * 2,
                    3_600_000_000,
                ]);
                Step::Back(Duration::from_micros(back))
            }
            33..75 => self.decide(Action::Acquire, random),
            75..85 => self.decide(Action::Peek, random),
            85..97 => Step::Decide(Action::Refund, vec![self.part(0, random)]),
            _ => Step::Decide(Action::Reset, vec![self.part(0, random)]),
        }
    }

    fn decide(&self, action: Action, random: &mut Random) -> Step {
        let key = random.index(KEYS.len());
        if self.policies.len() > 1 && random.one_in(3) {
            let first = random.index(self.policies.len());
            let second = (first + 1) % self.policies.len();
            let parts = [first, second].map(|policy| Part { policy, ..self.part(key, random) });
            // A part's numbers are those of another policy now; keep them within this one's.
            let parts = parts.map(|part| {
                let quotas = &self.policies[part.policy].1;
                let quota = part.quota.min(quotas.len() - 1);
                Part { quota, cost: part.cost.min(quotas[quota].burst()), ..part }
            });
            return Step::Decide(action, parts.to_vec());
        }
        Step::Decide(action, vec![self.part(key, random)])
    }

    fn part(&self, key: usize, random: &mut Random) -> Part {
        let policy = random.index(self.policies.len());
        let quotas = &self.policies[policy].1;
        let quota = if random.one_in(8) { random.index(quotas.len()) } else { 0 };
        let most = quotas[quota].burst();
        let any = 1 + random.below(most);
        let cost = random.pick(&[1, 1, 1, 2, most / 3, most / 2, most - 1, most, any]);
        Part { key, policy, quota, cost: cost.clamp(1, most), charged: None }
    }
}

/// A quota with numbers at the edges, and the same with a lower and a higher limit.
fn quotas(random: &mut Random) -> Vec<Quota> {
    let algorithm = random.pick(&Algorithm::ALL);
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
                let encoding = if packed { Encoding::Packed } else { Encoding::SortedSet };
                quota
                    .with_encoding(encoding)
                    .and_then(|quota| quota.with_count_denied(count_denied))
                    .expect("a log")
            }
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                quota.clone().with_burst(burst.clamp(1, Quota::MAX_LIMIT)).unwrap_or(quota)
            }
            _ => quota,
        }
    };
    let mut quotas = vec![quota(limit, burst)];
    // With a burst of its own a bucket would take another time to drain, and so to expire, at
    // another limit.
    if burst == limit {
        for other in [limit.div_ceil(2), (2 * limit).min(largest)] {
            quotas.push(quota(other, other));
        }
    }
    // Another window. (Drawn last, so that older seeds make the same quotas as ever.)
    if random.one_in(2) {
        let other = random.pick(&[60, 10, 3]);
        let windows = [window * other, window / other]
            .map(|window| window.clamp(1_000, 366 * 86_400_000_000));
        let changed = Quota::new(algorithm, limit, Duration::from_micros(windows[random.index(2)]));
        let changed = changed.expect("within the range");
        quotas.push(match algorithm {
            Algorithm::SlidingLog => {
                let encoding = if packed { Encoding::Packed } else { Encoding::SortedSet };
                let changed = changed.with_encoding(encoding).expect("a log");
                changed.with_count_denied(count_denied).expect("a log")
            }
            _ => changed,
        });
    }
    quotas
}

fn interesting_time(quota: &Quota, random: &mut Random) -> u64 {
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

/// `SplitMix64`: small, and the same on every machine.
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
