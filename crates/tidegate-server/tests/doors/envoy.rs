//! Envoy's rate limit service, with the attributes of a case as descriptors.

use tonic::transport::{Channel, Endpoint};

use crate::cases::Case;
use crate::door::{Answer, Door, Outcome, Record};
use crate::http::Process;
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tidegate_api::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;

pub(crate) struct EnvoyDoor {
    process: Process,
    client: RateLimitServiceClient<Channel>,
}

impl EnvoyDoor {
    pub(crate) async fn start(cases: &[Case]) -> Self {
        let mut yaml = "policies:\n".to_owned();
        for case in cases {
            let matches = format!("{{descriptor.case: '{}'}}", case.number);
            let key: Vec<String> =
                (0..case.sources.len()).map(|at| format!("descriptor.key{at}")).collect();
            yaml.push_str(&case.yaml(&matches, &key.join(", "), "descriptor.cost"));
        }
        let process = Process::serve(yaml).await;
        let address = process.service.grpc.clone().expect("an address");
        let channel = Endpoint::new(format!("http://{address}")).expect("an address");
        let client = RateLimitServiceClient::new(channel.connect().await.expect("it listens"));
        Self { process, client }
    }
}

fn entry(key: &str, value: &str) -> Entry {
    Entry { key: key.to_owned(), value: value.to_owned() }
}

impl Door for EnvoyDoor {
    async fn send(&mut self, case: &Case) -> Answer {
        let mut entries = vec![entry("case", &case.number.to_string())];
        // Envoy sends the client's address itself.
        let key = case.key.filter(|_| case.values.is_empty()).map(str::to_owned);
        let values = case.values.iter().chain(&key).zip(0..case.sources.len());
        // The other doors normalize these values before they count; Envoy sends them as they are.
        let is_normalized = matches!(case.sources, ["path" | "host"]);
        let normalized = case.key.filter(|_| is_normalized);
        for (value, at) in values {
            entries.push(entry(&format!("key{at}"), normalized.unwrap_or(value)));
        }
        entries.extend(case.cost.map(|cost| entry("cost", cost)));
        let request = RateLimitRequest {
            domain: "edge".to_owned(),
            descriptors: vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }],
            hits_addend: 0,
        };
        let response = self.client.should_rate_limit(request).await.expect("a response");
        let response = response.into_inner();
        let status = &response.statuses[0];
        let limit = status.current_limit.as_ref();
        let outcome = match (response.overall_code(), limit) {
            (Code::OverLimit, Some(_)) => Outcome::Denied,
            // An invalid request must not pass, as it would after a gRPC error.
            (Code::OverLimit, None) => Outcome::Error,
            _ => Outcome::Allowed,
        };
        let limit = limit
            .map(|limit| (u64::from(limit.requests_per_unit), u64::from(status.limit_remaining)));
        Answer { outcome, limit, headers: None }
    }

    async fn finish(self, answers: Vec<(&'static str, Answer)>) -> Record {
        self.process.finish(answers).await
    }
}
