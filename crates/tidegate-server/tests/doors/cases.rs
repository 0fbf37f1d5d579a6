//! The table of cases.

use std::fmt::Write as _;

use crate::door::Outcome::{self, Allowed, Denied, Error};

/// One kind of request, with its policy and the expected key.
pub(crate) struct Case {
    pub(crate) number: usize,
    pub(crate) name: &'static str,
    /// Attributes of the key.
    pub(crate) sources: &'static [&'static str],
    /// Further fields of the policy.
    pub(crate) policy_fields: &'static str,
    /// Request target.
    pub(crate) target: &'static str,
    /// `Host` header.
    pub(crate) host: &'static str,
    pub(crate) headers: Vec<(&'static str, Vec<u8>)>,
    /// Expected key; `None` if it is missing or invalid.
    pub(crate) key: Option<&'static str>,
    /// Values of the sources, for doors that take attributes instead of a request.
    pub(crate) values: Vec<String>,
    /// Value of the attribute that has the cost.
    pub(crate) cost: Option<&'static str>,
    /// Outcomes of the two requests.
    pub(crate) outcomes: [Outcome; 2],
}

impl Case {
    pub(crate) fn policy(&self) -> String {
        format!("case-{}", self.number)
    }

    fn fields(mut self, policy_fields: &'static str) -> Self {
        self.policy_fields = policy_fields;
        self
    }

    fn outcomes(mut self, outcomes: [Outcome; 2]) -> Self {
        self.outcomes = outcomes;
        self
    }

