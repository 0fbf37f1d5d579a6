//! The load generator of all candidates and protocols. In an open loop requests are due at a
//! constant rate, whatever the server does, and latency is measured from the due time: a late answer
//! counts for each request that it delays, too (no coordinated omission). Without a rate, each
//! answer is followed by the next request.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

use crate::grpc;
use crate::redis::call::write_digits;
use crate::redis::random::Random;

/// Digits of a user's number, which each request replaces.
pub(crate) const USER: &str = "000000000000";
const TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http,
    Grpc,
    Resp,
}

/// A request as it is sent to a port.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) port: u16,
    pub(crate) protocol: Protocol,
    pub(crate) bytes: Vec<u8>,
    /// Offsets of the numbers of users, and how many have the same.
    pub(crate) users: Vec<usize>,
    pub(crate) same_users: usize,
    /// Offsets of the number of the HTTP/2 stream.
    pub(crate) streams: Vec<usize>,
}

/// Users of the requests.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Users {
    /// A random one of this many for each decision.
    Random(u64),
    /// One after the other.
    InOrder,
}

/// Answers that have arrived.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Answers {
    pub(crate) count: u64,
    pub(crate) allowed: u64,
    /// Messages of gRPC, whose errors have none.
    pub(crate) messages: u64,
}

/// Number of connections, of the requests that each has in flight, and of all requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) connections: usize,
    pub(crate) pipeline: u64,
    pub(crate) users: Users,
    pub(crate) requests: u64,
    /// Time after which no request is sent.
    pub(crate) duration: Duration,
    /// Requests per second of all connections; `None` for as many as are answered.
    pub(crate) rate: Option<f64>,
}

/// Result of a load.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) answers: Answers,
    pub(crate) per_second: f64,
    /// Those of an open loop, ascending.
    latencies: Vec<Duration>,
}

/// State of a connection.
#[derive(Default)]
struct Connection {
    input: Vec<u8>,
    out: Vec<u8>,
    in_flight: u64,
    next_stream: u32,
    /// Due time of the last request.
    due: Option<Instant>,
}

impl Outcome {
    /// Returns the latency that this share of the requests did not exceed.
    pub(crate) fn micros(&self, share: f64) -> Result<f64> {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
        let index = (self.latencies.len() as f64 * share) as usize;
        Ok(self.latencies.get(index).context("no request was answered")?.as_secs_f64() * 1e6)
    }
}

impl Request {
    /// Creates a request in which [`USER`] stands for each user.
    pub(crate) fn new(port: u16, protocol: Protocol, bytes: Vec<u8>) -> Self {
        let is_user = |at: &usize| bytes[*at..].starts_with(USER.as_bytes());
        let users = (0..bytes.len()).filter(is_user).collect();
        Self { port, protocol, bytes, users, same_users: 1, streams: Vec::new() }
    }

    pub(crate) fn push(&self, out: &mut Vec<u8>, stream: u32, mut next_user: impl FnMut() -> u64) {
        let start = out.len();
        out.extend_from_slice(&self.bytes);
        for same in self.users.chunks(self.same_users) {
            let user = next_user();
            for at in same {
                write_digits(&mut out[start + at..][..USER.len()], user);
            }
        }
        for at in &self.streams {
            out[start + at..][..4].copy_from_slice(&stream.to_be_bytes());
        }
    }

    /// Takes the answers that have arrived completely, and appends what has to be sent back.
    fn read(&self, input: &mut Vec<u8>, out: &mut Vec<u8>) -> Result<Answers> {
        let next = match self.protocol {
            Protocol::Http => http_answer,
            Protocol::Resp => resp_answer,
            Protocol::Grpc => return grpc::read_answers(input, out),
        };
        let (mut answers, mut parsed) = (Answers::default(), 0);
        while let Some((length, is_allowed)) = next(&input[parsed..])? {
            parsed += length;
            answers.count += 1;
            answers.allowed += u64::from(is_allowed);
        }
        input.drain(..parsed);
        Ok(answers)
    }
}

impl Load {
    /// A closed loop over as many connections as that of `wrk`.
    pub(crate) fn closed(users: Users, duration: Duration) -> Self {
        Self { connections: 64, pipeline: 1, users, requests: u64::MAX, duration, rate: None }
    }

    /// A closed loop of this many requests, over as many connections as that of `redis-benchmark`.
    pub(crate) fn pipelined(pipeline: u64, users: Users, requests: u64) -> Self {
        Self { connections: 50, pipeline, requests, ..Self::closed(users, Duration::MAX) }
    }

