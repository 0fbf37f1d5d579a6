//! Generated traffic: the same seed gives the same requests on every platform.

use std::borrow::Cow;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::ensure;
use tidegate::Attributes;

use super::TrafficRequest;
use crate::tool::random::{MAX_KEYS, MAX_ZIPF, SeededRandom, Zipf};
use tidegate_api::duration;

/// Time of the first request, 2026-01-01 00:00 UTC: the start of a window of every usual length.
const START: u64 = 1_767_225_600_000_000;
/// Addresses of the clients: the number of the client is added.
const CLIENT_ADDRESSES: u32 = 0x0a00_0000;
/// Part of a period in which the requests of a burst arrive, on each side of a boundary.
const BURST_PART: f64 = 0.01;
/// Requests of the attacker, as a multiple of all others.
const ATTACK_FACTOR: f64 = 10.0;
/// Part of the mean by which the rate of a day rises and falls.
const DIURNAL_SWING: f64 = 0.8;

const MAX_REQUESTS: f64 = 1e10;
const MAX_RATE: f64 = 1e8;
const MAX_DURATION: Duration = Duration::from_secs(366 * 86_400);

/// Shape of the traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadKind {
    /// Evenly spaced requests
    Steady,
    /// All requests of a period at its start
    Burst,
    /// Just before and after every second boundary of a window: the worst case of fixed-window
    Boundary,
    /// Independent clients: random intervals with a constant mean
    Poisson,
    /// Independent clients whose rate rises and falls by 80 % over the period
    Diurnal,
    /// Independent clients, and one that sends ten times as much in the middle third
    Attack,
}

/// Generated traffic.
#[derive(Debug, Clone)]
pub struct GeneratedLoad {
    pub kind: LoadKind,
    /// Mean requests per second of all clients.
    pub rate: f64,
    pub keys: u64,
    /// Exponent of the distribution of requests over keys; 0 is uniform.
    pub zipf: f64,
    pub duration: Duration,
    pub seed: u64,
    /// Period of bursts, boundaries and days.
    pub period: Duration,
    /// Attributes that all requests have.
    pub attributes: Vec<(String, String)>,
}

/// Request of a generated load.
#[derive(Debug, Clone)]
pub struct LoadRequest<'a> {
    time: u64,
    key: u64,
    attributes: &'a [(String, String)],
}

impl GeneratedLoad {
    /// Checks that the numbers describe traffic that can be simulated.
    pub fn check(&self) -> anyhow::Result<()> {
        let Self { rate, keys, zipf, .. } = self;
        ensure!(
            *rate > 0.0 && *rate <= MAX_RATE,
            "--rate {rate} is out of range: it must be above 0, and at most {MAX_RATE} per second"
        );
        ensure!(
            (1..=MAX_KEYS).contains(keys),
            "--keys {keys} is out of range: it must be from 1 to {MAX_KEYS}"
        );
        ensure!(
            (0.0..=MAX_ZIPF).contains(zipf),
            "--zipf {zipf} is out of range: it must be from 0 (uniform) to {MAX_ZIPF}"
        );
        let limits = Duration::from_millis(1)..=MAX_DURATION;
        ensure!(
            limits.contains(&self.duration),
            "--duration {:?} is out of range: it must be from 1ms to 366d",
            self.duration
        );
        ensure!(
            limits.contains(&self.period),
            "--period {:?} is out of range: it must be from 1ms to 366d",
            self.period
        );
        let requests = rate * self.duration.as_secs_f64();
        ensure!(
            requests <= MAX_REQUESTS,
            "--rate {rate} for {:?} makes {requests:.0} requests: at most {MAX_REQUESTS} can be \
             simulated",
            self.duration
        );
        Ok(())
    }

    /// Returns the start and end, in microseconds since the Unix epoch.
    pub fn period(&self) -> (u64, u64) {
        (START, START + self.micros())
    }

    /// Returns the length in microseconds.
    pub fn micros(&self) -> u64 {
        duration::micros(self.duration)
    }

    /// Calls `on_request` with each request, in the order of their times.
    pub fn for_each<'a>(
        &'a self,
        mut on_request: impl FnMut(&LoadRequest<'a>, u64) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut random = SeededRandom::new(self.seed);
        let zipf = Zipf::new(self.keys, self.zipf);
        let end = self.micros();
        self.for_each_time(
            &mut SeededRandom::new(self.seed ^ 0x5bd1_e995),
            &mut |time, is_attacker| {
                if time >= end {
                    return Ok(false);
                }
                let key = if is_attacker { self.keys } else { zipf.sample(&mut random) };
                let attributes = &self.attributes;
                on_request(&LoadRequest { time: START + time, key, attributes }, time)?;
                Ok(true)
            },
        )
    }

