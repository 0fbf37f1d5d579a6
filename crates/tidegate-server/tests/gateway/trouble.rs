use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{PATIENCE, Service, read_answer, request};
use crate::upstream::{OK, Upstream};

/// An address where nobody listens.
fn nobody() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    format!("http://{}", listener.local_addr().expect("bound"))
}

#[test]
fn an_upstream_that_is_not_there_is_502_and_after_a_while_503() {
    let gateway = Service::gateway("", &[&nobody()]);
    let mut statuses = Vec::new();
    for _ in 0..4 {
        let answer = request(&gateway.http, "GET", "/", &[], b"");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        assert_eq!(answer.json()["status"], answer.status);
        statuses.push((answer.status, answer.header("retry-after").is_some()));
    }
    assert_eq!(statuses[..2], [(502, false); 2]);
    assert_eq!(statuses[3], (503, true));
}

#[test]
fn what_did_not_get_to_one_upstream_gets_to_another_body_and_all() {
    let upstream = Upstream::answering(OK);
    let gateway = Service::gateway("", &[&nobody(), &upstream.url(), &nobody()]);
    for number in 0..20 {
        let body = vec![b'x'; 1_000 * number];
        let answer = request(&gateway.http, "POST", "/", &[], &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(upstream.received()[number].body == body);
    }
    assert!(gateway.output().contains("is left out"), "{}", gateway.output());
}

#[test]
fn several_upstreams_take_turns() {
    let (one, other) = (Upstream::answering(OK), Upstream::answering(OK));
    let gateway = Service::gateway("", &[&one.url(), &other.url()]);
    for _ in 0..10 {
        assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    }
    assert_eq!((one.received().len(), other.received().len()), (5, 5));
}

#[test]
fn the_turns_of_an_upstream_that_is_left_out_are_spread_over_the_others() {
    let (one, other) = (Upstream::answering(OK), Upstream::answering(OK));
    let gateway = Service::gateway("", &[&one.url(), &nobody(), &other.url()]);
    let ask = || assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    // Three failures in nine turns.
    (0..9).for_each(|_| ask());
    assert!(gateway.output().contains("is left out"), "{}", gateway.output());
    let before = [one.received().len(), other.received().len()];
    (0..10).for_each(|_| ask());
    assert_eq!([one.received().len() - before[0], other.received().len() - before[1]], [5, 5]);
}

#[test]
fn an_upstream_that_does_not_answer_in_time_is_504() {
    let silent = Upstream::start(|_, _| {
        std::thread::sleep(PATIENCE);
        Ok(())
    });
    let gateway = Service::gateway("gateway: {header_timeout: 300ms}\n", &[&silent.url()]);
    let answer = request(&gateway.http, "POST", "/", &[], b"body");
    assert_eq!(
        (answer.status, &answer.json()["detail"]),
        (504, &"the upstream did not answer in time".into())
    );
    // Nor one that accepts the connection, and says nothing when TLS is to be agreed on.
    let mute = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("https://{}", mute.local_addr().expect("bound"));
    let gateway = Service::gateway("gateway: {connect_timeout: 300ms}\n", &[&url]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 504);
}

#[test]
fn an_upstream_that_breaks_off_is_502_or_a_broken_answer_never_a_whole_one() {
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
    // Nothing at all, if the end came before the beginning was sent on.
    let all_of = |path: &str| {
        let mut client = TcpStream::connect(&gateway.http).expect("it listens");
        client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
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
fn an_answer_that_stops_is_cut_off() {
    let upstream = Upstream::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")?;
        std::thread::sleep(PATIENCE);
        Ok(())
    });
    let gateway = Service::gateway("gateway: {idle_timeout: 300ms}\n", &[&upstream.url()]);
    let start = Instant::now();
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").body, "half");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_client_that_stops_in_its_body_is_cut_off_and_the_upstream_is_not_blamed() {
    let upstream = Upstream::answering(OK);
    let config = "gateway: {idle_timeout: 600ms, header_timeout: 200ms}\n";
    let gateway = Service::gateway(config, &[&upstream.url()]);
    for _ in 0..4 {
        let mut client = TcpStream::connect(&gateway.http).expect("it listens");
        client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        client
            .write_all(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nhalf")
            .expect("sent");
        let start = Instant::now();
        let answer = read_answer(&mut client);
        assert_eq!(answer.status, 408, "{answer:?}");
        assert!(start.elapsed() < Duration::from_secs(5));
    }
    assert!(upstream.received().is_empty(), "it never had a whole one");
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    assert!(!gateway.output().contains("left out"));
    // A slow one that goes on sending is served.
    let mut client = TcpStream::connect(&gateway.http).expect("it listens");
    client
        .write_all(b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 10\r\n\r\n")
        .expect("sent");
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(120));
        client.write_all(b"x").expect("sent");
    }
    assert_eq!(read_answer(&mut client).status, 200);
}

#[test]
fn a_client_that_does_not_finish_its_head_is_cut_off() {
    let upstream = Upstream::answering(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let start = Instant::now();
    let parts: [&[u8]; 4] =
        [b"", b"PRI * HT", b"GET / HTTP/1.1\r\nHost: h\r\n", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"];
    let clients: Vec<TcpStream> = parts
        .iter()
        .map(|part| {
            let mut client = TcpStream::connect(&gateway.http).expect("it listens");
            client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            client.write_all(part).expect("sent");
            client
        })
        .collect();
    for (mut client, part) in clients.into_iter().zip(parts) {
        // The last one is answered first, and cut off when it asks for nothing more.
        let mut answer = Vec::new();
        let ended = client.read_to_end(&mut answer);
        assert!(ended.is_ok(), "{part:?}: {ended:?}");
        assert_eq!(answer.starts_with(b"HTTP/1.1 200"), part.ends_with(b"\r\n\r\n"), "{part:?}");
    }
    assert!(start.elapsed() < PATIENCE);
}

#[test]
fn a_client_that_takes_nothing_is_cut_off() {
    let upstream = Upstream::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")?;
        let piece = vec![0; 64 * 1024];
        loop {
            stream.write_all(&piece)?;
        }
    });
    let gateway = Service::gateway("gateway: {idle_timeout: 500ms}\n", &[&upstream.url()]);
    let before = gateway.open_files();
    let mut client = TcpStream::connect(&gateway.http).expect("it listens");
    client.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").expect("sent");
    gateway.until("it is answered", |gateway| gateway.open_files() >= before + 2);
    gateway.until("both connections are closed", |gateway| gateway.open_files() <= before);
    drop(client);
}

#[test]
fn a_gateway_that_leads_to_itself_does_not_go_round_for_ever() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound").to_string();
    drop(listener);
    let config = format!(
        "listen: {{gateway: '{address}', http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}}\n"
    );
    let gateway = Service::gateway(&config, &[&format!("http://{address}")]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 508);
}

#[test]
fn a_wrong_start_says_what_would_be_right_and_exits_with_2() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .arg("gateway")
            .args(arguments)
            .env_clear()
            .output();
        let output = output.expect("the binary runs");
        let text = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(2), "{text}");
        // Of a file, the place is shown below.
        assert_eq!(
            text.lines().count(),
            if arguments.contains(&"--config") { 4 } else { 1 },
            "{text}"
        );
        text
    };
    assert!(run(&[]).contains("there is no upstream: name one by --upstream"));
    assert!(run(&["--upstream", "localhost:3000"]).contains("write it like http://127.0.0.1:3000"));
    let with_password = run(&["--upstream", "http://user:secret@localhost"]);
    assert!(with_password.contains("no user and password") && !with_password.contains("secret"));
    assert!(run(&["--upstream", "http://a", "--listen", "nowhere"]).contains("--listen"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, "gateway: {upstreams: ['ftp://a']}\n").expect("written");
    assert!(run(&["--config", &file.display().to_string()]).contains("is no upstream"));
}
