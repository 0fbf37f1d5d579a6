use http::Request;

use super::*;

fn head(uri: &str, headers: &[(&str, &str)]) -> Parts {
    let mut request = Request::builder().uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).expect("a request").into_parts().0
}

fn attribute(head: &Parts, name: &str) -> Option<String> {
    let client_ip = ClientIp::default();
    RequestParts::new(head, None, &client_ip).get(name).map(Cow::into_owned)
}

#[test]
fn every_attribute_of_the_design_is_read() {
    let headers = [
        ("host", "Api.Example.COM:8080"),
        ("x-user-id", "ann"),
        ("cookie", "a=1; session=xyz; b=2"),
    ];
    let head = head("/api//items/../items?q=rate+limit%21&empty&%71=second", &headers);
    let get = |name: &str| attribute(&head, name);
    assert_eq!(get("method").as_deref(), Some("GET"));
    assert_eq!(get("path").as_deref(), Some("/api//items/../items"));
    assert_eq!(get("host").as_deref(), Some("api.example.com"));
    assert_eq!(get("header.X-User-Id").as_deref(), Some("ann"));
    assert_eq!(get("query.q").as_deref(), Some("rate limit!"));
    assert_eq!(get("query.empty").as_deref(), Some(""));
    assert_eq!(get("cookie.session").as_deref(), Some("xyz"));
    for absent in [
        "header.x",
        "header.",
        "query.x",
        "cookie.x",
        "cookie.sess",
        "cookie.",
        "domain",
        "x.y",
        "",
        ".",
    ] {
        assert_eq!(get(absent), None, "{absent}");
    }
}

#[test]
fn query_names_may_be_encoded_and_incomplete_codes_stay() {
    let head = head("/?%71=1&bad=100%&half=%4&caps=%4a%4A&utf=%C3%BC&latin=%FF", &[]);
    for (name, value) in
        [("q", "1"), ("bad", "100%"), ("half", "%4"), ("caps", "JJ"), ("utf", "ü"), ("latin", "ǿ")]
    {
        assert_eq!(attribute(&head, &format!("query.{name}")).as_deref(), Some(value), "{name}");
    }
}

#[test]
fn headers_of_one_name_are_joined_and_cookies_may_be_split() {
    let head =
        head("/", &[("x-plan", "free"), ("x-plan", "gold"), ("cookie", "a=1"), ("cookie", "b=2")]);
    assert_eq!(attribute(&head, "header.x-plan").as_deref(), Some("free, gold"));
    assert_eq!(attribute(&head, "cookie.b").as_deref(), Some("2"));
    assert_eq!(attribute(&head, "header.Cookie").as_deref(), Some("a=1; b=2"));
}

#[test]
fn different_values_of_one_name_are_ambiguous() {
    let head = head(
        "/?a=1&a=1&b=1&%62=2",
        &[("x", "1"), ("x", "1"), ("y", "1"), ("cookie", "s=1; t=1"), ("cookie", "t=2; s=1")],
    );
    let client_ip = ClientIp::default();
    let request = RequestParts::new(&head, None, &client_ip);
    for (name, ambiguous) in [
        ("query.a", false),
        ("query.b", true),
        ("header.x", true),
        ("header.y", false),
        ("cookie.s", false),
        ("cookie.t", true),
        ("path", false),
    ] {
        assert_eq!(request.is_ambiguous(name), ambiguous, "{name}");
    }
}

