use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{Service, TEST_TIMEOUT, read_response, request};
use crate::upstream::{OK, Upstream};

/// Returns an address without a listener.
fn unreachable_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    format!("http://{}", listener.local_addr().expect("bound"))
}

#[test]
fn unreachable_upstream_is_502_and_503_after_ejection() {
    let gateway = Service::gateway("", &[&unreachable_address()]);
    let mut statuses = Vec::new();
    for _ in 0..4 {
        let response = request(&gateway.http, "GET", "/", &[], b"");
        assert_eq!(response.header("content-type"), Some("application/problem+json"));
        assert_eq!(response.json()["status"], response.status);
        statuses.push((response.status, response.header("retry-after").is_some()));
    }
    assert_eq!(statuses[..2], [(502, false); 2]);
    assert_eq!(statuses[3], (503, true));
}

/// Memory is full of keys at their limit, whose counts must not be forgotten.
#[test]
fn full_memory_is_one_log_line_and_a_state_and_leaves_other_policies() {
    let upstream = Upstream::responding_with(OK);
    let config = "\
store: {max_keys: 340}
policies:
  - {name: flooded, match: {path: /flooded}, key: [header.x-user], limit: 1, window: 1h}
  - {name: login, match: {path: /login}, key: [header.x-user], limit: 2, window: 1h}
";
    let gateway = Service::gateway(config, &[&upstream.url()]);
    let send = |path: &str, user: u32| {
        request(&gateway.http, "GET", path, &[("X-User", &user.to_string())], b"").status
    };
    let is_full = || {
        let ready = gateway.admin("/readyz").json()["store_full"].clone();
        assert_eq!(ready, gateway.admin("/v1/status").json()["store"]["memory"]["full"]);
        ready.as_bool().expect("a boolean")
    };
    assert!(!is_full());
    let statuses: Vec<u16> = (0..600).map(|user| send("/flooded", user)).collect();
    let undecided = statuses.iter().filter(|status| **status == 503).count();
    // The policy alone takes 16/17 of the keys.
    assert_eq!((statuses[319], undecided), (200, 600 - 320), "{statuses:?}");
    assert!(is_full());
    let counted = format!("tidegate_store_errors_total{{kind=\"full\"}} {undecided}\n");
    assert!(gateway.admin("/metrics").body.contains(&counted));
    for user in 0..10 {
        let statuses = [send("/login", user), send("/login", user), send("/login", user)];
        assert_eq!(statuses, [200, 200, 429], "user {user}");
    }
    assert_eq!(send("/flooded", 0), 429, "its count is still there");
    gateway.wait_until_logged("request not decided (logged once per minute)");
    let lines = gateway.output().lines().filter(|line| line.contains("not decided")).count();
    assert!(lines <= 2, "{lines} lines for {undecided} requests");
}

#[test]
fn unsent_request_is_retried_on_another_upstream() {
    let upstream = Upstream::responding_with(OK);
    let gateway =
        Service::gateway("", &[&unreachable_address(), &upstream.url(), &unreachable_address()]);
    for number in 0..20 {
        let body = vec![b'x'; 1_000 * number];
        let response = request(&gateway.http, "POST", "/", &[], &body);
        assert_eq!(response.status, 200, "{response:?}");
        assert!(upstream.received()[number].body == body);
    }
    gateway.wait_until_logged("upstream ejected");
}

#[test]
fn upstreams_take_turns() {
    let (one, other) = (Upstream::responding_with(OK), Upstream::responding_with(OK));
    let gateway = Service::gateway("", &[&one.url(), &other.url()]);
    for _ in 0..10 {
        assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    }
    assert_eq!((one.received().len(), other.received().len()), (5, 5));
}

#[test]
fn turns_of_an_ejected_upstream_are_shared() {
    let (one, other) = (Upstream::responding_with(OK), Upstream::responding_with(OK));
    let gateway = Service::gateway("", &[&one.url(), &unreachable_address(), &other.url()]);
    let send = || assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    // Three failures within nine turns eject it.
    (0..9).for_each(|_| send());
    gateway.wait_until_logged("upstream ejected");
    let before = [one.received().len(), other.received().len()];
    (0..10).for_each(|_| send());
    assert_eq!([one.received().len() - before[0], other.received().len() - before[1]], [5, 5]);
}

