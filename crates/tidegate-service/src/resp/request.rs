//! Arguments of the commands that decide, as a query.

use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use tidegate::{Algorithm, ChargeError, Hold, Quota, QuotaError, UnknownName};
use tidegate_config::duration;

use super::command::{Command, shown};
use super::frame::Arguments;
use crate::state::Caller;
use tidegate_api::json::MAX_AGE_MS;
use tidegate_api::operation::Operation;

/// Query of a command.
#[derive(Debug, Clone)]
pub(super) struct CommandQuery<'a> {
    pub(super) operation: Operation,
    pub(super) key: &'a str,
    pub(super) target: LimitTarget<'a>,
    /// Units; `None` for those of the policy.
    pub(super) cost: Option<u64>,
    /// Age of the charge to be refunded, in milliseconds.
    pub(super) age_ms: Option<u64>,
    pub(super) hold: Option<Arc<Hold>>,
    /// Whether the reply has the names of its fields.
    pub(super) with_names: bool,
    /// Client of a reset, which is logged.
    pub(super) caller: Option<Caller>,
}

impl CommandQuery<'_> {
    /// Returns a hash of everything that is decided but the key. Equal requests have equal answers
    /// in any order.
    pub(super) fn identity(&self, hasher: &impl BuildHasher) -> u64 {
        let (kind, policy, quota) = match &self.target {
            LimitTarget::Policy(policy) => (0, *policy, 0),
            // A connection has one quota of the same numbers.
            LimitTarget::Quota(quota) => (1, "", Arc::as_ptr(quota).addr()),
            LimitTarget::Throttle(Dialect::Cell, quota) => (2, "", Arc::as_ptr(quota).addr()),
            LimitTarget::Throttle(Dialect::Crab, quota) => (3, "", Arc::as_ptr(quota).addr()),
        };
        hasher.hash_one((self.operation, kind, policy, quota, self.cost, self.age_ms))
    }

    /// Returns whether equal requests may be decided at the same time. With an id, the second one
    /// repeats the first.
    pub(super) fn is_repeatable(&self) -> bool {
        matches!(self.operation, Operation::Acquire | Operation::Peek) && self.hold.is_none()
    }
}

/// Limit that a command is about.
#[derive(Debug, Clone)]
pub(super) enum LimitTarget<'a> {
    Policy(&'a str),
    Quota(Arc<Quota>),
    Throttle(Dialect, Arc<Quota>),
}

/// Project whose command is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// `CL.THROTTLE` of redis-cell, with a limit of `max_burst` + 1.
    Cell,
    /// `THROTTLE` of throttlecrab, with a limit of `max_burst`.
    Crab,
}

/// Quotas that a connection has used last. Creating one costs more than a decision.
#[derive(Debug, Default)]
pub(super) struct QuotaCache {
    /// From the newest on.
    recent: Vec<(QuotaNumbers, Arc<Quota>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct QuotaNumbers {
    algorithm: Algorithm,
    limit: u64,
    window: Duration,
    burst: Option<u64>,
}

/// Number of quotas in a cache, which is searched one by one.
const MAX_CACHED: usize = 8;

impl QuotaCache {
    fn get(&mut self, numbers: QuotaNumbers) -> Result<Arc<Quota>, String> {
        if let Some((_, quota)) = self.recent.iter().find(|(known, _)| *known == numbers) {
            return Ok(Arc::clone(quota));
        }
        let QuotaNumbers { algorithm, limit, window, burst } = numbers;
        let quota = Quota::new(algorithm, limit, window).and_then(|quota| match burst {
            Some(burst) => quota.with_burst(burst),
            None => Ok(quota),
        });
        let quota = Arc::new(quota.map_err(|error| format!("ERR quota: {error}"))?);
        self.recent.truncate(MAX_CACHED - 1);
        self.recent.insert(0, (numbers, Arc::clone(&quota)));
        Ok(quota)
    }
}

/// Returns the operation of a command that decides; `None` for the others.
pub(super) fn operation(command: Command) -> Option<Operation> {
    Some(match command {
        Command::Acquire | Command::CellThrottle | Command::CrabThrottle => Operation::Acquire,
        Command::Reserve => Operation::Reserve,
        Command::Commit => Operation::Commit,
        Command::Renew => Operation::Renew,
        Command::Peek => Operation::Peek,
        Command::Refund => Operation::Refund,
        Command::Report => Operation::Report,
        Command::Reset => Operation::Reset,
        _ => return None,
    })
}

/// Parses the arguments of a command with this operation. The error is a reply.
pub(super) fn parse<'a>(
    command: Command,
    operation: Operation,
    arguments: Arguments<'a, '_>,
    quotas: &mut QuotaCache,
) -> Result<CommandQuery<'a>, String> {
    match command {
        Command::CellThrottle => throttle(command, Dialect::Cell, arguments, quotas),
        Command::CrabThrottle => throttle(command, Dialect::Crab, arguments, quotas),
        _ => query(command, operation, arguments, quotas),
    }
}