    /// Sends the requests, and fails if an answer is missing or is an error.
    pub(crate) fn run(self, request: &Request) -> Result<Outcome> {
        // In a thread of its own, because servers inherit the timers of the main one.
        std::thread::scope(|scope| scope.spawn(|| self.send_all(request)).join())
            .map_err(|_| anyhow!("the generator panicked"))?
    }

    fn send_all(self, request: &Request) -> Result<Outcome> {
        // Wake at the due time. By default Linux may wake a thread 50 microseconds later.
        rustix::thread::set_current_timer_slack(NonZeroU64::new(1))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let (mut sockets, mut connections) = (Vec::new(), Vec::new());
        for number in 0..self.connections {
            let socket = TcpStream::connect(("127.0.0.1", request.port))?;
            socket.set_nodelay(true)?;
            let number = epoll::EventData::new_u64(number as u64);
            epoll::add(&epoll, &socket, number, epoll::EventFlags::IN)?;
            sockets.push(socket);
            let mut connection = Connection { next_stream: 1, ..Connection::default() };
            if request.protocol == Protocol::Grpc {
                grpc::open(&mut connection.out);
            }
            connections.push(connection);
        }
        let mut ready: Vec<epoll::Event> = Vec::with_capacity(self.connections);
        let (mut random, mut user) = (Random::new(0), 0);
        let mut next_user = || match self.users {
            Users::Random(count) => random.below(count),
            Users::InOrder => {
                user += 1;
                user - 1
            }
        };
        let (mut outcome, mut sent, mut buffer) = (Outcome::default(), 0, vec![0; 65_536]);
        let start = Instant::now();
        loop {
            let now = Instant::now();
            let due_at = |number: u64| {
                let due = self.rate.map(|rate| Duration::from_secs_f64(number as f64 / rate));
                due.map_or(now, |due| start + due)
            };
            let is_over = |number| {
                number >= self.requests || due_at(number).duration_since(start) >= self.duration
            };
            for (connection, mut socket) in connections.iter_mut().zip(&sockets) {
                // Streams are independent of each other; a pipeline starts when the last has ended.
                if connection.in_flight > 0 && request.protocol != Protocol::Grpc {
                    continue;
                }
                let before = connection.in_flight;
                while connection.in_flight < self.pipeline && !is_over(sent) && due_at(sent) <= now
                {
                    request.push(&mut connection.out, connection.next_stream, &mut next_user);
                    connection.due = Some(due_at(sent));
                    connection.next_stream += 2;
                    connection.in_flight += 1;
                    sent += 1;
                }
                if connection.in_flight > before {
                    socket.write_all(&connection.out)?;
                    connection.out.clear();
                }
            }
            let is_waiting = connections.iter().any(|connection| connection.in_flight > 0);
            if is_over(sent) && !is_waiting {
                break;
            }
            let is_full = connections.iter().all(|connection| connection.in_flight > 0);
            let next = if is_full || is_over(sent) { TIMEOUT } else { due_at(sent) - now };
            let timeout = Timespec::try_from(next.saturating_sub(now.elapsed()))?;
            ready.clear();
            epoll::wait(&epoll, spare_capacity(&mut ready), Some(&timeout))?;
            ensure!(next < TIMEOUT || !ready.is_empty(), "no answer");
            for event in &ready {
                let index = usize::try_from(event.data.u64())?;
                let connection = &mut connections[index];
                let length = (&sockets[index]).read(&mut buffer)?;
                ensure!(length > 0, "the server closed the connection");
                connection.input.extend_from_slice(&buffer[..length]);
                let answers = request.read(&mut connection.input, &mut connection.out)?;
                if let Some(due) =
                    connection.due.filter(|_| self.rate.is_some() && answers.count > 0)
                {
                    outcome.latencies.push(due.elapsed());
                }
                outcome.answers.count += answers.count;
                outcome.answers.allowed += answers.allowed;
                outcome.answers.messages += answers.messages;
                connection.in_flight -= answers.count;
            }
        }
        let Answers { count, messages, .. } = outcome.answers;
        ensure!(request.protocol != Protocol::Grpc || messages >= count, "a call failed");
        outcome.latencies.sort_unstable();
        outcome.per_second = outcome.answers.count as f64 / start.elapsed().as_secs_f64();
        Ok(outcome)
    }
}