    /// Calls `on_time` with the time of each request after the start, and whether it is that of the
    /// attacker, until it returns false.
    fn for_each_time(
        &self,
        random: &mut SeededRandom,
        on_time: &mut dyn FnMut(u64, bool) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let interval = 1e6 / self.rate;
        let period = micros_as_float(self.period);
        match self.kind {
            LoadKind::Steady | LoadKind::Burst | LoadKind::Boundary => {
                let mut number = 0;
                while on_time(to_micros(self.regular_time(number)), false)? {
                    number += 1;
                }
            }
            LoadKind::Poisson => {
                let mut time = 0.0;
                while on_time(to_micros(time), false)? {
                    time += interval * random.exponential();
                }
            }
            LoadKind::Diurnal => {
                // Candidates at the highest rate are taken as often as the rate at their time.
                let highest = 1.0 + DIURNAL_SWING;
                let mut time = 0.0;
                loop {
                    time += interval / highest * random.exponential();
                    let phase = libm::cos(2.0 * std::f64::consts::PI * time / period);
                    let rate = 1.0 - DIURNAL_SWING * phase;
                    let is_past_end = to_micros(time) >= self.micros();
                    let is_taken = random.uniform() * highest < rate || is_past_end;
                    if is_taken && !on_time(to_micros(time), false)? {
                        break;
                    }
                }
            }
            LoadKind::Attack => self.attack(random, on_time)?,
        }
        Ok(())
    }

    /// Returns the time of a request of a load without randomness, in microseconds.
    fn regular_time(&self, number: u64) -> f64 {
        let (number, interval) = (float(number), 1e6 / self.rate);
        let period = micros_as_float(self.period);
        let split = |position: f64| (position.floor(), position - position.floor());
        match self.kind {
            LoadKind::Burst => {
                let (whole, part) = split(number / (period / interval).max(1.0));
                (whole + part * BURST_PART) * period
            }
            LoadKind::Boundary => {
                let (whole, part) = split(number / (2.0 * period / interval).max(2.0));
                let offset = 1.0 + (part - 0.5) * 2.0 * BURST_PART;
                (2.0 * whole + offset) * period
            }
            _ => number * interval,
        }
    }

    fn attack(
        &self,
        random: &mut SeededRandom,
        on_time: &mut dyn FnMut(u64, bool) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let interval = 1e6 / self.rate;
        let duration = micros_as_float(self.duration);
        let attack_end = 2.0 * duration / 3.0;
        let (mut next, mut next_attack) = (0.0, duration / 3.0);
        loop {
            let is_attacker = next_attack < next;
            let time = if is_attacker { next_attack } else { next };
            if !on_time(to_micros(time), is_attacker)? {
                return Ok(());
            }
            if is_attacker {
                next_attack += interval / ATTACK_FACTOR;
                if next_attack >= attack_end {
                    next_attack = f64::INFINITY;
                }
            } else {
                next += interval * random.exponential();
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "below 2^53")]
fn float(number: u64) -> f64 {
    number as f64
}

fn micros_as_float(duration: Duration) -> f64 {
    float(duration::micros(duration))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times are positive; a cast saturates"
)]
fn to_micros(time: f64) -> u64 {
    time as u64
}

impl TrafficRequest for LoadRequest<'_> {
    fn time(&self) -> u64 {
        self.time
    }

    fn address(&self) -> Option<Cow<'_, str>> {
        if let Some(address) = self.fixed("ip") {
            return Some(Cow::Borrowed(address));
        }
        let number = u32::try_from(self.key).unwrap_or(u32::MAX);
        let address = Ipv4Addr::from(CLIENT_ADDRESSES.saturating_add(number));
        Some(Cow::Owned(address.to_string()))
    }

    fn cost(&self) -> Option<u64> {
        None
    }
}

impl LoadRequest<'_> {
    fn fixed(&self, name: &str) -> Option<&str> {
        let same = |(fixed, _): &&(String, String)| fixed.eq_ignore_ascii_case(name);
        self.attributes.iter().find(same).map(|(_, value)| value.as_str())
    }
}

impl Attributes for LoadRequest<'_> {
    /// Returns the value of all requests, or the name of the client, so that a policy can count by
    /// any attribute.
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        let value = match (self.fixed(name), name) {
            (Some(value), _) => value,
            (None, "method") => "GET",
            (None, "path") => "/",
            (None, "host") => "localhost",
            (None, _) => return Some(Cow::Owned(format!("client-{}", self.key))),
        };
        Some(Cow::Borrowed(value))
    }
}

#[cfg(test)]
mod tests;
