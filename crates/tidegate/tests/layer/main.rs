//! The layer in front of real services: axum, tonic and hyper, over HTTP on the loopback.

mod axum_app;
mod examples;
mod failures;
mod fleet;
mod grpc;
mod in_flight;
mod plain;
mod policies;
mod queue;
mod site;
#[path = "../support/mod.rs"]
mod support;
