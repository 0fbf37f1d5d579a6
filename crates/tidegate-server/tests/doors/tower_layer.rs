//! The Tower layer, in this process, with an observer and a span recorder.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::ConnectInfo;
use tidegate::layer::RateLimitLayer;
use tidegate::{
    Action, ClientIp, Enforcement, Limiter, MemoryStore, Observer, Policy, PolicyDecisions,
    PolicyLimiter, TRACE_TARGET, Timestamp,
};
use tracing::field::{Field, Visit};
use tracing::span;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use crate::cases::Case;
use crate::door::{Answer, DecideSpan, Door, Record};
use crate::http::{config, exchange, request_head, serve_app};

pub(crate) struct TowerDoor {
    address: SocketAddr,
    recorder: Arc<Recorder>,
    spans: Spans,
}

/// Records keys and counters as the service does.
#[derive(Default)]
struct Recorder(Mutex<Recorded>);

#[derive(Default)]
struct Recorded {
    keys: BTreeSet<(String, String)>,
    metrics: BTreeMap<String, u64>,
}

impl Recorder {
    fn count(&self, metric: &str, policy: &Policy) {
        let name = format!("{metric}{{policy=\"{}\"}}", policy.name());
        *self.0.lock().expect("no panic").metrics.entry(name).or_default() += 1;
    }
}

impl Observer for Recorder {
    fn decided(&self, _: Action, decisions: &PolicyDecisions<'_>, _: Timestamp) {
        let mut recorded = self.0.lock().expect("no panic");
        for decision in decisions {
            let policy = decision.policy();
            let outcome = match (decision.decision().allowed, decision.enforcement()) {
                (true, _) => "allowed",
                (false, Enforcement::Enforce) => "denied",
                (false, _) => "shadow_denied",
            };
            let name =
                format!("tidegate_decisions_total{{policy=\"{policy}\",outcome=\"{outcome}\"}}");
            *recorded.metrics.entry(name).or_default() += 1;
            if let Some(key) = decision.key() {
                recorded.keys.insert((policy.to_owned(), key.to_owned()));
            }
        }
    }

    fn key_missing(&self, policy: &Policy) {
        self.count("tidegate_missing_key_total", policy);
    }

    fn other_limit(&self, policy: &Policy) {
        self.count("tidegate_limits_other_total", policy);
    }
}

/// Records the `decide` spans.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<DecideSpan>>>);

/// Position of a span in the list.
struct Position(usize);

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Spans {
    fn on_new_span(
        &self,
        attributes: &span::Attributes<'_>,
        id: &span::Id,
        context: Context<'_, S>,
    ) {
        let metadata = attributes.metadata();
        if metadata.target() == TRACE_TARGET && metadata.name() == "decide" {
            let mut fields = DecideSpan::default();
            attributes.record(&mut fields);
            let mut spans = self.0.lock().expect("no panic");
            let span = context.span(id).expect("it is new");
            span.extensions_mut().insert(Position(spans.len()));
            spans.push(fields);
        }
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).expect("it is open");
        if let Some(Position(position)) = span.extensions().get() {
            values.record(&mut self.0.lock().expect("no panic")[*position]);
        }
    }
}

impl Visit for DecideSpan {
    fn record_bool(&mut self, field: &Field, value: bool) {
        if field.name() == "allowed" {
            self.allowed = Some(value);
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "policies" => value.clone_into(&mut self.policies),
            "denied_by" => self.denied_by = Some(value.to_owned()),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "action" {
            self.action = format!("{value:?}");
        }
    }
}

impl TowerDoor {
    pub(crate) async fn start(cases: &[Case]) -> Self {
        let spans = Spans::default();
        let subscriber = tracing_subscriber::registry().with(spans.clone());
        tracing::subscriber::set_global_default(subscriber).expect("the only one");
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, config(cases)).expect("written");
        let policies = tidegate_config::load_policies(&file).expect("valid policies");
        let recorder = Arc::new(Recorder::default());
        let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies)
            .with_observer(Arc::clone(&recorder));
        let proxies = vec!["127.0.0.1/32".parse().expect("a network")];
        let layer = RateLimitLayer::with_policy_limiter(limiter)
            .client_ip(ClientIp::new(proxies, 64).expect("valid"))
            .peer(|parts| parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|peer| peer.ip()));
        let address = serve_app(Router::new().fallback(async || "ok").layer(layer)).await;
        Self { address, recorder, spans }
    }
}

impl Door for TowerDoor {
    async fn send(&mut self, case: &Case) -> Answer {
        let head = request_head("GET", case.target, case.host, case, &[]);
        exchange(&self.address.to_string(), head).await
    }

    async fn finish(self, answers: Vec<(&'static str, Answer)>) -> Record {
        let recorded = std::mem::take(&mut *self.recorder.0.lock().expect("no panic"));
        let spans = self.spans.0.lock().expect("no panic").clone();
        Record { answers, keys: recorded.keys, metrics: recorded.metrics, spans }
    }
}
