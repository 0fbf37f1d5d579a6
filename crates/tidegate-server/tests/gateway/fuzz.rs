//! Random requests at the level of bytes. Whatever a client sends, the upstream gets the requests
//! that the policies decided, and no others.
//!
//! `FUZZ_CASES=100000 cargo test --workspace --test gateway fuzz` tries many new cases. A failure
//! names the seed of its case, or that of the first: `FUZZ_SEED=…` repeats it. Connections that
//! failed once are kept in `fuzz/regressions.txt`.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::frames::{END_STREAM, Frames, RST_STREAM};
use crate::seeded::{self, Seeded};
use crate::support::{Service, TEST_TIMEOUT, request};

/// Generated requests.
mod generator;
/// Parser of requests and responses that accepts nothing ambiguous.
mod strict;
/// Upstream that checks what it gets.
mod upstream;

use strict::Response;
use upstream::{Forwarded, StrictUpstream};

/// Limit of a user and of a page.
const LIMIT: usize = 3;

const POLICIES: &str = "
policies:
  - {name: total, limit: 10000000, window: 24h, algorithm: fixed-window}
  - {name: exact, match: {path: /limited/x}, limit: 10000000, window: 24h, algorithm: fixed-window}
  - {name: tree, match: {path: /tree/**}, limit: 10000000, window: 24h, algorithm: fixed-window}
  - {name: star, match: {path: /star/*/end}, limit: 10000000, window: 24h, algorithm: fixed-window}
  - {name: post, match: {path: /limited/**, method: POST}, limit: 10000000, window: 24h,
     algorithm: fixed-window}
  - {name: user, match: {path: /id/**}, key: [header.x-user-id], missing_key: deny, limit: 3,
     window: 24h}
  - {name: page, match: {path: /page/**}, key: [path], limit: 3, window: 24h}
";

/// Settings of `paths`. A case has those at its seed's remainder.
const SETTINGS: [&str; 3] = [
    "",
    "encoded_slashes: decode, parameters: decode, case_insensitive: true",
    "encoded_slashes: keep, parameters: keep, merge_slashes: false",
];

/// Gateway with one of the settings, and its upstream.
struct Target {
    gateway: Service,
    upstream: StrictUpstream,
    ignores_case: bool,
    /// Number of requests that a strict server finds in what was sent over HTTP/1.1.
    sent: usize,
}

impl Target {
    fn start(settings: &str) -> Self {
        let upstream = StrictUpstream::start();
        let config = format!("paths: {{{settings}}}\n{POLICIES}");
        let gateway = Service::gateway(&config, &[&upstream.url()]);
        let ignores_case = settings.contains("case_insensitive: true");
        Self { gateway, upstream, ignores_case, sent: 0 }
    }

    fn run(&mut self, seed: u64) {
        let mut seeded = Seeded::new(seed);
        if seeded.once_in(5) {
            self.run_http2(seed, &mut seeded);
        } else {
            self.run_http1(seed, &mut seeded);
        }
    }

    fn run_http1(&mut self, seed: u64, seeded: &mut Seeded) {
        let bytes = generator::connection(seeded);
        let cut = if seeded.once_in(4) { seeded.below(bytes.len() + 1) } else { 0 };
        self.send(seed, &bytes, cut);
    }

    /// Sends the bytes of a connection, in two parts, and checks the responses.
    fn send(&mut self, seed: u64, bytes: &[u8], cut: usize) {
        let expected = strict::requests(bytes);
        let mut client = TcpStream::connect(&self.gateway.http).expect("the gateway listens");
        client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        client.set_nodelay(true).expect("a socket");
        // The gateway may respond and close the connection before it has read everything.
        let _ = client.write_all(&bytes[..cut]).and_then(|()| client.write_all(&bytes[cut..]));
        let mut received = Vec::new();
        let mut responses;
        loop {
            responses = strict::responses(&received, &expected.methods);
            if responses.len() >= expected.methods.len() {
                break;
            }
            let mut buffer = [0; 4096];
            match client.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => received.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
                Err(error) => panic!(
                    "seed {seed}: {error} after {} of {} responses to {}\n{}",
                    responses.len(),
                    expected.methods.len(),
                    bytes.escape_ascii(),
                    received.escape_ascii()
                ),
            }
        }
        self.sent += expected.started;
        for response in &responses {
            self.check_response(seed, bytes, response);
        }
    }

    /// Checks that the policies of a response are those of the path that was forwarded.
    fn check_response(&self, seed: u64, bytes: &[u8], response: &Response) {
        let Some(forwarded) = response.header("x-got") else { return };
        let (method, target) = forwarded.split_once(' ').expect("a method and a target");
        let expected = self.policies_of(method, target);
        let applied = response.header("ratelimit-policy").unwrap_or_default();
        let mut applied: Vec<&str> =
            applied.split('"').skip(1).step_by(2).filter(|name| !name.is_empty()).collect();
        applied.sort_unstable();
        assert_eq!(
            applied,
            expected,
            "seed {seed}: policies of {forwarded}, for {}",
            bytes.escape_ascii()
        );
    }

    /// Returns the form of a forwarded target that policies match.
    fn path_of(&self, target: &str) -> String {
        let path = target.split('?').next().unwrap_or_default().trim_end_matches('/');
        if self.ignores_case { path.to_ascii_lowercase() } else { path.to_owned() }
    }

    /// Returns the names of the policies that apply to a forwarded request, sorted.
    fn policies_of(&self, method: &str, target: &str) -> Vec<&'static str> {
        let path = self.path_of(target);
        let below = |folder: &str| {
            path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let middle = path.strip_prefix("/star/").and_then(|rest| rest.strip_suffix("/end"));
        let applies = [
            ("exact", path == "/limited/x"),
            ("page", below("/page")),
            ("post", below("/limited") && method == "POST"),
            ("star", middle.is_some_and(|middle| !middle.contains('/'))),
            ("total", true),
            ("tree", below("/tree")),
            ("user", below("/id")),
        ];
        applies.into_iter().filter(|(_, applies)| *applies).map(|(name, _)| name).collect()
    }

    fn run_http2(&mut self, seed: u64, seeded: &mut Seeded) {
        let mut client = Frames::connect(&self.gateway.http, 65_535);
        let mut open = Vec::new();
        for (number, stream) in (0..=seeded.below(3)).zip((1..).step_by(2)) {
            let frames = generator::http2_stream(seeded, stream);
            let ends = frames.iter().any(|frame| frame.ends_stream);
            for frame in frames {
                if client.try_send_bytes(&frame.bytes).is_err() {
                    return;
                }
            }
            if ends {
                open.push(stream);
            } else {
                let _ = client.try_send(RST_STREAM, 0, stream, &8_u32.to_be_bytes());
            }
            self.sent += 1;
            assert!(number < 3, "streams are few");
        }
        while !open.is_empty() {
            let frame = client.next_of_any_stream();
            let frame = frame.unwrap_or_else(|error| panic!("seed {seed}: {error} on {open:?}"));
            // The gateway may close a connection that is an error.
            let Some(frame) = frame else { return };
            let has_flag = frame.flags & END_STREAM != 0 && frame.kind <= 1;
            if has_flag || frame.kind == RST_STREAM {
                open.retain(|stream| *stream != frame.stream);
            }
        }
    }

    /// Checks what the upstream got, all in all.
    fn check(&self) {
        let alive = request(&self.gateway.http, "GET", "/alive", &[], b"");
        assert_eq!(alive.status, 200, "{alive:?}");
        let (forwarded, violations) = self.upstream.forwarded();
        assert!(violations.is_empty(), "malformed requests to the upstream: {violations:#?}");
        assert!(
            forwarded.len() <= self.sent + 1,
            "{} requests reached the upstream, {} were sent",
            forwarded.len(),
            self.sent + 1
        );
        println!("{} of {} requests reached the upstream", forwarded.len(), self.sent + 1);
        let metrics = self.gateway.admin("/metrics").body;
        assert!(metrics.contains("\ntidegate_panics_total 0\n"), "{metrics}");
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for request in &forwarded {
            for policy in self.policies_of(&request.method, &request.target) {
                *counts.entry(policy).or_default() += 1;
            }
        }
        for (policy, count) in counts {
            let name =
                format!("tidegate_decisions_total{{policy=\"{policy}\",outcome=\"allowed\"}} ");
            let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
            let decisions: usize = line.expect("the metric").parse().expect("a number");
            assert!(decisions >= count, "{policy}: {decisions} decisions, {count} requests");
        }
        self.check_limit("page", &forwarded, |request| self.path_of(&request.target));
        self.check_limit("user", &forwarded, |request| {
            let values = request.values("x-user-id");
            assert_eq!(values.len(), 1, "a request of no or several users: {request:?}");
            values.concat()
        });
    }

    /// Checks that no identity that the upstream sees got more than its limit.
    fn check_limit(
        &self,
        policy: &str,
        forwarded: &[Forwarded],
        identity: impl Fn(&Forwarded) -> String,
    ) {
        let mut counts: BTreeMap<String, Vec<&Forwarded>> = BTreeMap::new();
        for request in forwarded {
            if self.policies_of(&request.method, &request.target).contains(&policy) {
                counts.entry(identity(request)).or_default().push(request);
            }
        }
        for (identity, requests) in &counts {
            assert!(requests.len() <= LIMIT, "{policy} {identity:?}: {requests:#?}");
        }
    }
}

#[test]
fn fuzz_requests_reach_the_upstream_as_they_were_decided() {
    let seed = seeded::seed();
    let cases = seeded::cases(8_000) as u64;
    let all: Vec<u64> = (0..cases).map(|case| seed.wrapping_add(case)).collect();
    let kept: Vec<Vec<u8>> = include_str!("fuzz/regressions.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(generator::unescaped)
        .collect();
    std::thread::scope(|scope| {
        for (number, settings) in (0..).zip(SETTINGS) {
            let is_mine = move |seed: &&u64| **seed % SETTINGS.len() as u64 == number;
            let (mine, kept) = (all.iter().filter(is_mine), &kept);
            scope.spawn(move || {
                let mut target = Target::start(settings);
                for bytes in kept {
                    target.send(seed, bytes, 0);
                }
                for seed in mine {
                    target.run(*seed);
                }
                target.check();
            });
        }
    });
}
