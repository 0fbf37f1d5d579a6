//! Spellings of `docs/spellings.md`, and others that frameworks accept.

use crate::app::Request;

/// Cookies as bytes: `\xa0` is a space in Latin-1, `\xc2\xa0` in UTF-8.
const COOKIES: &[&[u8]] = &[
    b"session=X",
    b"session =X",
    b"session=  X",
    b"session=X\t",
    b"session=\"X\"",
    b"a=b;session=X",
    b"session=%58",
    b"session=\"\\130\"",
    b"session=\"\\045\\065\\070\"",
    b"session=X\xa0",
    b"session=\xa0X",
    b"session=X\x85",
    b"session=X\xc2\xa0",
    b"session=\xe2\x80\x83X",
    b"session\xc2\xa0=X",
    b"session=R1; session\xc2\xa0=X",
    b"session=R2; session\xa0=X",
    b"session=R3; session=X",
    b"session=X; session=R4",
    b"session=X; session=X",
    b"a=\"; session=R5; b=\"; session=X",
    b"session=\"X;a\"",
    b"session=j:\"X\"",
    b"session=j%3A%22X%22",
    b"session=j:[\"X\"]",
    b"$Version=1; session=X; $Path=/",
    b"session=a%3Db",
    b"session=\"a\\0453Db\"",
    b"session=\"a%3\\104b\"",
    b"session=a%253Db",
    b"session=%61%253Db",
    b"session=%58%zz",
    b"session=%2558%25zz",
    b"session=%58%FF",
    b"session=%2558%25FF",
];

const TOKENS: &[&[u8]] = &[
    b"Bearer X",
    b"bearer X",
    b"BEARER X",
    b"Bearer  X",
    b"Bearer \t X",
    b"Bearer\tX",
    b"Bearer X\xa0",
    b"Bearer \xa0X",
    b"Bearer\xa0X",
    b"Bearer X\x85",
    b"Bearer X\xc2\xa0",
];

/// Spellings of `ann:b`.
const BASIC: &[&[u8]] = &[
    b"Basic YW5uOmI=",
    b"basic  YW5uOmI=",
    b"Basic YW5uOmI",
    b"Basic YW5uOmI==",
    b"Basic YW5uOmJ=",
    b"Basic YW5uOmK=",
    b"Basic YW5u!OmI=",
    b"Basic YW5u.OmI=",
    b"Basic YW5u-OmI=",
    b"Basic YW 5uOmI=",
    b"Basic YW5uOmI=AAAA",
    b"Basic YW5uOmI=\xa0",
];

const QUERIES: &[&str] = &[
    "api_key=X",
    "api_key=%58",
    "%61pi_key=X",
    "&api_key=X&",
    "api_key=X&api_key=X",
    "api_key=R1&api_key=X",
    "api_key=X&api_key=R2",
    "api_key=R3&%61pi_key=X",
    "api_key=R4;api_key=X",
    "api_key=R5&api_key[]=X",
    "api_key[]=X",
    "a=1;api_key=X",
    "api_key=X+",
    "api_key=X%00",
    "api_key=X%",
];

const PATHS: &[&str] = &[
    "/limited/x",
    "/limited/x/",
    "/limited%2Fx",
    "/limited%2fx",
    "/l%69mited/x",
    "/LIMITED/x",
    "//limited/x",
    "/limited//x",
    "/limited/./x",
    "/limited/%2e/x",
    "/a/../limited/x",
    "/a/%2E%2e/limited/x",
    "/a/%%32e%%32e/limited/x",
    "/limited;a/x",
    "/limited/x;a",
    "/a/..;/limited/x",
    "/limited%5Cx",
    "/limited\\x",
    "/limited/x?a=b",
    "/limited/x%3Fa",
    "/limited/x%0A",
    "/limited/x%0a",
    "/limited/x%00",
    "/limited/x%20",
    "/limited/%78",
    "/limited/%2578",
    "http://h/limited/x",
];

/// Returns a request in its usual spelling for each field, with the value that identifies it.
pub(crate) fn usual() -> [(&'static str, &'static str, Request); 6] {
    [
        ("cookie", "X", Request::get("/cookie").header("Cookie", "session=X")),
        ("header", "X", Request::get("/header").header("X-User-Id", "X")),
        ("query", "X", Request::get("/query?api_key=X")),
        ("token", "X", Request::get("/token").header("Authorization", "Bearer X")),
        ("basic", "ann:b", Request::get("/basic").header("Authorization", "Basic YW5uOmI=")),
        ("route", "limited", Request::get("/limited/x")),
    ]
}

/// Returns the spellings of each field that identifies a request.
pub(crate) fn all() -> Vec<(&'static str, Request)> {
    let mut all = Vec::new();
    for cookie in COOKIES {
        all.push(("cookie", Request::get("/cookie").header("Cookie", *cookie)));
    }
    let in_two = |first: &str, second: &str| {
        Request::get("/cookie").header("cookie", first).header("cookie", second).over_http2()
    };
    all.push(("cookie", in_two("session=R6", "session=X")));
    all.push(("cookie", in_two("session=X", "a=b")));
    for (field, values) in [("token", TOKENS), ("basic", BASIC)] {
        for value in values {
            let request = Request::get(&format!("/{field}")).header("Authorization", *value);
            all.push((field, request));
        }
    }
    for query in QUERIES {
        all.push(("query", Request::get(&format!("/query?{query}"))));
    }
    for path in PATHS {
        all.push(("route", Request::get(path)));
    }
    let header = |name: &str, value: &str| Request::get("/header").header(name, value);
    for request in [
        header("X-User-Id", "X"),
        header("x-USER-id", "X"),
        header("X-User-Id", " \t X \t"),
        header("X_User_Id", "X"),
        header("X-User-Id", "R1").header("X_User_Id", "X"),
        header("X_User_Id", "X").header("X-User-Id", "R2"),
        header("X-User-Id", "R3").header("X-User-Id", "X"),
        header("X-User-Id", "X").header("X-User-Id", "R4"),
    ] {
        all.push(("header", request));
    }
    for value in ["X ", " X", "\tX", "X\t", "  X  "] {
        all.push(("header", header("x-user-id", value).over_http2()));
        let bearer = Request::get("/token").header("authorization", format!("Bearer {value}"));
        all.push(("token", bearer.over_http2()));
    }
    for name in ["X-Original-URL", "X-Rewrite-URL", "X-Original-URI"] {
        all.push(("route", Request::get("/other").header(name, "/limited/x")));
    }
    all
}
