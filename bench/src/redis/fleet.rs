//! A fleet on one Redis: many instances, each with its own connection and few callers, so that most
//! calls carry few decisions. Compared with as many clients that call the naive script.
//!
//! The instances are in processes of their own, one per core. Some requests of all instances are
//! for the same users, whose limit is reached: exactly that number of requests must be allowed.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use super::Redis;
use super::decisions::LIMIT;
use super::naive::Structure;

pub(crate) mod worker;

pub(crate) const INSTANCES: usize = 50;
/// Callers of each instance.
pub(crate) const CALLERS: [usize; 2] = [4, 32];
pub(crate) const STRUCTURES: [Structure; 2] = [Structure::LogPacked, Structure::LogSortedSet];
pub(crate) const OURS: &str = "tidegate";
pub(crate) const NAIVE: &str = "naive script";

/// Users whose limit is reached in a turn.
const SHARED_USERS: usize = 4;

/// Task of a worker process, as its argument.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Task {
    url: String,
    structure: String,
    candidate: String,
    instances: usize,
    callers: usize,
    seconds: f64,
    seed: u64,
    /// Name of the shared users, different in each turn.
    shared: String,
}

/// Counts of the callers of a worker process.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Counts {
    /// Requests and allowed requests for random users.
    random: [u64; 2],
    /// The same for each shared user.
    shared: [[u64; 2]; SHARED_USERS],
    seconds: f64,
    cpu_seconds: f64,
}

impl Counts {
    fn decisions(&self) -> u64 {
        self.random[0] + self.shared.iter().map(|[requests, _]| requests).sum::<u64>()
    }

    fn add(&mut self, other: &Self) {
        let pairs = self.shared.iter_mut().zip(&other.shared);
        for (sum, counts) in pairs.chain([(&mut self.random, &other.random)]) {
            sum[0] += counts[0];
            sum[1] += counts[1];
        }
        self.seconds = self.seconds.max(other.seconds);
        self.cpu_seconds += other.cpu_seconds;
    }

    /// Returns the number of wrong answers: random users are always allowed, and shared users until
    /// their limit.
    fn wrong_answers(&self) -> u64 {
        let shared =
            self.shared.iter().map(|[requests, allowed]| (*requests).min(LIMIT).abs_diff(*allowed));
        self.random[0].abs_diff(self.random[1]) + shared.sum::<u64>()
    }
}

/// A worker process that has connected its instances.
struct Worker {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Worker {
    fn start(task: &Task) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(worker::COMMAND).arg(serde_json::to_string(task)?);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().context("stdin")?;
        let output = BufReader::new(child.stdout.take().context("stdout")?);
        let mut worker = Self { child, input, output };
        ensure!(worker.line()? == "ready", "a worker did not connect");
        Ok(worker)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn go(&mut self) -> Result<()> {
        Ok(writeln!(self.input, "go")?)
    }

    fn finish(mut self) -> Result<Counts> {
        let counts = serde_json::from_str(&self.line()?).context("a worker failed")?;
        ensure!(self.child.wait()?.success(), "a worker failed");
        Ok(counts)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the name of a case, for example `sliding-log, packed/4`.
pub(crate) fn case_name(structure: Structure, callers: usize) -> String {
    format!("{}/{callers}", structure.name())
}

pub(crate) fn run(plan: Plan) -> Result<()> {
    let redis = Redis::start()?;
    let mut results = Results::new("fleet", plan);
    let mut turns = Vec::new();
    for structure in STRUCTURES {
        for callers in CALLERS {
            for candidate in [OURS, NAIVE] {
                turns.push((structure, callers, candidate));
            }
        }
    }
    // A round before the first one loads the scripts and creates keys.
    for round in 0..=plan.rounds() {
        for turn in 0..turns.len() {
            // Rotate the order in each round, and alternate which candidate is the first.
            let (structure, callers, candidate) = turns[(turn + round) % turns.len()];
            let shared = format!("shared-{round}-{turn}");
            let (counts, micros, calls) =
                run_turn(plan, &redis, structure, callers, candidate, &shared)?;
            if round == 0 {
                continue;
            }
            let case = case_name(structure, callers);
            let decisions = counts.decisions() as f64;
            results.add(&case, candidate, "per_second", decisions / counts.seconds);
            results.add(&case, candidate, "redis_micros", micros / decisions);
            results.add(&case, candidate, "redis_share", micros / 1e6 / counts.seconds);
            results.add(&case, candidate, "redis_calls", calls / decisions);
            results.add(&case, candidate, "client_micros", counts.cpu_seconds * 1e6 / decisions);
            results.add(&case, candidate, "wrong_answers", counts.wrong_answers() as f64);
        }
    }
    for structure in STRUCTURES {
        for callers in CALLERS {
            let case = case_name(structure, callers);
            if let Some(ratio) = results.ratio("per_second", (&case, OURS), (&case, NAIVE)) {
                println!("{INSTANCES} instances, {case} callers each: {ratio} of the naive script");
            }
        }
    }
    results.save()
}

/// Runs a turn. Returns the counts, and the CPU time and the script calls of Redis.
fn run_turn(
    plan: Plan,
    redis: &Redis,
    structure: Structure,
    callers: usize,
    candidate: &str,
    shared: &str,
) -> Result<(Counts, f64, f64)> {
    let processes =
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(INSTANCES);
    let mut workers = Vec::new();
    for number in 0..processes {
        workers.push(Worker::start(&Task {
            url: redis.url(),
            structure: structure.name().to_owned(),
            candidate: candidate.to_owned(),
            instances: INSTANCES * (number + 1) / processes - INSTANCES * number / processes,
            callers,
            seconds: plan.turn().as_secs_f64(),
            seed: number as u64 * 1_000_000,
            shared: shared.to_owned(),
        })?);
    }
    redis.reset_statistics()?;
    let before = redis.cpu_seconds()?;
    for worker in &mut workers {
        worker.go()?;
    }
    let mut counts = Counts::default();
    for worker in workers {
        counts.add(&worker.finish()?);
    }
    Ok((counts, (redis.cpu_seconds()? - before) * 1e6, redis.script_calls()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_wrong_if_more_or_fewer_are_allowed() {
        let exact = Counts {
            random: [10, 10],
            shared: [[LIMIT + 5, LIMIT], [3, 3], [LIMIT, LIMIT], [0, 0]],
            ..Counts::default()
        };
        assert_eq!(exact.wrong_answers(), 0);
        let mut more = exact.clone();
        more.shared[0][1] += 2;
        more.random[1] -= 1;
        assert_eq!(more.wrong_answers(), 3);
    }
}