/// Parses `policy key …` or `KEY key QUOTA algorithm limit window …`.
fn query<'a>(
    command: Command,
    operation: Operation,
    arguments: Arguments<'a, '_>,
    quotas: &mut QuotaCache,
) -> Result<CommandQuery<'a>, String> {
    let argument = |index| arguments.get(index).ok_or_else(|| command.usage_error());
    let is_word = |index: usize, word: &str| {
        arguments.get(index).is_some_and(|text| text.eq_ignore_ascii_case(word.as_bytes()))
    };
    let has_quota = is_word(1, "KEY") && is_word(3, "QUOTA");
    let is_in_flight = has_quota && is_word(4, Algorithm::Concurrency.as_str());
    // Units in flight have no window.
    let after_target = if is_in_flight {
        6
    } else if has_quota {
        7
    } else {
        3
    };
    let is_of_hold = matches!(operation, Operation::Commit | Operation::Renew);
    let first_option = if is_of_hold { after_target + 2 } else { after_target };
    if arguments.len() < first_option {
        return Err(command.usage_error());
    }
    let given = arguments.text(after_target).filter(|_| is_in_flight && !is_of_hold);
    if given.is_some_and(|text| duration::parse(text).is_ok()) {
        return Err(format!("ERR quota: {}", QuotaError::NoWindow));
    }
    let mut options = Options::default();
    if is_of_hold {
        options.id = Some(text(arguments, after_target, "id")?);
        let number = |name| number(name, argument(after_target + 1)?);
        match operation {
            Operation::Commit => options.cost = Some(number("actual")?),
            _ => options.ttl_ms = Some(number("ttl")?),
        }
    }
    let mut index = first_option;
    let mut with_names = false;
    while index < arguments.len() {
        if is_word(index, "WITHNAMES") {
            with_names = true;
            index += 1;
        } else if is_word(index, "ID") && operation.fields().contains(&"id") && !is_of_hold {
            argument(index + 1)?;
            if options.id.replace(text(arguments, index + 1, "id")?).is_some() {
                return Err("ERR syntax error: ID is given twice".to_owned());
            }
            index += 2;
        } else {
            options.set(command, operation, has_quota, argument(index)?, argument(index + 1)?)?;
            index += 2;
        }
    }
    let Options { id, cost, age_ms, ttl_ms, burst } = options;
    match (operation, id) {
        (Operation::Refund, None) if age_ms.is_none() => {
            let usage = command.usage();
            return Err(format!("ERR a refund needs the age of its charge, or its id: {usage}"));
        }
        (Operation::Refund, Some(_)) if age_ms.is_some() || cost.is_some() => {
            return Err("ERR a refund by ID returns exactly the units of that id: send neither \
                        COST nor AGE"
                .to_owned());
        }
        (Operation::Acquire, None) if ttl_ms.is_some() => {
            return Err("ERR TTL is the time for which an ID is remembered: send ID, too".into());
        }
        _ => {}
    }
    let hold = operation.hold(id, ttl_ms).map_err(|error| format!("ERR {error}"))?;
    let target = if has_quota {
        let algorithm = text(arguments, 4, "algorithm")?;
        let algorithm = algorithm.parse().map_err(|error: UnknownName| format!("ERR {error}"))?;
        let window = if is_in_flight {
            Duration::ZERO
        } else {
            let window = text(arguments, 6, "window")?;
            duration::parse(window).map_err(|error| format!("ERR window: {error}"))?
        };
        let limit = number("limit", argument(5)?)?;
        LimitTarget::Quota(quotas.get(QuotaNumbers { algorithm, limit, window, burst })?)
    } else {
        LimitTarget::Policy(text(arguments, 1, "policy")?)
    };
    let key = text(arguments, 2, "key")?;
    Ok(CommandQuery { operation, key, target, cost, age_ms, hold, with_names, caller: None })
}

