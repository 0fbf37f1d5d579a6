//! [`Field`]: what a part of a log line means, by the name that a server gives to it.

use std::borrow::Cow;

/// Meaning of a part of a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Field {
    Skip,
    /// Part that a request has once. Of several in a line, the one with the lowest rank is used.
    Core(Core, u8),
    /// Attribute, such as `header.referer`.
    Attribute(Box<str>),
}

/// Parts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Core {
    Time,
    Date,
    Address,
    /// Request line with method, target and version.
    Request,
    Method,
    Target,
    Query,
    Host,
    Status,
    Bytes,
    User,
    Cost,
    /// Text of an envelope, which may be a line of another format.
    Message,
    /// Last text of nginx's usual format, which other formats use for something else.
    Forwarded,
}

impl Core {
    pub(super) const COUNT: usize = Self::Forwarded as usize + 1;
}

/// Parts by the letters and digits of their names in logs, and their ranks.
const CORES: &[(Core, u8, &str)] = &[
    // The start of a request is preferred to the time of its line.
    (Core::Time, 0, "startutc starttime startedat edgestarttimestamp requestreceivedtimestamp"),
    (Core::Time, 1, "timelocal timeiso8601 msec ts time timestamp startlocal datetime eventtime"),
    (Core::Time, 1, "reqtimesec requesttimeepoch eventtimestamp logtime accesstime"),
    (
        Core::Time,
        2,
        "requesttime receivetimestamp asctime realtimetimestamp sourcerealtimetimestamp",
    ),
    (Core::Date, 1, "date"),
    (Core::Address, 0, "clientip"),
    (Core::Address, 1, "remoteaddr remoteaddress remoteip remotehost remote clienthost client cip"),
    (Core::Address, 1, "clientaddr clientaddress clientipaddress sourceip srcip src ip cliip"),
    (Core::Address, 1, "downstreamremoteaddress downstreamremoteaddresswithoutport clientsrcip"),
    (Core::Address, 2, "downstreamdirectremoteaddress downstreamdirectremoteaddresswithoutport"),
    (Core::Address, 2, "realipremoteaddr socketip netpeerip networkpeeraddress peer peerip"),
    (Core::Request, 1, "request requestline req httprequest"),
    (Core::Method, 1, "method requestmethod httpmethod clientrequestmethod csmethod reqmethod"),
    (Core::Method, 2, "verb httpverb"),
    (Core::Target, 0, "requesturi xenvoyoriginalpath"),
    (
        Core::Target,
        1,
        "target url requesturl clientrequesturi originalurl urloriginal requesttarget",
    ),
    (Core::Target, 1, "requestpath httptarget httpurl urlfull csuri"),
    (Core::Target, 2, "uri urlpath csuristem reqpath httppath requesturipath uripath uristem"),
    (Core::Target, 3, "path clientrequestpath documenturi"),
    (Core::Target, 4, "resourcepath route"),
    (Core::Query, 1, "querystring args csuriquery urlquery requestquery querystr query uriquery"),
    (Core::Host, 0, "xhostheader"),
    (Core::Host, 1, "httphost requesthost authority clientrequesthost cshost reqhost vhost"),
    (Core::Host, 2, "host domain urldomain virtualhost"),
    (Core::Host, 3, "servername"),
    (Core::Status, 1, "status statuscode responsecode responsestatus httpstatus httpstatuscode"),
    (
        Core::Status,
        1,
        "edgeresponsestatus downstreamstatus scstatus responsestatuscode elbstatuscode",
    ),
    (Core::Status, 2, "code respstatus resstatuscode responsestatuscodevalue"),
    (Core::Bytes, 1, "bodybytessent bytes responsesize scbytes edgeresponsebytes responsebytes"),
    (Core::Bytes, 1, "downstreamcontentsize httpresponsebytes responsebodybytes"),
    (Core::Bytes, 2, "bytessent size contentlength bodybytes rescontentlength"),
    (Core::User, 1, "remoteuser csusername clientusername authuser"),
    (Core::User, 2, "username user"),
    (Core::Cost, 1, "cost"),
    (Core::Message, 1, "log message msg line textpayload"),
    (Core::Forwarded, 1, "maybeforwarded"),
];

/// Headers by the letters and digits of their names in logs.
const HEADERS: &[(&str, &str)] = &[
    ("header.referer", "referer referrer httpreferrer csreferer clientrequestreferer"),
    (
        "header.user-agent",
        "useragent agent ua csuseragent clientrequestuseragent useragentoriginal",
    ),
    ("header.x-forwarded-for", "xforwardedfor forwardedfor xff fwd clientrequestxff"),
];

