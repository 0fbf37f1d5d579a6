//! Spellings of `docs/spellings.md`, and others that frameworks accept.

use crate::app::Request;

/// Cookies as bytes: `\xa0` is a space in Latin-1, `\xc2\xa0` in UTF-8.
const COOKIES: &[&[u8]] = &[
    b"session_id=X",
    b"session_id =X",
    b"session_id=  X",
    b"session_id=X\t",
    b"session_id=\"X\"",
    b"a=b;session_id=X",
    b"session_id=%58",
    b"session_id=\"\\130\"",
    b"session_id=\"\\045\\065\\070\"",
    b"session_id=X\xa0",
    b"session_id=\xa0X",
    b"session_id=X\x85",
    b"session_id=X\xc2\xa0",
    b"session_id=\xe2\x80\x83X",
    b"session_id\xc2\xa0=X",
    b"session_id=R1; session_id\xc2\xa0=X",
    b"session_id=R2; session_id\xa0=X",
    b"session_id=R3; session_id=X",
    b"session_id=X; session_id=R4",
    b"session_id=X; session_id=X",
    b"a=\"; session_id=R5; b=\"; session_id=X",
    b"session_id=\"X;a\"",
    b"session_id=j:\"X\"",
    b"session_id=j%3A%22X%22",
    b"session_id=j:[\"X\"]",
    b"$Version=1; session_id=X; $Path=/",
    b"session_id=a%3Db",
    b"session_id=\"a\\0453Db\"",
    b"session_id=\"a%3\\104b\"",
    b"session_id=a%253Db",
    b"session_id=%61%253Db",
    b"session_id=%58%zz",
    b"session_id=%2558%25zz",
    b"session_id=%58%FF",
    b"session_id=%2558%25FF",
    b"session.id=X",
    b"session id=X",
    b"session[id=X",
    b"session_id\x00a=X",
    b"Session_Id=X",
    b"session_id=R7; session.id=X",
    b"a=b session_id=X",
    b"a=b, session_id=X",
    b"a=b,session_id=X",
    b"session_id=R8 session_id=X",
    b"[session_id]=X",
    b"session_id[]=X",
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
    "api.key=X",
    "api+key=X",
    "api%20key=X",
    "api[key=X",
    "api%5Bkey=X",
    "api_key%00a=X",
    "+api_key=X",
    "[api_key]=X",
    "[api_key=X",
    "api_key]=X",
    "%5Bapi_key%5D=X",
    "API_KEY=X",
    "api_key=R6&api.key=X",
    "api_key=R7;api.key=X",
    "a;api_key=X",
    "api_key=X%20",
    "api_key=X%09",
    "api_key=+X",
    "api_key[a]=X",
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
        ("cookie", "X", Request::get("/cookie").header("Cookie", "session_id=X")),
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
    all.push(("cookie", in_two("session_id=R6", "session_id=X")));
    all.push(("cookie", in_two("session_id=X", "a=b")));
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
        header("X.User.Id", "X"),
        header("X~User~Id", "X"),
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