#[derive(Debug, Default)]
struct Options<'a> {
    id: Option<&'a str>,
    cost: Option<u64>,
    burst: Option<u64>,
    age_ms: Option<u64>,
    ttl_ms: Option<u64>,
}

impl Options<'_> {
    /// Sets an option of a command that is a number. Each may be given once, where it has a meaning.
    fn set(
        &mut self,
        command: Command,
        operation: Operation,
        has_quota: bool,
        name: &[u8],
        value: &[u8],
    ) -> Result<(), String> {
        let is = |word: &str| name.eq_ignore_ascii_case(word.as_bytes());
        let (option, name) = if is("COST") && operation.fields().contains(&"cost") {
            (&mut self.cost, "COST")
        } else if is("BURST") && has_quota {
            (&mut self.burst, "BURST")
        } else if is("AGE") && operation == Operation::Refund {
            (&mut self.age_ms, "AGE")
        } else if is("TTL") && matches!(operation, Operation::Acquire | Operation::Reserve) {
            (&mut self.ttl_ms, "TTL")
        } else {
            let (name, usage) = (shown(name), command.usage());
            return Err(format!("ERR syntax error near '{name}': {usage}"));
        };
        let number = number(name, value)?;
        if name == "COST" && number == 0 {
            return Err(format!("ERR {}", ChargeError::ZeroCost));
        }
        if name == "AGE" && number > MAX_AGE_MS {
            return Err(format!("ERR AGE is more than {MAX_AGE_MS} ms, the longest time"));
        }
        match option.replace(number) {
            None => Ok(()),
            Some(_) => Err(format!("ERR syntax error: {name} is given twice")),
        }
    }
}

/// Parses `key max_burst count period [quantity]`.
fn throttle<'a>(
    command: Command,
    dialect: Dialect,
    arguments: Arguments<'a, '_>,
    quotas: &mut QuotaCache,
) -> Result<CommandQuery<'a>, String> {
    if arguments.len() > 6 {
        return Err(command.usage_error());
    }
    let argument = |index| arguments.get(index).ok_or_else(|| command.usage_error());
    let key = text(arguments, 1, "key")?;
    let max_burst = number("max_burst", argument(2)?)?;
    let limit = number("count", argument(3)?)?;
    let period = number("period", argument(4)?)?;
    let quantity = arguments.get(5).map_or(Ok(1), |quantity| number("quantity", quantity))?;
    let burst = match dialect {
        Dialect::Cell => max_burst.saturating_add(1),
        Dialect::Crab => max_burst,
    };
    for (name, number) in [("count", limit), ("period", period), ("max_burst", burst)] {
        if number == 0 {
            return Err(format!("ERR {name} is 0: it must be at least 1"));
        }
    }
    let algorithm = Algorithm::TokenBucket;
    let window = Duration::from_secs(period);
    let quota = quotas.get(QuotaNumbers { algorithm, limit, window, burst: Some(burst) })?;
    // A quantity of 0 shows the state, in both projects. One above the capacity is never admitted.
    let is_peek = quantity == 0 || quantity > quota.burst();
    let operation = if is_peek { Operation::Peek } else { Operation::Acquire };
    Ok(CommandQuery {
        operation,
        key,
        target: LimitTarget::Throttle(dialect, quota),
        cost: Some(quantity),
        age_ms: None,
        hold: None,
        with_names: false,
        caller: None,
    })
}

/// Returns an argument, which the command has, as text.
fn text<'a>(arguments: Arguments<'a, '_>, index: usize, name: &str) -> Result<&'a str, String> {
    arguments.text(index).ok_or_else(|| format!("ERR the {name} is not UTF-8 text"))
}

/// Parses a number without a sign.
pub(super) fn number(name: &str, bytes: &[u8]) -> Result<u64, String> {
    let is_number = !bytes.is_empty() && bytes.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(bytes).ok().filter(|_| is_number);
    text.and_then(|text| text.parse().ok()).ok_or_else(|| {
        let (shown, max) = (shown(bytes), u64::MAX);
        format!("ERR {name} '{shown}' is not a whole number from 0 to {max}")
    })
}
