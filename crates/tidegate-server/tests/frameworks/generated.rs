//! Random spellings of a few values.

use std::fmt::Write as _;

use crate::app::{Request, percent};
use crate::seeded::Seeded;

/// Spaces around names and values, as bytes.
const SPACES: [&[u8]; 10] = [b"", b"", b"", b"", b" ", b"  ", b"\t", b"\xa0", b"\x85", b"\xc2\xa0"];

/// Values that clients have been given. Two are not their own normal form.
const VALUES: [&str; 4] = ["X", "a%3Db", "u.1-_~", "%58=="];

/// Returns a request whose identity is in the field.
pub(crate) fn request(field: &str, seeded: &mut Seeded) -> Request {
    match field {
        "cookie" => cookie(seeded),
        "header" => header(seeded),
        "query" => query(seeded),
        "token" => {
            let scheme = seeded.pick(&["Bearer", "bearer", "BEARER", "BeArEr"]);
            authorization("/token", scheme, b"X", seeded)
        }
        "basic" => {
            let credentials = base64(seeded);
            authorization("/basic", "Basic", &credentials, seeded)
        }
        _ => Request::get(&path(seeded)),
    }
}

fn cookie(seeded: &mut Seeded) -> Request {
    let mut line = Vec::new();
    for number in 0..=seeded.below(3) {
        if number > 0 {
            line.extend_from_slice(seeded.pick(&[
                b"; " as &[u8],
                b";",
                b"; ;",
                b" ; ",
                b" ",
                b",",
            ]));
        }
        line.extend_from_slice(seeded.pick(&SPACES));
        line.extend_from_slice(
            seeded
                .pick(&[
                    "session_id",
                    "session_id",
                    "session_id",
                    "a",
                    "Session_Id",
                    "s%65ssion_id",
                    "session.id",
                    "session[id",
                ])
                .as_bytes(),
        );
        line.extend_from_slice(seeded.pick(&SPACES));
        line.push(b'=');
        line.extend_from_slice(seeded.pick(&SPACES));
        let value = cookie_value(seeded);
        line.extend_from_slice(value.as_bytes());
        line.extend_from_slice(seeded.pick(&SPACES));
    }
    Request::get("/cookie").header("Cookie", line)
}

/// Encodes a value in the ways that frameworks decode, also one in another.
fn cookie_value(seeded: &mut Seeded) -> String {
    let mut value = seeded.pick(&VALUES).to_owned();
    for _ in 0..seeded.below(3) {
        value = match seeded.below(5) {
            0 => with_codes(&value, seeded),
            1 => format!("\"{value}\""),
            2 | 3 => {
                let mut quoted = String::from("\"");
                for character in value.chars() {
                    let _ = match seeded.below(4) {
                        0 => write!(quoted, "\\{:03o}", u32::from(character)),
                        1 => write!(quoted, "\\{character}"),
                        _ => write!(quoted, "{character}"),
                    };
                }
                quoted + "\""
            }
            _ => {
                let json = seeded.pick(&["j:\"{}\"", "j:[\"{}\"]", "j: \"{}\" "]);
                json.replace("{}", &value)
            }
        };
    }
    value
}

/// Replaces some characters by percent codes.
fn with_codes(value: &str, seeded: &mut Seeded) -> String {
    let mut encoded = String::new();
    for byte in value.bytes() {
        if seeded.once_in(2) {
            percent(&mut encoded, byte, seeded.once_in(2));
        } else {
            encoded.push(char::from(byte));
        }
    }
    encoded
}

fn header(seeded: &mut Seeded) -> Request {
    let mut request = Request::get("/header");
    for _ in 0..=seeded.below(2) {
        let name = seeded.pick(&["X-User-Id", "x-user-id", "X_User_Id", "X-User_Id", "X-Other"]);
        let spaces: [&[u8]; 4] = [b"", b" ", b"\t", b" \t"];
        let value =
            [seeded.pick(&spaces), seeded.pick(&VALUES).as_bytes(), seeded.pick(&spaces)].concat();
        request = request.header(name, value);
    }
    if seeded.once_in(4) { request.over_http2() } else { request }
}

fn query(seeded: &mut Seeded) -> Request {
    let mut target = String::from("/query?");
    for number in 0..=seeded.below(3) {
        if number > 0 {
            target.push_str(seeded.pick(&["&", "&", "&", ";", "&&"]));
        }
        let name = seeded.pick(&[
            "api_key",
            "api_key",
            "api_key",
            "API_KEY",
            "a",
            "api_key[]",
            "api.key",
            "[api_key]",
            "api key",
        ]);
        let name = if seeded.once_in(3) { with_codes(name, seeded) } else { (*name).into() };
        target.push_str(&name.replace(' ', "+"));
        target.push('=');
        let value = with_codes(seeded.pick(&VALUES), seeded);
        target.push_str(&value);
        target.push_str(seeded.pick(&["", "", "", "", "+", "%20", "%00", "%"]));
    }
    Request::get(&target)
}

fn authorization(target: &str, scheme: &str, value: &[u8], seeded: &mut Seeded) -> Request {
    let between = [seeded.pick(&[b" " as &[u8], b" ", b" ", b"\t"]), seeded.pick(&SPACES)].concat();
    let spaces = (seeded.pick(&SPACES), seeded.pick(&SPACES));
    let value = [spaces.0, scheme.as_bytes(), &between, value, spaces.1].concat();
    Request::get(target).header("Authorization", value)
}

/// Returns `ann:b` in base64, with a few changes that decoders may ignore.
fn base64(seeded: &mut Seeded) -> Vec<u8> {
    let mut text = b"YW5uOmI=".to_vec();
    for _ in 0..seeded.below(3) {
        let at = seeded.below(text.len() + 1);
        match seeded.below(3) {
            0 => text.insert(at, *seeded.pick(&[&b'=', &b'.', &b'-', &b'_', &b'A', &b' '])),
            1 if at < text.len() => drop(text.remove(at)),
            _ => text[6.min(at)] = *seeded.pick(&[&b'I', &b'J', &b'K', &b'L']),
        }
        if text.len() < 7 {
            return text;
        }
    }
    text
}

fn path(seeded: &mut Seeded) -> String {
    let mut path = String::new();
    for byte in "/limited/x".bytes() {
        match (byte, seeded.below(30)) {
            (b'/', 0 | 1) => path.push_str(seeded.pick(&["//", "/./", "/a/../", "/%2e/", "/;a/"])),
            (b'/', 2 | 3) => path.push_str(seeded.pick(&["%2F", "%2f", "%5C", "\\", "%252F"])),
            (_, 4) => percent(&mut path, byte, true),
            (_, 5) => percent(&mut path, byte, false),
            (_, 6) => path.push(char::from(byte).to_ascii_uppercase()),
            _ => path.push(char::from(byte)),
        }
    }
    if seeded.once_in(2) {
        path.push_str(seeded.pick(&[
            "/",
            "//",
            "/.",
            "%0A",
            "%0a",
            "%0D%0A",
            "%00",
            "%20",
            "%09",
            ";a=b",
            "?a",
            "%3F",
            "%",
            ".",
            "%2e",
            "%E2%80%A8",
            "%C2%85",
        ]));
    }
    path
}
