//! `GET /v1/history`: one sample per second of the last 15 minutes.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header;

use super::{AccessProblems, Admin};

/// Number of samples: 15 minutes.
const MAX_SAMPLES: usize = 900;

/// Samples as JSON, the oldest first. Each is serialized once.
#[derive(Default)]
pub(super) struct SampleHistory {
    samples: VecDeque<Arc<str>>,
    /// Number of samples since the start.
    total: u64,
}

impl SampleHistory {
    /// Adds a sample, and returns its number.
    pub(super) fn push(&mut self, sample: Arc<str>) -> u64 {
        if self.samples.len() == MAX_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        self.total += 1;
        self.total
    }

    /// Returns the newest sample.
    pub(super) fn last(&self) -> Option<Arc<str>> {
        self.samples.back().cloned()
    }

    /// Returns the number of the newest sample.
    pub(super) fn newest(&self) -> u64 {
        self.total
    }

    /// Returns the body of a response.
    pub(super) fn body(&self) -> String {
        let bytes: usize = self.samples.iter().map(|sample| sample.len() + 1).sum();
        let mut body = String::with_capacity(bytes + 40);
        body.push_str("{\"interval_ms\":1000,\"samples\":[");
        for (number, sample) in self.samples.iter().enumerate() {
            if number > 0 {
                body.push(',');
            }
            body.push_str(sample);
        }
        body.push_str("]}");
        body
    }
}

/// One sample per second of the last 15 minutes
#[utoipa::path(
    get, path = "/v1/history", operation_id = "history",
    responses((status = 200, description = "Samples", body = HistoryBody), AccessProblems)
)]
pub(super) async fn handle(State(admin): State<Admin>) -> Response {
    let body = admin.live.history().body();
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Samples, the oldest first.
#[derive(utoipa::ToSchema)]
#[expect(dead_code, reason = "only for the schema; each sample is serialized once")]
struct HistoryBody {
    interval_ms: u64,
    #[schema(value_type = Vec<Object>, max_items = 900)]
    samples: Vec<Arc<str>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_keeps_the_newest_samples() {
        let mut history = SampleHistory::default();
        assert_eq!(history.body(), r#"{"interval_ms":1000,"samples":[]}"#);
        for number in 0..MAX_SAMPLES + 5 {
            history.push(number.to_string().into());
        }
        let body: serde_json::Value = serde_json::from_str(&history.body()).expect("JSON");
        let samples = body["samples"].as_array().expect("a list");
        assert_eq!(samples.len(), MAX_SAMPLES);
        assert_eq!((&samples[0], &samples[MAX_SAMPLES - 1]), (&5.into(), &904.into()));
        assert_eq!(history.newest(), 905);
    }
}
