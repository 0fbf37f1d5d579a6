use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use crate::support::Service;
use crate::upstream::{OK, Upstream};

/// Application that reads its session cookie, as most do, from the first `Cookie` header.
const LOGIN_APP: &str = r#"
import http.cookies
import http.server

class App(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        cookies = http.cookies.SimpleCookie(self.headers.get("Cookie", ""))
        user = cookies["session"].value if "session" in cookies else None
        self.send_response(200 if user else 401)
        body = f"hello {user}".encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), App)
print(server.server_port, flush=True)
server.serve_forever()
"#;

struct LoginApp {
    process: Child,
    url: String,
}

impl LoginApp {
    fn start() -> Self {
        let mut process = Command::new("python3")
            .args(["-c", LOGIN_APP])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("python3 runs");
        let mut port = String::new();
        BufReader::new(process.stdout.take().expect("piped")).read_line(&mut port).expect("a port");
        Self { process, url: format!("http://127.0.0.1:{}", port.trim()) }
    }
}

impl Drop for LoginApp {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends a GET with one `cookie` field per crumb, and returns the body and the status.
fn curl(version: &str, url: &str, crumbs: &[&str]) -> (String, String) {
    let mut command = Command::new("curl");
    command.args(["-s", "-m", "20", "-w", "\n%{http_version} %{http_code}", version, url]);
    for crumb in crumbs {
        command.args(["-H", &format!("Cookie: {crumb}")]);
    }
    let output = command.output().expect("curl runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let (body, summary) = text.rsplit_once('\n').expect("curl's summary");
    (body.to_owned(), summary.to_owned())
}

const HTTP2: &str = "--http2-prior-knowledge";

#[test]
fn login_survives_cookies_that_http2_sends_in_crumbs() {
    let app = LoginApp::start();
    let gateway = Service::gateway("", &[&app.url]);
    let url = format!("http://{}/", gateway.http);
    let expected = |version: &str| ("hello ann".to_owned(), format!("{version} 200"));
    assert_eq!(curl(HTTP2, &url, &["session=ann"]), expected("2"));
    assert_eq!(curl(HTTP2, &url, &["theme=dark", "lang=en; x=1", "session=ann"]), expected("2"));
    assert_eq!(curl("--http1.1", &url, &["theme=dark", "session=ann"]), expected("1.1"));
    assert_eq!(curl(HTTP2, &url, &["theme=dark"]).1, "2 401");
}

#[test]
fn crumbs_are_one_field_in_the_order_of_the_client() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let url = format!("http://{}/", gateway.http);
    assert_eq!(curl(HTTP2, &url, &["a=1", "b=2; c=3", "a=4"]).1, "2 200");
    let head = upstream.received().remove(0).head.to_ascii_lowercase();
    assert_eq!(head.matches("cookie:").count(), 1, "{head}");
    assert!(head.contains("\r\ncookie: a=1; b=2; c=3; a=4\r\n"), "{head}");
}

#[test]
fn crumbs_reach_http2_upstreams_and_policies_read_each_of_them() {
    let app = LoginApp::start();
    // The first gateway forwards over HTTP/2 to the second one.
    let second = Service::gateway("", &[&app.url]);
    let policy = "
policies:
  - {name: s, match: {cookie.session: '*'}, key: [cookie.session], limit: 1, window: 1h}
  - {name: whole, match: {cookie.beta: '*'}, key: [header.cookie], limit: 1, window: 1h}
";
    let gateway = Service::gateway(policy, &[&format!("h2c://{}", second.http)]);
    let url = format!("http://{}/", gateway.http);
    let send = |crumbs: &[&str]| curl(HTTP2, &url, crumbs);
    assert_eq!(send(&["theme=dark", "session=ann"]), ("hello ann".to_owned(), "2 200".to_owned()));
    assert_eq!(send(&["theme=dark", "x=y", "session=ann"]).1, "2 429");
    assert_eq!(send(&["session=bob", "x=y"]), ("hello bob".to_owned(), "2 200".to_owned()));
    assert_eq!(send(&["x=y; session=bob"]).1, "2 429");
    // Crumbs are no other key than the whole.
    assert_eq!(send(&["beta=1; z=2"]).1, "2 401");
    assert_eq!(send(&["beta=1", "z=2"]).1, "2 429");
}
