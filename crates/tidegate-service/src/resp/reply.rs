//! Replies in RESP2 and RESP3.

use tidegate::{Decision, PolicyDecision, PolicyDecisions};

use tidegate_api::duration::millis_rounded_up;

/// Version of the protocol, which a client chooses by `HELLO`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Protocol {
    #[default]
    Resp2,
    Resp3,
}

impl Protocol {
    pub(super) fn number(self) -> i64 {
        match self {
            Self::Resp2 => 2,
            Self::Resp3 => 3,
        }
    }
}

/// Reply of a command that decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    /// Reply of the `TG.` commands: an array in both versions, because the client's library
    /// chooses the version.
    Decision(DecisionReply),
    /// The same with the names of its fields: a map, which is a flat array in RESP2.
    NamedDecision(DecisionReply),
    /// Five numbers of `CL.THROTTLE` or `THROTTLE`, an array in both versions.
    Numbers([i64; 5]),
    /// Error with its code, such as `ERR`.
    Error(String),
}

/// Fields of a decision; durations in milliseconds, rounded up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DecisionReply {
    allowed: bool,
    limit: u64,
    remaining: u64,
    retry_after_ms: u64,
    reset_after_ms: u64,
    delay_ms: u64,
}

impl DecisionReply {
    /// Returns the binding decision, as the HTTP API shows it.
    pub(super) fn new(decisions: &PolicyDecisions<'_>) -> Self {
        let binding = decisions.binding().map_or(Decision::allow(0, 0), PolicyDecision::decision);
        let allowed = decisions.is_allowed();
        // A policy in shadow mode may deny although the request passes.
        let retry_after = if allowed { 0 } else { millis_rounded_up(binding.retry_after) };
        Self {
            allowed,
            limit: binding.limit,
            remaining: binding.remaining,
            retry_after_ms: retry_after,
            reset_after_ms: millis_rounded_up(binding.reset_after),
            delay_ms: millis_rounded_up(binding.delay),
        }
    }

    /// Returns the fields with their names, in the order of the reply.
    fn fields(&self) -> [(&'static str, u64); 6] {
        [
            ("allowed", u64::from(self.allowed)),
            ("limit", self.limit),
            ("remaining", self.remaining),
            ("retry_after_ms", self.retry_after_ms),
            ("reset_after_ms", self.reset_after_ms),
            ("delay_ms", self.delay_ms),
        ]
    }
}

/// Maximum length of a decision without the names of its fields: six numbers of 20 digits.
const MAX_DECISION_BYTES: usize = 160;

/// Writer of replies.
pub(super) struct Writer<'a> {
    pub(super) bytes: &'a mut Vec<u8>,
    pub(super) protocol: Protocol,
}

impl Writer<'_> {
    pub(super) fn reply(&mut self, reply: &Reply) {
        match reply {
            Reply::Decision(decision) => self.decision(decision),
            Reply::NamedDecision(decision) => self.named_decision(decision),
            Reply::Numbers(numbers) => {
                self.array(numbers.len());
                for number in numbers {
                    self.integer(*number);
                }
            }
            Reply::Error(message) => self.error(message),
        }
    }

    fn decision(&mut self, decision: &DecisionReply) {
        let [(_, allowed), rest @ ..] = decision.fields();
        self.bytes.reserve(MAX_DECISION_BYTES);
        self.bytes.extend_from_slice(b"*6\r\n:");
        self.digits(allowed);
        for (_, number) in rest {
            self.bytes.extend_from_slice(b"\r\n:");
            self.digits(number);
        }
        self.bytes.extend_from_slice(b"\r\n");
    }

    fn named_decision(&mut self, decision: &DecisionReply) {
        let fields = decision.fields();
        self.map(fields.len());
        for (name, number) in fields {
            self.bulk(name);
            self.integer(i64::try_from(number).unwrap_or(i64::MAX));
        }
    }

    #[inline]
    fn digits(&mut self, number: u64) {
        match u8::try_from(number) {
            Ok(digit @ 0..=9) => self.bytes.push(b'0' + digit),
            _ => self.bytes.extend_from_slice(itoa::Buffer::new().format(number).as_bytes()),
        }
    }

    pub(super) fn integer(&mut self, number: i64) {
        self.line(b':', number);
    }

    fn line(&mut self, kind: u8, number: i64) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
        self.bytes.extend_from_slice(b"\r\n");
    }

    fn header(&mut self, kind: u8, length: usize) {
        self.line(kind, i64::try_from(length).unwrap_or(i64::MAX));
    }

    pub(super) fn array(&mut self, length: usize) {
        self.header(b'*', length);
    }

    /// Starts a map, which is an array in RESP2.
    pub(super) fn map(&mut self, length: usize) {
        match self.protocol {
            Protocol::Resp2 => self.header(b'*', 2 * length),
            Protocol::Resp3 => self.header(b'%', length),
        }
    }

    /// Starts a set, which is an array in RESP2.
    pub(super) fn set(&mut self, length: usize) {
        match self.protocol {
            Protocol::Resp2 => self.header(b'*', length),
            Protocol::Resp3 => self.header(b'~', length),
        }
    }

    pub(super) fn null(&mut self) {
        self.bytes.extend_from_slice(match self.protocol {
            Protocol::Resp2 => b"$-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    pub(super) fn bulk(&mut self, text: impl AsRef<[u8]>) {
        self.header(b'$', text.as_ref().len());
        self.bytes.extend_from_slice(text.as_ref());
        self.bytes.extend_from_slice(b"\r\n");
    }

    pub(super) fn simple(&mut self, text: &str) {
        self.bytes.push(b'+');
        self.bytes.extend_from_slice(text.as_bytes());
        self.bytes.extend_from_slice(b"\r\n");
    }

    /// Writes an error. Line breaks would end it early, so they are replaced.
    pub(super) fn error(&mut self, message: &str) {
        self.bytes.push(b'-');
        let is_break = |byte: u8| matches!(byte, b'\r' | b'\n');
        let bytes = message.bytes().map(|byte| if is_break(byte) { b' ' } else { byte });
        self.bytes.extend(bytes);
        self.bytes.extend_from_slice(b"\r\n");
    }
}
