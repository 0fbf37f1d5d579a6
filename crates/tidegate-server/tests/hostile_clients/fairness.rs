use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::support::{Service, TEST_TIMEOUT};

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";

fn connect(service: &Service) -> TcpStream {
    let stream = TcpStream::connect(&service.http).expect("the service listens");
    stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    stream.set_nodelay(true).expect("a socket");
    stream
}

/// Counts the responses that pipelining clients get while another client waits for one. This number
/// does not depend on the speed of the machine.
#[test]
fn pipelined_requests_do_not_delay_other_connections() {
    let service = Service::start_with_environment("", &[("TOKIO_WORKER_THREADS", "1")]);
    let (stop, responses) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut turns = std::thread::scope(|scope| {
        for _ in 0..4 {
            let mut writer = connect(&service);
            let mut reader = writer.try_clone().expect("a socket");
            let (stop, responses) = (&stop, &responses);
            scope.spawn(move || {
                let many = REQUEST.repeat(500);
                while !stop.load(Ordering::Relaxed) && writer.write_all(&many).is_ok() {}
                let _ = writer.shutdown(std::net::Shutdown::Write);
            });
            scope.spawn(move || {
                let mut buffer = vec![0; 64 * 1024];
                while let Ok(length @ 1..) = reader.read(&mut buffer) {
                    // Each head starts with the only capital letter P.
                    let heads = buffer[..length].split(|byte| *byte == b'P').count() - 1;
                    responses.fetch_add(heads as u64, Ordering::Relaxed);
                }
            });
        }
        let mut client = connect(&service);
        let mut buffer = [0; 4096];
        let turns: Vec<u64> = (0..60)
            .map(|_| {
                let before = responses.load(Ordering::Relaxed);
                client.write_all(REQUEST).expect("sent");
                assert!(client.read(&mut buffer).expect("a response") > 0);
                responses.load(Ordering::Relaxed) - before
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        turns
    });
    turns.sort_unstable();
    let (median, most) = (turns[turns.len() / 2], turns[turns.len() - 1]);
    println!("responses to others in the meantime: {median} in the median, at most {most}");
    assert!(responses.into_inner() > 1_000, "nothing was pipelined");
    assert!(median < 300, "{turns:?}");
}