    fn header(mut self, name: &'static str, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Sends this value to doors that take attributes, instead of the key.
    fn value(mut self, value: &str) -> Self {
        self.values = vec![value.to_owned()];
        self
    }

    /// The request lacks the key.
    fn missing(self) -> Self {
        Self { key: None, values: Vec::new(), outcomes: [Allowed, Allowed], ..self }
    }

    /// The policy does not apply.
    fn exempt(self) -> Self {
        Self { key: None, outcomes: [Allowed, Allowed], ..self }
    }

    fn error(self, value: &str) -> Self {
        Self { key: None, outcomes: [Error, Error], ..self.value(value) }
    }

    fn cost(mut self, cost: &'static str) -> Self {
        self.cost = Some(cost);
        self.header("X-Cost", cost)
    }

    /// Returns the fields of the policy in YAML; `match_line` and `key` depend on the door.
    pub(crate) fn yaml(&self, match_line: &str, key: &str, cost_attribute: &str) -> String {
        let mut yaml = format!("  - name: {}\n    match: {match_line}\n", self.policy());
        if !self.sources.is_empty() {
            let _ = writeln!(yaml, "    key: [{key}]");
        }
        let fields = self.policy_fields.replace("COST", cost_attribute);
        let has_limit = fields.contains("limit:") && !fields.starts_with("overrides");
        if !has_limit && !fields.contains("limits:") {
            yaml.push_str("    limit: 1\n");
        }
        let _ = writeln!(yaml, "    window: 1d");
        let _ = writeln!(yaml, "    show_keys: plain");
        for line in fields.lines().filter(|line| !line.is_empty()) {
            let _ = writeln!(yaml, "    {line}");
        }
        yaml
    }
}

fn case(name: &'static str, sources: &'static [&'static str], key: &'static str) -> Case {
    Case {
        number: 0,
        name,
        sources,
        policy_fields: "",
        target: "/",
        host: "example.com",
        headers: Vec::new(),
        key: Some(key),
        values: vec![key.to_owned()],
        cost: None,
        outcomes: [Allowed, Denied],
    }
}

fn by_header(name: &'static str, value: impl Into<Vec<u8>>, key: &'static str) -> Case {
    case(name, &["header.x-user"], key).header("X-User", value)
}

fn by_cookie(name: &'static str, line: impl Into<Vec<u8>>, key: &'static str) -> Case {
    case(name, &["cookie.sid"], key).header("Cookie", line)
}

fn by_query(name: &'static str, target: &'static str, key: &'static str) -> Case {
    Case { target, ..case(name, &["query.q"], key) }
}

fn by_path(name: &'static str, target: &'static str, key: &'static str) -> Case {
    Case { target, ..case(name, &["path"], key) }.value(target)
}

fn by_host(name: &'static str, host: &'static str, key: &'static str) -> Case {
    Case { host, ..case(name, &["host"], key) }.value(host)
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = headers();
    cases.extend(cookies());
    cases.extend(queries());
    cases.extend(paths_hosts_and_addresses());
    cases.extend(policies());
    numbered(cases)
}

/// Cases of dot segments, which the Tower layer refuses: its application routes them literally.
pub(crate) fn dot_segments() -> Vec<Case> {
    numbered(vec![
        by_path("path with dot segments", "/a/./b/../c", "/a/c"),
        by_path("path with encoded dot segments", "/x/%2e%2E/a", "/a"),
        by_path("path above the root", "/../../a", "/a"),
    ])
}

/// Numbers the cases, for their policies.
fn numbered(mut cases: Vec<Case>) -> Vec<Case> {
    for (number, case) in cases.iter_mut().enumerate() {
        case.number = number;
    }
    cases
}

/// Cases that need the address of the client, which Envoy does not send as `ip`.
pub(crate) fn networks() -> Vec<Case> {
    const OVERRIDES: &str =
        "overrides: [{key: 10.0.0.0/8, limit: 2}, {key: 10.9.0.0/16, limit: 1}]";
    let by_ip = |name, address: &'static str, key| {
        case(name, &["ip"], key).header("X-Forwarded-For", address).value(address)
    };
    let two = [Allowed, Allowed];
    let cases = vec![
        by_ip("address in a network", "10.1.2.3", "10.1.2.3").fields(OVERRIDES).outcomes(two),
        by_ip("address in a longer network", "10.9.2.3", "10.9.2.3").fields(OVERRIDES),
        by_ip("address beside a network", "11.1.2.3", "11.1.2.3").fields(OVERRIDES),
        by_ip("mapped address", "::ffff:10.1.2.3", "10.1.2.3").fields(OVERRIDES).outcomes(two),
        by_ip("group in a network", "2001:db8:1:2::7", "2001:db8:1:2::/64")
            .fields("overrides: [{key: '2001:db8::/32', limit: 2}]")
            .outcomes(two),
        by_ip("exempt network", "10.1.2.3", "").fields("unless: [{ip: 10.0.0.0/8}]").exempt(),
        by_ip("exempt group", "fd00::1", "").fields("unless: [{ip: 'fd00::/8'}]").exempt(),
        by_ip("all of IPv4", "192.0.2.1", "").fields("unless: [{ip: 0.0.0.0/0}]").exempt(),
        by_ip("not exempt", "11.1.2.3", "11.1.2.3").fields("unless: [{ip: 10.0.0.0/8}]"),
        by_ip("entry that matches in part", "10.1.2.3", "10.1.2.3")
            .fields("unless: [{ip: 10.0.0.0/8, method: POST}]"),
    ];
    numbered(cases)
}

fn headers() -> Vec<Case> {
    let long: &'static str = Box::leak("x".repeat(512).into_boxed_str());
    let too_long = "x".repeat(513);
    vec![
        by_header("header", "ann", "ann"),
        case("header name in upper case", &["header.x-user"], "ann").header("X-USER", "ann"),
        // Doors that take attributes cannot have two values; they get an invalid one instead.
        by_header("repeated header", "ann", "").header("X-User", "bob").error("a\tb"),
        by_header("repeated header in another case", "ann", "")
            .header("x-user", "bob")
            .error("a\tb"),
        by_header("header in UTF-8", "jürgen", "jürgen"),
        by_header("header byte 0xFF", b"\xff", "ǿ"),
        by_header("header byte 0xFE", b"\xfe", "Ǿ"),
        by_header("header with an incomplete UTF-8 sequence", b"a\xc3", "aǃ"),
        by_header("header with spaces around", "  ann  ", "ann"),
        by_header("empty header", "", "").missing(),
        case("missing header", &["header.x-user"], "").missing(),
        by_header("header with a comma", "a,b", "a,b"),
        by_header("header with a bar", "a|b", "a|b"),
        by_header("header with braces and percent", "{a}%", "{a}%"),
        by_header("header with a tab", "a\tb", "").error("a\tb"),
        by_header("header of 513 bytes", too_long.clone(), "").error(&too_long),
        by_header("header of 512 bytes", long, long),
    ]
}

fn cookies() -> Vec<Case> {
    vec![
        by_cookie("cookie", "sid=1", "1"),
        by_cookie("cookie among others", "a=0; sid=1; b=2", "1"),
        by_cookie("cookie without spaces", "a=0;sid=1;b=2", "1"),
        by_cookie("cookie with spaces around the equals sign", "sid = 1", "1"),
        by_cookie("repeated cookie", "sid=1; sid=1", "1"),
        by_cookie("different cookies of one name", "sid=1; sid=2", "").error("a\tb"),
        by_cookie("cookies in two headers", "a=0", "1").header("Cookie", "sid=1"),
        by_cookie("empty cookie", "sid=", "").missing(),
        by_cookie("cookie without an equals sign", "sid", "").missing(),
        by_cookie("cookie with two equals signs", "sid=a=b", "a=b"),
        by_cookie("cookie name in another case", "SID=1", "").error("a\tb"),
        by_cookie("quoted cookie", "sid=\"1\"", "1"),
        by_cookie("cookie byte 0xFF", b"sid=\xff", "ǿ"),
        by_cookie("cookie with a longer name", "xsid=1; sidx=2", "").missing(),
    ]
}

fn queries() -> Vec<Case> {
    vec![
        by_query("query", "/?q=1", "1"),
        by_query("repeated query parameter", "/?a=0&q=1&q=1", "1"),
        by_query("different query parameters of one name", "/?q=1&q=2", "").error("a\tb"),
        by_query("plus in a query", "/?q=a+b", "a b"),
        by_query("percent code in a query", "/?q=a%20b", "a b"),
        by_query("wrong percent code", "/?q=%zz", "%zz"),
        by_query("incomplete percent code", "/?q=100%", "100%"),
        by_query("percent codes of UTF-8", "/?q=%C3%BC", "ü"),
        by_query("percent code 0xFF", "/?q=%FF", "ǿ"),
        by_query("percent code 0x80", "/?q=%80", "ƀ"),
        by_query("encoded parameter name", "/?%71=1", "1"),
        by_query("query parameter without a value", "/?q", "").missing(),
        by_query("parameter name in another case", "/?Q=1", "").error("a\tb"),
        by_query("query parameter with two equals signs", "/?q=a=b", "a=b"),
        by_query("percent code of a control character", "/?q=a%0Ab", "").error("a\nb"),
        by_query("percent code of spaces", "/?q=%0A+", "").missing(),
    ]
}

fn paths_hosts_and_addresses() -> Vec<Case> {
    let forwarded = |name, address: &'static str, key| {
        let case = case(name, &["ip"], key).header("X-Forwarded-For", address);
        Case { values: Vec::new(), ..case }
    };
    vec![
        by_path("path", "/a/b", "/a/b"),
        by_path("path with empty segments", "//a///b/", "/a/b"),
        by_path("path with percent codes", "/%61%c3%bc%", "/a%C3%BC%25"),
        by_path("path with a query", "/a?b=1", "/a"),
        by_host("host in upper case", "Example.COM", "example.com"),
        by_host("host with a port", "example.com:8080", "example.com"),
        by_host("host with a trailing dot", "example.com.", "example.com"),
        by_host("IPv6 host with a port", "[2001:DB8::1]:80", "[2001:db8::1]"),
        forwarded("forwarded address", "203.0.113.7", "203.0.113.7"),
        forwarded("forwarded IPv6 address", "2001:db8:0:1::7", "2001:db8:0:1::/64"),
        forwarded("several forwarded addresses", "8.8.8.8, 203.0.113.9", "203.0.113.9"),
        case("method", &["method"], "GET"),
    ]
}

