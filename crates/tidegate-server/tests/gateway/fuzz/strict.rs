//! Parser of HTTP/1.1 that accepts nothing ambiguous.

/// Requests in what a client sends.
pub(super) struct Requests {
    /// Methods of the requests that are complete.
    pub(super) methods: Vec<String>,
    /// Number of requests whose head is complete.
    pub(super) started: usize,
}

/// Head of a message: the start line, and the names (in lower case) and values of the fields.
pub(super) struct Head {
    pub(super) start: String,
    pub(super) fields: Vec<(String, String)>,
}

impl Head {
    pub(super) fn values(&self, name: &str) -> Vec<&str> {
        let fields = self.fields.iter().filter(|(key, _)| key == name);
        fields.map(|(_, value)| value.as_str()).collect()
    }
}

/// Length of a message's body.
pub(super) enum Framing {
    Length(usize),
    Chunked,
}

/// Parses the requests up to the first that is incomplete or ambiguous, or the last of the
/// connection.
pub(super) fn requests(bytes: &[u8]) -> Requests {
    let mut found = Requests { methods: Vec::new(), started: 0 };
    let mut rest = bytes;
    loop {
        while let Some(after) = rest.strip_prefix(b"\r\n") {
            rest = after;
        }
        let Some((Ok(head), body)) = head(rest) else { return found };
        let Ok(framing) = framing(&head) else { return found };
        found.started += 1;
        let Some((_, after)) = body_of(&framing, body) else { return found };
        let method = head.start.split(' ').next().unwrap_or_default();
        found.methods.push(method.to_owned());
        rest = after;
    }
}

/// Parses a head: the error says what is wrong. `None` if it is incomplete.
pub(super) fn head(bytes: &[u8]) -> Option<(Result<Head, &'static str>, &[u8])> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    Some((parse_head(&bytes[..end]), &bytes[end + 4..]))
}

fn parse_head(bytes: &[u8]) -> Result<Head, &'static str> {
    // A byte beyond ASCII becomes the character of Latin-1.
    let text: String = bytes.iter().map(|byte| char::from(*byte)).collect();
    let mut lines = text.split("\r\n");
    let start = lines.next().unwrap_or_default().to_owned();
    let is_token = |character: char| {
        character.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(character)
    };
    let mut fields = Vec::new();
    for line in lines {
        let (name, value) = line.split_once(':').ok_or("a field without a colon")?;
        if name.is_empty() || !name.chars().all(is_token) {
            return Err("the name of a field");
        }
        fields.push((name.to_ascii_lowercase(), value.trim_matches([' ', '\t']).to_owned()));
    }
    let is_wrong = |character: char| character.is_ascii_control() && character != '\t';
    if start.contains(is_wrong) || fields.iter().any(|(_, value)| value.contains(is_wrong)) {
        return Err("a control character");
    }
    Ok(Head { start, fields })
}

/// Returns the length of the body, or what is wrong with it.
pub(super) fn framing(head: &Head) -> Result<Framing, &'static str> {
    match (&head.values("content-length")[..], &head.values("transfer-encoding")[..]) {
        ([], []) => Ok(Framing::Length(0)),
        ([], [encoding]) if encoding.eq_ignore_ascii_case("chunked") => Ok(Framing::Chunked),
        ([length], [])
            if !length.is_empty() && length.bytes().all(|byte| byte.is_ascii_digit()) =>
        {
            length.parse().map(Framing::Length).map_err(|_| "a long Content-Length")
        }
        _ => Err("ambiguous framing"),
    }
}

/// Returns the body and the bytes behind it; `None` if it is incomplete or malformed.
pub(super) fn body_of<'b>(framing: &Framing, bytes: &'b [u8]) -> Option<(Vec<u8>, &'b [u8])> {
    let mut rest = bytes;
    let mut body = Vec::new();
    match framing {
        Framing::Length(length) => {
            let (data, after) = bytes.split_at_checked(*length)?;
            return Some((data.to_vec(), after));
        }
        Framing::Chunked => loop {
            let (line, after) = line(rest)?;
            let digits = line.split(|byte| *byte == b';').next().unwrap_or_default();
            let digits = str::from_utf8(digits.trim_ascii_end()).ok()?;
            if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return None;
            }
            let size = usize::from_str_radix(digits, 16).ok()?;
            rest = after;
            if size == 0 {
                break;
            }
            let (data, after) = rest.split_at_checked(size)?;
            body.extend_from_slice(data);
            rest = after.strip_prefix(b"\r\n")?;
        },
    }
    loop {
        let (trailer, after) = line(rest)?;
        rest = after;
        if trailer.is_empty() {
            return Some((body, rest));
        }
    }
}

fn line(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.windows(2).position(|window| window == b"\r\n")?;
    Some((&bytes[..end], &bytes[end + 2..]))
}

/// Response of the gateway.
pub(super) struct Response(Head);

impl Response {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.0.values(name).first().copied()
    }
}

/// Parses the complete responses to requests of these methods.
pub(super) fn responses(bytes: &[u8], methods: &[String]) -> Vec<Response> {
    let mut responses = Vec::new();
    let mut rest = bytes;
    while let Some((parsed, body)) = head(rest) {
        let response = parsed.unwrap_or_else(|wrong| panic!("{wrong} in {}", rest.escape_ascii()));
        rest = body;
        let status = response.start.split(' ').nth(1).unwrap_or_default();
        if status.starts_with('1') {
            continue;
        }
        let is_head = methods.get(responses.len()).is_some_and(|method| method == "HEAD");
        if !is_head && !["204", "304"].contains(&status) {
            let length = framing(&response).unwrap_or_else(|wrong| panic!("{wrong}: {status}"));
            let Some((_, after)) = body_of(&length, rest) else { break };
            rest = after;
        }
        responses.push(Response(response));
    }
    responses
}
