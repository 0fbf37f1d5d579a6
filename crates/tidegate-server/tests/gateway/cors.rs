//! Responses for scripts in browsers. The rules are those of the Fetch standard: a script can read
//! a response only if `Access-Control-Allow-Origin` has its origin or `*`, and of its headers only
//! those that `Access-Control-Expose-Headers` lists.

use std::io::Write as _;
use std::process::Command;

use super::support::{Response, Service, request};
use super::upstream::{OK, Upstream};

const APP: (&str, &str) = ("Origin", "https://app.example.com");
const OURS: &str = "RateLimit, RateLimit-Policy, Retry-After, X-RateLimit-Limit, \
                    X-RateLimit-Remaining, X-RateLimit-Reset";
const LIMIT: &str = "policies: [{name: all, limit: 1, window: 1h}]\n";
const CORS: &str = "gateway: {cors: {allow_origins: ['https://app.example.com']}}\n";

/// Returns all CORS headers and `Vary`, in the order of their names.
fn cors_headers(response: &Response) -> Vec<String> {
    let is_cors = |name: &str| name.starts_with("access-control-") || name == "vary";
    let headers = response.headers.iter().filter(|(name, _)| is_cors(name));
    let mut headers: Vec<_> = headers.map(|(name, value)| format!("{name}: {value}")).collect();
    headers.sort();
    headers
}

fn get(gateway: &Service, headers: &[(&str, &str)]) -> Response {
    request(&gateway.http, "GET", "/", headers, b"")
}

#[test]
fn scripts_of_allowed_origins_can_read_denials() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway(&format!("{LIMIT}{CORS}"), &[&upstream.url()]);
    let allowed = get(&gateway, &[APP]);
    assert_eq!((allowed.status, cors_headers(&allowed)), (200, vec![]), "the upstream has none");
    let denied = get(&gateway, &[APP]);
    assert_eq!(denied.status, 429);
    assert_eq!(
        cors_headers(&denied),
        [
            "access-control-allow-origin: https://app.example.com".to_owned(),
            format!("access-control-expose-headers: {OURS}"),
            "vary: Origin".to_owned(),
        ]
    );
    for others in [&[("Origin", "https://evil.example")][..], &[("Origin", "null")], &[]] {
        let denied = get(&gateway, others);
        assert_eq!((denied.status, cors_headers(&denied)), (429, vec!["vary: Origin".to_owned()]));
    }
}

#[test]
fn own_errors_have_cors_headers_too() {
    let cors = "gateway: {cors: {allow_origins: ['*'], expose_headers: [retry-after]}}\n";
    // Nothing listens there.
    let gateway = Service::gateway(cors, &["http://127.0.0.1:1"]);
    let unreachable = get(&gateway, &[APP]);
    assert_eq!(unreachable.status, 502);
    let expected = ["access-control-allow-origin: *", "access-control-expose-headers: retry-after"];
    assert_eq!(cors_headers(&unreachable), expected);
    assert_eq!(cors_headers(&get(&gateway, &[])), Vec::<String>::new(), "not from a script");
    let ambiguous = get(&gateway, &[APP, ("Authorization", "a"), ("Authorization", "b")]);
    assert_eq!((ambiguous.status, cors_headers(&ambiguous).len()), (400, 2));
}

#[test]
fn credentials_are_allowed_for_listed_origins() {
    let upstream = Upstream::responding_with(OK);
    let config = "gateway:\n  cors:\n    allow_origins: ['https://a.example', \
                  'HTTPS://App.Example.com:443']\n    allow_credentials: true\n";
    let gateway = Service::gateway(&format!("{LIMIT}{config}"), &[&upstream.url()]);
    let _ = get(&gateway, &[APP]);
    let denied = get(&gateway, &[APP]);
    assert_eq!(
        cors_headers(&denied),
        [
            "access-control-allow-credentials: true".to_owned(),
            "access-control-allow-origin: https://app.example.com".to_owned(),
            format!("access-control-expose-headers: {OURS}"),
            "vary: Origin".to_owned(),
        ]
    );
}

#[test]
fn scripts_can_read_our_headers_on_responses_of_the_upstream() {
    let upstream = Upstream::responding_with(
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nVary: Origin\r\n\
          Access-Control-Allow-Origin: https://app.example.com\r\n\
          Access-Control-Expose-Headers: X-Request-Id\r\n\r\n",
    );
    let theirs = [
        "access-control-allow-origin: https://app.example.com".to_owned(),
        "access-control-expose-headers: X-Request-Id".to_owned(),
        "vary: Origin".to_owned(),
    ];
    let gateway = Service::gateway(&format!("{LIMIT}{CORS}"), &[&upstream.url()]);
    let allowed = get(&gateway, &[APP]);
    let mut expected = theirs.to_vec();
    expected.insert(1, format!("access-control-expose-headers: {OURS}"));
    assert_eq!((allowed.status, cors_headers(&allowed)), (200, expected));
    let gateway = Service::gateway(LIMIT, &[&upstream.url()]);
    assert_eq!(cors_headers(&get(&gateway, &[APP])), theirs, "without gateway.cors");
    assert_eq!(cors_headers(&get(&gateway, &[APP])), Vec::<String>::new(), "a denial");
}

