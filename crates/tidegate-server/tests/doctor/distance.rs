use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::support::Redis;
use crate::{advice_of, assert_found, findings_of, report, tidegate};

/// Delay of each direction.
const DELAY: Duration = Duration::from_millis(30);

/// Starts a proxy that delivers bytes later, and returns its URL. Its threads end with the process.
fn distant(redis: &Redis) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let url = format!("redis://{}", listener.local_addr().expect("bound"));
    let port = redis.port();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else { return };
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (from, to) = (from.try_clone(), to.try_clone());
                let (from, to) = (from.expect("a handle"), to.expect("a handle"));
                std::thread::spawn(move || deliver_late(from, to));
            }
        }
    });
    url
}

fn deliver_late(mut from: TcpStream, mut to: TcpStream) {
    let (sender, receiver) = std::sync::mpsc::channel::<(Instant, Vec<u8>)>();
    std::thread::spawn(move || {
        for (at, bytes) in receiver {
            std::thread::sleep((at + DELAY).saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
    let mut buffer = [0; 16_384];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if sender.send((Instant::now(), buffer[..length].to_vec())).is_err() {
            break;
        }
    }
}

#[test]
fn distant_server_is_judged_by_its_round_trip() {
    let redis = Redis::start();
    let url = distant(&redis);
    let within = |timeout| {
        let arguments = ["doctor", "--json", "--probes", "3", "--redis", &url, "--timeout"];
        report(&tidegate(&[&arguments[..], &[timeout]].concat()))
    };
    // One round trip fits into the timeout, but not the three of a call that loads its script.
    let (found, _) = within("170ms");
    assert_found(&found, "scripts", "ok", "works");
    assert_eq!(findings_of(&found, "latency").len(), 1, "{found}");

    let (found, code) = within("50ms");
    assert_eq!(code, Some(2), "{found}");
    assert_found(&found, "scripts", "error", "a round trip takes ");
    let advice = advice_of(&found, "scripts", "error");
    assert!(advice.contains("store.timeout") && advice.contains("closer"), "{advice}");
}
