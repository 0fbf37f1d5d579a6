use std::time::Duration;

use tidegate::Attributes as _;

use crate::form::{LIMIT, WINDOW};
use crate::simulate::TrafficRequest as _;
use crate::simulate::load::{GeneratedLoad, LoadKind};

pub(crate) const LOADS: [LoadKind; 4] =
    [LoadKind::Steady, LoadKind::Burst, LoadKind::Boundary, LoadKind::Attack];

/// Number of windows of a load.
const WINDOWS: u32 = 6;
/// Requests of the client, as a multiple of its limit.
const DEMAND: f64 = 2.0;

/// Request of a client.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// Microseconds since the Unix epoch.
    pub(crate) time: u64,
    /// Number of the client, which has its own count.
    pub(crate) client: usize,
}

/// Requests of a load, in the order of their times.
#[derive(Debug)]
pub(crate) struct Traffic {
    pub(crate) requests: Vec<Request>,
    pub(crate) clients: usize,
    /// Time at which the load starts, the start of a window.
    pub(crate) start: u64,
}

impl Traffic {
    /// Returns the requests of one client, or of two with an attack, at twice the limit.
    pub(crate) fn of(kind: LoadKind) -> Self {
        Self::with_quota(kind, LIMIT, WINDOW)
    }

    pub(crate) fn with_quota(kind: LoadKind, limit: u64, window: Duration) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a small limit")]
        let rate = DEMAND * limit as f64 / window.as_secs_f64();
        Self::generate(&GeneratedLoad {
            kind,
            rate,
            keys: 1,
            zipf: 0.0,
            duration: window * WINDOWS,
            seed: 1,
            period: window,
            attributes: Vec::new(),
        })
    }

    /// Returns the requests of 20,000 independent clients, of which five exceed the limit.
    pub(crate) fn of_many_clients() -> Self {
        Self::generate(&GeneratedLoad {
            kind: LoadKind::Poisson,
            rate: 2_000.0,
            keys: 20_000,
            zipf: 0.7,
            duration: WINDOW * WINDOWS,
            seed: 1,
            period: WINDOW,
            attributes: Vec::new(),
        })
    }

    fn generate(load: &GeneratedLoad) -> Self {
        load.check().expect("a valid load");
        let mut requests = Vec::new();
        let collected = load.for_each(|request, _| {
            let name = request.get("client").expect("each request has a client");
            let client = name.strip_prefix("client-").expect("its number").parse()?;
            requests.push(Request { time: request.time(), client });
            Ok(())
        });
        collected.expect("a valid load");
        let clients = requests.iter().map(|request| request.client + 1).max().unwrap_or(0);
        Self { requests, clients, start: load.period().0 }
    }
}

/// Returns the name of a load in the tables, that of `tidegate simulate --load`.
pub(crate) fn name(kind: LoadKind) -> String {
    format!("{kind:?}").to_lowercase()
}