#[test]
fn names_that_frameworks_mistake_for_another_are_ambiguous() {
    let client_ip = ClientIp::default();
    let is_ambiguous = |uri: &str, headers: &[(&str, &str)], name: &str| {
        let head = head(uri, headers);
        RequestParts::new(&head, None, &client_ip).is_ambiguous(name)
    };
    for query in [
        "api.key=Q",
        "api%20key=Q",
        "api+key",
        "api[key=Q",
        "api_key%00x=Q",
        "[api_key]=Q",
        "API_KEY=Q",
        "%20api_key=Q",
        "api_key[]=Q",
        "api_key=1;api_key=Q",
        "a=1;api_key=Q",
        "a=1;api.key=Q",
    ] {
        assert!(is_ambiguous(&format!("/?{query}"), &[], "query.api_key"), "{query}");
        assert!(is_ambiguous(&format!("/?b&api_key=1&{query}"), &[], "query.api_key"));
    }
    assert!(is_ambiguous("/?api.key=Q", &[], "query.apikey"));
    for query in ["api_key=Q", "api_key=a.b[c];d", "apikey=Q", "api_keys=Q&key=1&api=2", "&;="] {
        assert!(!is_ambiguous(&format!("/?{query}"), &[], "query.api_key"), "{query}");
    }
    for cookie in ["session.id=S", "a=1 session_id=S", "a=1,session_id=S", "Session_Id=S"] {
        assert!(is_ambiguous("/", &[("cookie", cookie)], "cookie.session_id"), "{cookie}");
    }
    for cookie in ["a=1; session_id = S T, u", "session=1; id=2", "session_id=\"a b\""] {
        assert!(!is_ambiguous("/", &[("cookie", cookie)], "cookie.session_id"), "{cookie}");
    }
    for (header, expected) in
        [("x.user.id", true), ("x_user-id", true), ("x-user-id", false), ("x-user-ids", false)]
    {
        let headers = [("x-user-id", "U"), (header, "U")];
        let headers = if header == "x-user-id" { &headers[..1] } else { &headers };
        let head = head("/", headers);
        let forwarded = RequestParts::forwarded(&head.headers, "203.0.113.9".to_owned());
        assert_eq!(forwarded.is_ambiguous("header.x-user-id"), expected, "{header}");
        assert!(!is_ambiguous("/", headers, "header.x-user-id"), "a server of this process");
    }
}

#[test]
fn host_is_that_of_the_request_line_or_the_header_without_port() {
    for (uri, header, host) in [
        ("https://a.example:8443/", "b.example", Some("a.example")),
        ("/", "b.example.", Some("b.example")),
        ("/", "[2001:DB8::1]:80", Some("[2001:db8::1]")),
        ("/", "[2001:db8::1]", Some("[2001:db8::1]")),
        ("/", "c.example:", Some("c.example")),
    ] {
        assert_eq!(
            attribute(&head(uri, &[("host", header)]), "host").as_deref(),
            host,
            "{uri} {header}"
        );
    }
    assert_eq!(attribute(&head("/", &[]), "host"), None);
}

#[test]
fn address_is_that_of_the_client_and_an_unknown_peer_is_reported() {
    let client_ip =
        ClientIp::new(vec!["10.0.0.0/8".parse().expect("a network")], 64).expect("valid");
    let head = head("/", &[("x-forwarded-for", "8.8.8.8, 2001:db8:0:1::7")]);
    let by = |peer: &str| {
        let attributes =
            RequestParts::new(&head, Some(peer.parse().expect("an address")), &client_ip);
        let address = attributes.get("ip").map(Cow::into_owned);
        (address, attributes.lacks_peer())
    };
    assert_eq!(by("10.0.0.1"), (Some("2001:db8:0:1::/64".to_owned()), false));
    assert_eq!(by("203.0.113.9"), (Some("203.0.113.9".to_owned()), false));
    let unknown = RequestParts::new(&head, None, &client_ip);
    assert!(unknown.get("path").is_some() && !unknown.lacks_peer(), "not read");
    assert!(unknown.get("ip").is_none() && unknown.lacks_peer());
}

#[test]
fn values_that_are_not_utf8_stay_different() {
    let value = |bytes: &[u8]| {
        let mut head = head("/", &[]);
        let value = HeaderValue::from_bytes(bytes).expect("a value");
        head.headers.insert("x", value);
        attribute(&head, "header.x").expect("a value")
    };
    assert_eq!(value("ü".as_bytes()), "ü");
    assert_ne!(value(b"\xff"), value(b"\xfe"));
}

#[test]
fn cookies_may_have_spaces_around_the_equals_sign() {
    let head = head("/", &[("cookie", "b; a = 1;c==2 ; d=;e\u{a0}=3")]);
    assert_eq!(attribute(&head, "cookie.e").as_deref(), Some("3"));
    assert_eq!(attribute(&head, "cookie.a").as_deref(), Some("1"));
    assert_eq!(attribute(&head, "cookie.c").as_deref(), Some("=2"));
    assert_eq!(attribute(&head, "cookie.d").as_deref(), Some(""));
    assert_eq!(attribute(&head, "cookie.b"), None);
}

#[test]
fn custom_attributes_are_extensions_of_the_request() {
    let mut head = head("/", &[]);
    let tenant = BTreeMap::from([("tenant".to_owned(), "acme".to_owned())]);
    head.extensions.insert(CustomAttributes(tenant));
    assert_eq!(attribute(&head, "tenant").as_deref(), Some("acme"));
    assert_eq!(attribute(&head, "plan"), None);
}