fn policies() -> Vec<Case> {
    const COST: &str = "limit: 10\ncost: {attribute: COST, default: 6, max: 8}";
    let both = |name, user: &'static str, plan: &'static str, key| {
        let case = by_header(name, user, key).header("X-Plan", plan);
        let values = vec![user.to_owned(), plan.to_owned()];
        Case { sources: &["header.x-user", "header.x-plan"], values, ..case }
    };
    vec![
        Case { sources: &[], values: Vec::new(), ..case("policy without a key", &[], "all") },
        both("key of two attributes", "ann", "gold", "ann|gold"),
        both("key of two attributes with bars", "a|b", "c\\", "a\\|b|c\\\\"),
        by_header("cost by attribute", "ann", "ann").cost("7").fields(COST),
        by_header("default cost", "ann", "ann").fields(COST),
        by_header("invalid cost", "ann", "ann").cost("-1").fields(COST),
        by_header("cost above the maximum", "ann", "ann").cost("99").fields(COST),
        by_header("fixed cost", "ann", "ann").fields("limit: 3\ncost: 2"),
        by_header("overridden key", "acme", "acme")
            .fields("overrides: [{key: acme, limit: 2}]")
            .outcomes([Allowed, Allowed]),
        by_header("key beside an override", "ann", "ann")
            .fields("overrides: [{key: acme, limit: 2}]"),
        by_header("plan with a limit", "ann", "ann")
            .cost("pro")
            .fields("limits: {attribute: COST, pro: 2, other: 1}")
            .outcomes([Allowed, Allowed]),
        by_header("plan without a limit", "ann", "ann")
            .cost("basic")
            .fields("limits: {attribute: COST, pro: 2, other: 1}"),
        by_header("missing plan", "ann", "ann")
            .fields("limits: {attribute: COST, pro: 2, other: 1}"),
        by_header("exempt", "ann", "")
            .cost("internal")
            .fields("unless: [{COST: absent}, {COST: 'int*'}]")
            .exempt(),
        by_header("not exempt", "ann", "ann").cost("x-internal").fields("unless: [{COST: 'int*'}]"),
        by_header("shadow mode", "ann", "ann").fields("mode: shadow").outcomes([Allowed, Allowed]),
        case("missing key that is denied", &["header.x-user"], "")
            .missing()
            .fields("missing_key: deny")
            .outcomes([Denied, Denied]),
        case("missing key that is denied in shadow mode", &["header.x-user"], "")
            .missing()
            .fields("missing_key: deny\nmode: shadow"),
        by_header("invalid key in shadow mode", "a\tb", "")
            .error("a\tb")
            .fields("mode: shadow")
            .outcomes([Allowed, Allowed]),
        by_header("key that is blocked", "ann", "ann").fields("block_for: 2d"),
        by_header("bucket with blocks", "ann", "ann")
            .fields("algorithm: token-bucket\nlimit: 1\nblock_for: [2d, 1d]"),
        by_header("block in shadow mode", "ann", "ann")
            .fields("block_for: 2d\nmode: shadow")
            .outcomes([Allowed, Allowed]),
        by_header("token bucket", "ann", "ann").fields("algorithm: token-bucket\nlimit: 1"),
        by_header("leaky bucket", "ann", "ann").fields("algorithm: leaky-bucket\nlimit: 1"),
        by_header("bucket with a burst", "ann", "ann")
            .fields("algorithm: token-bucket\nlimit: 1\nburst: 2")
            .outcomes([Allowed, Allowed]),
    ]
}