#[test]
fn upstream_timeout_is_504() {
    let silent = Upstream::start(|_, _| {
        std::thread::sleep(TEST_TIMEOUT);
        Ok(())
    });
    let gateway = Service::gateway("gateway: {header_timeout: 300ms}\n", &[&silent.url()]);
    let response = request(&gateway.http, "POST", "/", &[], b"body");
    assert_eq!(
        (response.status, &response.json()["detail"]),
        (504, &"the upstream did not respond in time".into())
    );
    // The same for an upstream that accepts the connection, but never completes the TLS handshake.
    let mute = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("https://{}", mute.local_addr().expect("bound"));
    let gateway = Service::gateway("gateway: {connect_timeout: 300ms}\n", &[&url]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 504);
}

#[test]
fn truncated_upstream_response_is_never_completed() {
    let upstream = Upstream::start(|request, stream| {
        if request.head.starts_with("GET /half") {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")?;
        } else if request.head.starts_with("GET /chunk") {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")?;
        } else if request.head.starts_with("GET /nonsense") {
            stream.write_all(b"nonsense\r\n\r\n")?;
        }
        stream.shutdown(std::net::Shutdown::Both)?;
        Err(std::io::ErrorKind::BrokenPipe.into())
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    // The client gets nothing if the upstream closed before the head was forwarded.
    let all_of = |path: &str| {
        let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
        client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        write!(client, "GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            .expect("sent");
        let mut all = Vec::new();
        let _ = client.read_to_end(&mut all);
        String::from_utf8(all).expect("text").to_ascii_lowercase()
    };
    let half = all_of("/half");
    let is_seen_to_be_cut =
        half.contains("\r\ncontent-length: 10\r\n") && half.ends_with("\r\n\r\nhalf");
    assert!(half.is_empty() || is_seen_to_be_cut, "{half:?}");
    let chunked = all_of("/chunk");
    let is_seen_to_be_cut = chunked.contains("chunked\r\n") && !chunked.ends_with("0\r\n\r\n");
    assert!(chunked.is_empty() || is_seen_to_be_cut, "{chunked:?}");
    assert_eq!(request(&gateway.http, "GET", "/nothing", &[], b"").status, 502);
    assert_eq!(request(&gateway.http, "GET", "/nonsense", &[], b"").status, 502);
}

#[test]
fn stalled_response_is_aborted() {
    let upstream = Upstream::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")?;
        std::thread::sleep(TEST_TIMEOUT);
        Ok(())
    });
    let gateway = Service::gateway("gateway: {idle_timeout: 300ms}\n", &[&upstream.url()]);
    let start = Instant::now();
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").body, "half");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn stalled_request_body_is_aborted_without_blaming_the_upstream() {
    let upstream = Upstream::responding_with(OK);
    // The header timeout is the shorter one, and must not apply while the client stalls. It is long
    // enough for a busy machine to connect to the upstream.
    let config = "gateway: {idle_timeout: 1200ms, header_timeout: 1s, min_upload_rate: 0}\n";
    let gateway = Service::gateway(config, &[&upstream.url()]);
    for _ in 0..4 {
        let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
        client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        client
            .write_all(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nhalf")
            .expect("sent");
        let start = Instant::now();
        let response = read_response(&mut client);
        assert_eq!(response.status, 408, "{response:?}");
        assert!(start.elapsed() < Duration::from_secs(5));
    }
    assert!(upstream.received().is_empty(), "no complete request reached the upstream");
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    assert!(!gateway.output().contains("ejected"));
    // Without a minimum rate, a slow client that keeps sending is served.
    let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
    client
        .write_all(b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 15\r\n\r\n")
        .expect("sent");
    for _ in 0..15 {
        std::thread::sleep(Duration::from_millis(120));
        client.write_all(b"x").expect("sent");
    }
    assert_eq!(read_response(&mut client).status, 200);
}

#[test]
fn client_without_a_complete_head_is_disconnected() {
    let upstream = Upstream::responding_with(OK);
    let gateway =
        Service::gateway("listen: {admin: '127.0.0.1:0', idle_timeout: 2s}\n", &[&upstream.url()]);
    let start = Instant::now();
    let parts: [&[u8]; 4] =
        [b"", b"PRI * HT", b"GET / HTTP/1.1\r\nHost: h\r\n", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"];
    let clients: Vec<TcpStream> = parts
        .iter()
        .map(|part| {
            let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
            client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
            client.write_all(part).expect("sent");
            client
        })
        .collect();
    for (mut client, part) in clients.into_iter().zip(parts) {
        // The last client gets a response first, and is disconnected when idle.
        let mut response = Vec::new();
        let ended = client.read_to_end(&mut response);
        assert!(ended.is_ok(), "{part:?}: {ended:?}");
        assert_eq!(response.starts_with(b"HTTP/1.1 200"), part.ends_with(b"\r\n\r\n"), "{part:?}");
    }
    assert!(start.elapsed() < TEST_TIMEOUT);
}

/// Starts an upstream whose response does not end while the test runs.
fn endless_upstream() -> Upstream {
    Upstream::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")?;
        let piece = vec![0; 64 * 1024];
        loop {
            stream.write_all(&piece)?;
        }
    })
}

/// Starts a download. Returns the number of open files before it, and the client.
fn start_download(gateway: &Service) -> (usize, TcpStream) {
    let before = gateway.open_files();
    let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
    client.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").expect("sent");
    gateway.wait_until("the response has started", |gateway| gateway.open_files() >= before + 2);
    (before, client)
}

#[test]
fn client_that_stops_reading_is_disconnected() {
    let upstream = endless_upstream();
    let gateway = Service::gateway("gateway: {idle_timeout: 500ms}\n", &[&upstream.url()]);
    let (before, client) = start_download(&gateway);
    gateway.wait_until("both connections are closed", |gateway| gateway.open_files() <= before);
    drop(client);
}

#[test]
fn client_that_reads_in_drops_is_disconnected() {
    let upstream = endless_upstream();
    let gateway = Service::gateway("gateway: {idle_timeout: 500ms}\n", &[&upstream.url()]);
    let (before, client) = start_download(&gateway);
    // The socket's buffers must have room again for a part of what they hold.
    gateway.wait_until("both connections are closed", |gateway| {
        let _ = (&client).read(&mut [0; 10]);
        gateway.open_files() <= before
    });
}

#[test]
fn forwarding_loop_is_detected() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound").to_string();
    drop(listener);
    let config = format!(
        "listen: {{gateway: '{address}', http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: \
         '127.0.0.1:0'}}\n"
    );
    let gateway = Service::gateway(&config, &[&format!("http://{address}")]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 508);
}

#[test]
fn invalid_configuration_exits_with_2_and_a_helpful_message() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .arg("gateway")
            .args(arguments)
            .env_clear()
            .output();
        let output = output.expect("the binary runs");
        let text = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(2), "{text}");
        // Errors in a file show the position on further lines.
        assert_eq!(
            text.lines().count(),
            if arguments.contains(&"--config") { 4 } else { 1 },
            "{text}"
        );
        text
    };
    assert!(run(&[]).contains("there is no upstream: name one with --upstream"));
    assert!(run(&["--upstream", "localhost:3000"]).contains("write it like http://127.0.0.1:3000"));
    let with_password = run(&["--upstream", "http://user:secret@localhost"]);
    assert!(
        with_password.contains("must not contain a user or password")
            && !with_password.contains("secret")
    );
    assert!(run(&["--upstream", "http://a", "--listen", "nowhere"]).contains("--listen"));
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, "gateway: {upstreams: ['ftp://a']}\n").expect("written");
    assert!(run(&["--config", &file.display().to_string()]).contains("is not an upstream"));
}