/// Objects with the parts of something else than the request.
const OTHER_SIDES: [&str; 16] = [
    "response",
    "resp",
    "res",
    "reply",
    "upstream",
    "server",
    "destination",
    "backend",
    "origin",
    "observer",
    "agent",
    "host",
    "service",
    "kubernetes",
    "container",
    "target",
];

impl Field {
    /// Returns the meaning of a name: of an nginx variable, a column, or a member of JSON whose
    /// parents are separated by dots.
    pub(super) fn named(name: &str) -> Self {
        let attribute = |text: String| Self::Attribute(text.into());
        let last = name.rsplit('.').next().unwrap_or(name);
        let header = |name: &str| attribute(format!("header.{}", name.replace('_', "-")));
        if let Some((kind, rest)) = name.split_once('.')
            && ["header", "query", "cookie"].contains(&kind)
            && !rest.contains('.')
        {
            return attribute(name.to_owned());
        }
        let parts: Vec<String> = name.split('.').map(letters).collect();
        if let [parents @ .., parent, _] = &parts[..]
            && ["headers", "header", "requestheaders", "reqheaders"].contains(&&**parent)
        {
            let is_other = parents.iter().any(|parent| OTHER_SIDES.contains(&&**parent));
            return if is_other { Self::Skip } else { header(last) };
        }
        for start in 0..parts.len() {
            let joined = parts[start..].concat();
            let has = |names: &str| names.split(' ').any(|name| name == joined);
            if let Some((core, rank, _)) = CORES.iter().find(|(.., names)| has(names)) {
                return Self::Core(*core, *rank);
            }
            if let Some((header, _)) = HEADERS.iter().find(|(_, names)| has(names)) {
                return Self::Attribute((*header).into());
            }
            if OTHER_SIDES.contains(&&*parts[start]) {
                return Self::Skip;
            }
        }
        // Headers, cookies and arguments of nginx, headers of Traefik, and those of the W3C format.
        let lower = last.to_ascii_lowercase();
        if let Some(name) = lower.strip_prefix("cs(").and_then(|name| name.strip_suffix(')')) {
            return if name == "host" { Self::Core(Core::Host, 2) } else { header(name) };
        }
        for (prefix, kind) in [("cookie_", "cookie."), ("arg_", "query.")] {
            if let Some(name) = last.strip_prefix(prefix) {
                return attribute(format!("{kind}{name}"));
            }
        }
        match lower.strip_prefix("http_").or_else(|| lower.strip_prefix("request_")) {
            Some(name) => header(name),
            None => Self::Skip,
        }
    }

    pub(super) fn header(name: &str) -> Self {
        Self::Attribute(format!("header.{}", name.to_ascii_lowercase()).into())
    }

    /// Returns the field that the user names: an attribute, or one of `time`, `target` and `cost`.
    pub(super) fn of_attribute(name: &str) -> Self {
        match Self::named(name) {
            Self::Core(core, _) => Self::Core(core, 0),
            Self::Skip => Self::Attribute(name.into()),
            header @ Self::Attribute(_) => header,
        }
    }
}

/// Returns the letters and digits of a name in lower case: servers separate words in all ways.
fn letters(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

/// Decodes `\xNN`, `\uNNNN`, and a backslash before another character.
pub(super) fn unescaped(escaped: Cow<'_, str>) -> Cow<'_, str> {
    if !escaped.contains('\\') {
        return escaped;
    }
    let mut plain = Vec::with_capacity(escaped.len());
    let mut rest = escaped.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = |from: usize, to: usize| {
            let digits = str::from_utf8(after.get(from..to)?).ok()?;
            u32::from_str_radix(digits, 16).ok()
        };
        let (character, used) = match (first, after) {
            (b'\\', [b'x' | b'X', ..]) => (hex(1, 3).and_then(char::from_u32), 4),
            (b'\\', [b'u', ..]) => (hex(1, 5).and_then(char::from_u32), 6),
            (b'\\', [b'n', ..]) => (Some('\n'), 2),
            (b'\\', [b't', ..]) => (Some('\t'), 2),
            (b'\\', [b'r', ..]) => (Some('\r'), 2),
            (b'\\', [escaped @ (b'"' | b'\\' | b'/'), ..]) => (Some(char::from(*escaped)), 2),
            _ => (None, 1),
        };
        match character {
            Some(character) if used == 6 => {
                plain.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
            }
            Some(byte) => plain.push(u8::try_from(u32::from(byte)).unwrap_or(b'?')),
            None => plain.push(*first),
        }
        let used = if character.is_some() { used } else { 1 };
        rest = &rest[used..];
    }
    Cow::Owned(tidegate::decode_value(&plain).into_owned())
}