/// Returns the length of the first answer, and whether it allows the request.
fn http_answer(input: &[u8]) -> Result<Option<(usize, bool)>> {
    let Some(end) = input.windows(4).position(|part| part == b"\r\n\r\n") else { return Ok(None) };
    let head = std::str::from_utf8(&input[..end]).context("a head")?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>())
    });
    let length = end + 4 + length.with_context(|| format!("no length: {head}"))??;
    let Some(body) = input.get(end + 4..length) else { return Ok(None) };
    let (is_ok, is_denied) = (head.contains(" 200 "), head.contains(" 429 "));
    ensure!(is_ok || is_denied, "{head}");
    let denial = br#""allowed":false"#;
    Ok(Some((length, is_ok && !body.windows(denial.len()).any(|part| part == denial))))
}

/// Returns the length of the first reply. It is a denial if its first number is 0.
fn resp_answer(input: &[u8]) -> Result<Option<(usize, bool)>> {
    let Some(length) = reply_length(input)? else { return Ok(None) };
    let mut lines = input[..length].split(|byte| *byte == b'\n');
    let first = lines.find(|line| !line.starts_with(b"*")).unwrap_or_default();
    Ok(Some((length, !first.starts_with(b":0"))))
}

/// Returns the length of the first reply; `None` if it is incomplete.
fn reply_length(input: &[u8]) -> Result<Option<usize>> {
    // A reply of N elements is followed by them.
    let (mut at, mut replies) = (0, 1_usize);
    while replies > 0 {
        let Some(line) = input[at..].windows(2).position(|end| end == b"\r\n") else {
            return Ok(None);
        };
        let text = std::str::from_utf8(&input[at..at + line]).context("a reply")?;
        at += line + 2;
        replies -= 1;
        let length = || text[1..].parse::<usize>().with_context(|| format!("reply {text}"));
        match text.as_bytes().first() {
            Some(b':' | b'+') => {}
            Some(b'$') => at += length()? + 2,
            Some(b'*') => replies += length()?,
            _ => bail!("Redis answered {text}"),
        }
        if at > input.len() {
            return Ok(None);
        }
    }
    Ok(Some(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_reply_includes_its_elements() {
        let replies = b"*3\r\n:1\r\n$2\r\nab\r\n*1\r\n:5\r\n:7\r\n";
        assert_eq!(reply_length(replies).expect("a reply"), Some(replies.len() - 4));
        for end in 0..replies.len() - 4 {
            assert_eq!(reply_length(&replies[..end]).expect("incomplete"), None, "{end}");
        }
        assert!(reply_length(b"-ERR no\r\n").is_err());
    }

    #[test]
    fn answers_are_taken_when_they_are_complete() {
        let http = b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{\"allowed\":false}HTTP/1.1 ";
        let resp = b"*2\r\n:0\r\n:7\r\n*1\r\n:1\r\n*1";
        for (protocol, bytes, allowed) in
            [(Protocol::Http, &http[..], 0), (Protocol::Resp, &resp[..], 1)]
        {
            let request = Request::new(0, protocol, Vec::new());
            let (mut input, mut answers) = (Vec::new(), Answers::default());
            for byte in bytes {
                input.push(*byte);
                let new = request.read(&mut input, &mut Vec::new()).expect("no error");
                (answers.count, answers.allowed) =
                    (answers.count + new.count, answers.allowed + new.allowed);
            }
            assert_eq!((answers.count, answers.allowed), (allowed + 1, allowed), "{protocol:?}");
        }
    }

    #[test]
    fn a_late_answer_delays_the_requests_behind_it() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().expect("a connection");
            for number in 0..10 {
                socket.read_exact(&mut [0]).expect("a request");
                // The first answer is late by more than all other requests are due.
                let wait = if number == 0 { 100 } else { 0 };
                std::thread::sleep(Duration::from_millis(wait));
                socket.write_all(b":1\r\n").expect("sent");
            }
        });
        let (rate, users) = (Some(1_000.0), Users::InOrder);
        let duration = Duration::from_secs(9);
        let load = Load { connections: 1, rate, requests: 10, ..Load::closed(users, duration) };
        let request = Request::new(port, Protocol::Resp, b"x".to_vec());
        let outcome = load.run(&request).expect("a result");
        server.join().expect("the server ends");
        assert_eq!(outcome.answers.allowed, 10);
        assert!(outcome.micros(0.0).expect("latencies") > 90_000.0, "{outcome:?}");
    }
}