#[test]
fn preflights_are_forwarded_without_a_charge_if_they_are_exempt() {
    let upstream = Upstream::responding_with(OK);
    let preflight = [APP, ("Access-Control-Request-Method", "PUT")];
    let options =
        |gateway: &Service, headers: &[_]| request(&gateway.http, "OPTIONS", "/", headers, b"");
    let gateway = Service::gateway(
        &format!("{LIMIT}gateway: {{exempt_preflight: true}}\n"),
        &[&upstream.url()],
    );
    for _ in 0..3 {
        let response = options(&gateway, &preflight);
        assert_eq!((response.status, response.header("ratelimit")), (200, None));
    }
    assert_eq!(get(&gateway, &[APP]).status, 200, "preflights took nothing");
    assert_eq!(options(&gateway, &preflight).status, 200, "the limit is used up");
    assert_eq!(options(&gateway, &[APP]).status, 429, "OPTIONS alone is not a preflight");
    assert_eq!(upstream.received().len(), 5);
    let gateway = Service::gateway(LIMIT, &[&upstream.url()]);
    let statuses = [options(&gateway, &preflight).status, options(&gateway, &preflight).status];
    assert_eq!(statuses, [200, 429], "by default they count");
}

/// Page whose script sends three requests to the gateway in its fragment, and shows what it can
/// read of each response.
const PAGE: &str = "<!doctype html><pre id=seen></pre><script>
(async () => {
  for (let number = 0; number < 3; number++) {
    let line = 'failed';
    try {
      const response = await fetch('http://' + location.hash.slice(1) + '/', {
        method: 'PUT', headers: {'x-user-id': 'ann'}, credentials: 'include'});
      const {status, headers} = response;
      const type = status == 429 ? (await response.json()).type.split('#')[1] : 'none';
      line = [status, headers.get('x-ratelimit-remaining'), headers.has('retry-after'), type];
    } catch {}
    seen.textContent += `<${line}>`;
  }
})();
</script>";

/// Loads the page in Chromium and returns what the script has seen.
fn seen_by_a_script(gateway_section: impl Fn(&str) -> String) -> String {
    let site = Upstream::start(|_, stream| {
        let length = PAGE.len();
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}")?;
        write!(stream, "\r\n\r\n{PAGE}")
    });
    // It answers preflights like other requests.
    let app = Upstream::start(|request, stream| {
        let origin = request.header("origin").unwrap_or("*");
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nVary: Origin\r\n")?;
        write!(stream, "Access-Control-Allow-Origin: {origin}\r\n")?;
        write!(stream, "Access-Control-Allow-Credentials: true\r\n")?;
        write!(stream, "Access-Control-Allow-Methods: PUT\r\n")?;
        write!(stream, "Access-Control-Allow-Headers: x-user-id\r\n\r\n")
    });
    let policies = "policies: [{name: all, limit: 2, window: 1h}]\n";
    let config = format!("{policies}{}", gateway_section(&site.url()));
    let gateway = Service::gateway(&config, &[&app.url()]);
    let profile = tempfile::tempdir().expect("a temporary directory");
    let output = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--dump-dom", "--virtual-time-budget=60000"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("{}/#{}", site.url(), gateway.http))
        .output()
        .expect("Chromium runs");
    let page = String::from_utf8(output.stdout).expect("UTF-8");
    let (_, seen) = page.split_once("<pre id=\"seen\">").expect(&page);
    let (seen, _) = seen.split_once("</pre>").expect(&page);
    seen.replace("&lt;", "<").replace("&gt;", ">")
}

#[test]
fn chromium_shows_denials_to_scripts_of_allowed_origins() {
    // The first preflight and the first request use up the limit, and nothing can be read.
    assert_eq!(seen_by_a_script(|_| String::new()), "<200,,false,none><failed><failed>");
    let exempt = "gateway:\n  exempt_preflight: true\n";
    assert_eq!(
        seen_by_a_script(|_| exempt.to_owned()),
        "<200,,false,none><200,,false,none><failed>"
    );
    let cors = |site: &str| {
        format!("{exempt}  cors: {{allow_origins: ['{site}'], allow_credentials: true}}\n")
    };
    assert_eq!(
        seen_by_a_script(cors),
        "<200,1,false,none><200,0,false,none><429,0,true,quota-exceeded>"
    );
}
