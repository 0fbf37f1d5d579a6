//! Replies in RESP2 and RESP3.

use tidegate::{Decision, PolicyDecision, PolicyDecisions};

use tidegate_api::duration::millis_rounded_up;
use tidegate_api::operation::HoldAnswer;

/// Version of the protocol, which a client chooses by `HELLO`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum RespVersion {
    #[default]
    Resp2,
    Resp3,
}

impl RespVersion {
    pub(super) fn number(self) -> i64 {
        match self {
            Self::Resp2 => 2,
            Self::Resp3 => 3,
        }
    }
}

/// Reply of a command that decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RespReply {
    /// Reply of the `TG.` commands: an array in both versions, because the client's library
    /// chooses the version.
    Decision([u64; FIELDS]),
    /// The same with the names of its fields: a map, which is a flat array in RESP2.
    NamedDecision([u64; FIELDS]),
    /// Decision on a request that has a hold: three more fields at the end.
    Held { fields: [u64; FIELDS], hold: Box<HoldFields>, with_names: bool },
    /// Five numbers of `CL.THROTTLE` or `THROTTLE`, an array in both versions.
    Numbers([i64; 5]),
    /// Error with its code, such as `ERR`.
    Error(String),
}

/// Number of fields of a decision.
const FIELDS: usize = 6;
const FIELD_NAMES: [&str; FIELDS] =
    ["allowed", "limit", "remaining", "retry_after_ms", "reset_after_ms", "delay_ms"];

/// Fields of a hold. A denied request holds nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HoldFields {
    id: Option<String>,
    expires_after_ms: u64,
    status: Option<&'static str>,
}

impl HoldFields {
    pub(super) fn new(answer: Option<HoldAnswer<'_>>) -> Self {
        Self {
            id: answer.map(|answer| answer.id.to_owned()),
            expires_after_ms: answer.map_or(0, |answer| answer.expires_after_ms),
            status: answer.and_then(|answer| Some(answer.status?.as_str())),
        }
    }
}

const HOLD_FIELD_NAMES: [&str; 3] = ["reservation", "expires_after_ms", "status"];

/// Returns the fields of the binding decision, as the HTTP API shows it; durations in milliseconds,
/// rounded up.
pub(super) fn decision_fields(decisions: &PolicyDecisions<'_>) -> [u64; FIELDS] {
    let binding = decisions.binding().map_or(Decision::allow(0, 0), PolicyDecision::decision);
    let allowed = decisions.is_allowed();
    // A policy in shadow mode may deny although the request passes.
    let retry_after_ms = if allowed { 0 } else { millis_rounded_up(binding.retry_after) };
    [
        u64::from(allowed),
        binding.limit,
        binding.remaining,
        retry_after_ms,
        millis_rounded_up(binding.reset_after),
        millis_rounded_up(binding.delay),
    ]
}

/// Maximum length of a decision without the names of its fields: six numbers of 20 digits.
const MAX_DECISION_BYTES: usize = 160;

/// Writer of replies.
pub(super) struct Writer<'a> {
    pub(super) bytes: &'a mut Vec<u8>,
    pub(super) protocol: RespVersion,
}

impl Writer<'_> {
    pub(super) fn reply(&mut self, reply: &RespReply) {
        match reply {
            RespReply::Decision(fields) => {
                self.bytes.reserve(MAX_DECISION_BYTES);
                self.array(fields.len());
                for field in fields {
                    self.line(b':', *field);
                }
            }
            RespReply::NamedDecision(fields) => {
                self.map(fields.len());
                self.named_fields(fields);
            }
            RespReply::Held { fields, hold, with_names } => {
                let length = fields.len() + HOLD_FIELD_NAMES.len();
                if *with_names {
                    self.map(length);
                    self.named_fields(fields);
                } else {
                    self.array(length);
                    for field in fields {
                        self.line(b':', *field);
                    }
                }
                self.hold(hold, *with_names);
            }
            RespReply::Numbers(numbers) => {
                self.array(numbers.len());
                for number in numbers {
                    self.integer(*number);
                }
            }
            RespReply::Error(message) => self.error(message),
        }
    }

    fn named_fields(&mut self, fields: &[u64; FIELDS]) {
        for (name, field) in FIELD_NAMES.iter().zip(fields) {
            self.bulk(name);
            self.integer(i64::try_from(*field).unwrap_or(i64::MAX));
        }
    }

    fn hold(&mut self, hold: &HoldFields, with_names: bool) {
        for (position, name) in HOLD_FIELD_NAMES.into_iter().enumerate() {
            if with_names {
                self.bulk(name);
            }
            match [hold.id.as_deref(), None, hold.status][position] {
                Some(text) => self.bulk(text),
                None if position == 1 => self.line(b':', hold.expires_after_ms),
                None => self.null(),
            }
        }
    }

    pub(super) fn integer(&mut self, number: i64) {
        self.line(b':', number);
    }

    fn line(&mut self, kind: u8, number: impl itoa::Integer) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
        self.bytes.extend_from_slice(b"\r\n");
    }

    pub(super) fn array(&mut self, length: usize) {
        self.line(b'*', length);
    }

    /// Starts a map, which is an array in RESP2.
    pub(super) fn map(&mut self, length: usize) {
        match self.protocol {
            RespVersion::Resp2 => self.line(b'*', 2 * length),
            RespVersion::Resp3 => self.line(b'%', length),
        }
    }

    /// Starts a set, which is an array in RESP2.
    pub(super) fn set(&mut self, length: usize) {
        match self.protocol {
            RespVersion::Resp2 => self.line(b'*', length),
            RespVersion::Resp3 => self.line(b'~', length),
        }
    }

    pub(super) fn null(&mut self) {
        self.bytes.extend_from_slice(match self.protocol {
            RespVersion::Resp2 => b"$-1\r\n",
            RespVersion::Resp3 => b"_\r\n",
        });
    }

    pub(super) fn bulk(&mut self, text: impl AsRef<[u8]>) {
        self.line(b'$', text.as_ref().len());
        self.bytes.extend_from_slice(text.as_ref());
        self.bytes.extend_from_slice(b"\r\n");
    }

    /// Writes an entry of a map.
    pub(super) fn pair(&mut self, name: &str, value: impl AsRef<[u8]>) {
        self.bulk(name);
        self.bulk(value);
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
