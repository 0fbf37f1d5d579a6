//! [`Field`]: what a part of a log line means, by the name that a server gives to it.

use std::sync::Arc;

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
    /// Name of the log that a program writes.
    Logger,
    /// Last text of nginx's usual format, which other formats use for something else.
    Forwarded,
}

impl Core {
    pub(super) const COUNT: usize = Self::Forwarded as usize + 1;
}

/// Parts by the letters and digits of their names in logs, and their ranks.
#[rustfmt::skip]
const CORES: &[(Core, u8, &str)] = &[
    // The start of a request is preferred to the time of its line.
    (Core::Time, 0, "startutc starttime startedat edgestarttimestamp requestreceivedtimestamp \
                     timestart"),
    (Core::Time, 1, "timelocal timeiso8601 msec ts time timestamp startlocal datetime eventtime \
                     reqtimesec requesttimeepoch eventtimestamp logtime accesstime"),
    (Core::Time, 2, "requesttime receivetimestamp asctime realtimetimestamp \
                     sourcerealtimetimestamp"),
    (Core::Date, 1, "date"),
    (Core::Address, 0, "clientip"),
    (Core::Address, 1, "remoteaddr remoteaddress remoteip remotehost remote clienthost client cip \
                        clientaddr clientaddress clientipaddress sourceip srcip src ip cliip \
                        downstreamremoteaddress downstreamremoteaddresswithoutport clientsrcip \
                        sourceipport clientipport"),
    (Core::Address, 2, "downstreamdirectremoteaddress downstreamdirectremoteaddresswithoutport \
                        realipremoteaddr socketip netpeerip networkpeeraddress peer peerip"),
    (Core::Request, 1, "request requestline req httprequest"),
    (Core::Method, 1, "method requestmethod httpmethod clientrequestmethod csmethod reqmethod"),
    (Core::Method, 2, "verb httpverb"),
    (Core::Target, 0, "originalrequesturiwithargs"),
    (Core::Target, 1, "requesturi xenvoyoriginalpath xenvoyoriginpath"),
    (Core::Target, 2, "target url requesturl clientrequesturi originalurl urloriginal \
                       requesttarget requestpath httptarget httpurl urlfull csuri \
                       protopayloadresource"),
    (Core::Target, 3, "uri urlpath csuristem reqpath httppath requesturipath uripath uristem"),
    (Core::Target, 4, "path clientrequestpath documenturi"),
    (Core::Target, 5, "resourcepath route"),
    (Core::Query, 1, "querystring args csuriquery urlquery requestquery querystr query uriquery"),
    (Core::Host, 0, "xhostheader originalhost"),
    (Core::Host, 1, "httphost requesthost authority clientrequesthost cshost reqhost vhost"),
    (Core::Host, 2, "host domain urldomain virtualhost"),
    (Core::Host, 3, "servername"),
    (Core::Status, 1, "status statuscode responsecode responsestatus httpstatus httpstatuscode \
                       edgeresponsestatus downstreamstatus scstatus responsestatuscode \
                       elbstatuscode"),
    (Core::Status, 2, "code respstatus resstatuscode responsestatuscodevalue"),
    (Core::Bytes, 1, "bodybytessent bytes responsesize scbytes edgeresponsebytes responsebytes \
                      downstreamcontentsize httpresponsebytes responsebodybytes sentbytes"),
    (Core::Bytes, 2, "bytessent size contentlength bodybytes rescontentlength"),
    (Core::User, 1, "remoteuser csusername clientusername authuser"),
    (Core::User, 2, "username user"),
    (Core::Cost, 1, "cost"),
    (Core::Message, 1, "log message msg line textpayload"),
    (Core::Forwarded, 1, "maybeforwarded"),
    (Core::Logger, 1, "logger"),
];

/// Headers by the letters and digits of their names in logs.
#[rustfmt::skip]
const HEADERS: &[(&str, &str)] = &[
    ("header.referer", "referer referrer httpreferrer csreferer clientrequestreferer"),
    ("header.user-agent", "useragent agent ua csuseragent clientrequestuseragent \
                           useragentoriginal"),
    ("header.x-forwarded-for", "xforwardedfor forwardedfor xff fwd clientrequestxff"),
];

/// Maximum number of the last names of a member that are compared.
const MAX_PARTS: usize = 8;

/// Objects with the parts of something else than the request.
const OTHER_SIDES: &str = "response resp res reply upstream server destination backend origin \
    observer agent host service kubernetes container target";

/// Names that the user gave, and their fields.
#[derive(Debug, Clone, Default)]
pub(super) struct FieldNames(pub(super) Arc<[(String, Field)]>);

impl FieldNames {
    /// Parses the values of `--field`.
    pub(super) fn new(flags: &[(String, String)]) -> Self {
        let named = |(name, path): &(String, String)| {
            let path = path.replace(['"', ']'], "").replace('[', ".");
            (path.trim_start_matches('.').to_owned(), Field::of_attribute(name))
        };
        Self(flags.iter().map(named).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the field that a name was given to.
    pub(super) fn get(&self, name: &str) -> Option<Field> {
        let same = |(known, _): &&(String, Field)| known.eq_ignore_ascii_case(name);
        self.0.iter().find(same).map(|(_, field)| field.clone())
    }
}

/// Returns whether a text has this word.
fn has(words: &str, wanted: &str) -> bool {
    words.split_ascii_whitespace().any(|word| word == wanted)
}

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
        let mut parts: Vec<String> = name.rsplit('.').take(MAX_PARTS).map(letters).collect();
        parts.reverse();
        if let [parents @ .., parent, _] = &parts[..]
            && ["headers", "header", "requestheaders", "reqheaders"].contains(&&**parent)
        {
            return match last {
                _ if parents.iter().any(|parent| has(OTHER_SIDES, parent)) => Self::Skip,
                host if host.eq_ignore_ascii_case("host") => Self::Core(Core::Host, 2),
                _ => header(last),
            };
        }
        for start in 0..parts.len() {
            let joined = parts[start..].concat();
            if let Some((core, rank, _)) = CORES.iter().find(|(.., names)| has(names, &joined)) {
                // The time of an inner object is that of something else.
                let is_inner = *core == Core::Time && start > 0;
                return Self::Core(*core, *rank + u8::from(is_inner));
            }
            if let Some((header, _)) = HEADERS.iter().find(|(_, names)| has(names, &joined)) {
                return Self::Attribute((*header).into());
            }
            if has(OTHER_SIDES, &parts[start]) {
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
