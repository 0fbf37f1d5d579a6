//! Private idioms, with the words of the field in their place.

/// Idioms that are found as words of a text and as parts of an identifier; forms are separated by
/// `|`.
pub(super) const IDIOM_WORDS: &[(&str, &str)] = &[
    ("told|untold", "reported, sent, answered, logged"),
    ("tell|tells|telling", "report, send, return, log, distinguish"),
    ("nobody", "no client, no caller, no task"),
    ("somebody", "a client, another task"),
    ("everybody", "all clients, all callers"),
    ("anew", "again"),
    ("seldom", "rarely; for logs: throttled"),
    ("patience|patient", "timeout"),
    ("stir|stirs|stirred", "trigger a refresh"),
    ("trouble", "error, failure, outage"),
    ("whoever", "the client that, the task that"),
    ("alike", "equal, the same, in the same way"),
];

/// Idioms of several words, found in texts and in the names of functions.
pub(super) const IDIOM_PHRASES: &[(&str, &str)] = &[
    ("under way", "in flight, in progress"),
    ("so many|so much", "the number, for example `n` requests"),
    ("but for", "except for"),
    ("is none|are none", "is absent, does not exist, is invalid"),
    ("by itself|by themselves", "alone, on its own, automatically"),
    ("as good as", "equivalent to, treated as"),
    ("in vain", "without success, unsuccessfully"),
    ("without end", "forever, indefinitely"),
    ("all the same", "anyway, nevertheless"),
    ("step aside|steps aside|stepped aside", "yield"),
    ("put aside", "preempted, parked, set apart"),
    ("turn away|turns away|turned away", "reject"),
    ("give back|gives back|given back|gave back", "return, refund, release"),
    ("at the door", "during the handshake, on connect"),
    ("own word|their word", "own setting, own policy"),
    ("waited for nothing|waits for nothing", "unnecessarily, without a result"),
    ("well enough", "sufficiently"),
    ("stand still|stands still", "stall"),
    ("go away|goes away|gone away", "disconnect, disappear"),
    ("in peace", "undisturbed, until its deadline"),
    ("one too many", "above the limit"),
    ("looked at", "checked, read, inspected"),
    ("say of|says of", "report about"),
    ("straight line|straight lines", "fast path"),
    ("ordinary path|usual path|rare path", "fast path, slow path"),
];

/// Phrases that are allowed in the names of functions: `is_none` is a method of `Option`.
pub(super) const METHOD_NAMES: [&str; 1] = ["is none"];

/// Pronouns that must not start a sentence, except in a question.
pub(super) const CLAUSE_SUBJECTS: [&str; 2] = ["who", "what"];

/// Counted things in "a request a second", which is written "one request per second".
pub(super) const COUNTED: &str = "request decision call unit denial key file line byte connection";

/// Units of time and other things after "per".
pub(super) const TIMES: &str = "second minute hour day";
pub(super) const OTHERS: &str = "call request decision key command node policy suite";

/// Parts of the name of a constant that bounds or waits.
pub(super) const BOUND_WORDS: &str =
    "MAX MIN TIMEOUT INTERVAL BACKOFF JITTER TTL DEADLINE DEBOUNCE AFTER EJECTION";

/// Units of time: a constant of this name is a value, not a bound.
pub(super) const TIME_UNITS: [&str; 5] = ["MILLISECOND", "SECOND", "MINUTE", "HOUR", "DAY"];

/// Parts of a constant's name that stand for a word of the field.
pub(super) const CONSTANT_WORDS: &[(&str, &str)] = &[
    ("PATIENCE", "…_TIMEOUT"),
    ("PAUSE", "…_INTERVAL or …_BACKOFF"),
    ("LONGEST", "MAX_…"),
    ("LARGEST", "MAX_…"),
    ("MOST", "MAX_…"),
    ("ENOUGH", "MIN_…"),
    ("LEAST", "MIN_…"),
    ("OLDEST", "MIN_…"),
    ("CALM", "IDLE_… or HEALTHY_…"),
    ("BEAT", "HEARTBEAT_…"),
    ("LOOKS", "…_POLLS, …_ATTEMPTS, …_SAMPLES"),
    ("A", "…_PER_…"),
];

/// Parts of a constant's name that need one of the forms above.
pub(super) const ORDINALS: [&str; 2] = ["FIRST", "LAST"];
