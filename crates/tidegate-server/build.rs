//! Makes the messages of Envoy's rate limit service from `proto/`, without protoc.
//!
//! Four small files instead of the crate `envoy-types`, which has every message of Envoy: 34
//! seconds of processor time in a release build against 77.

use std::path::PathBuf;

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["envoy/service/ratelimit/v3/rls.proto"], ["proto"])?;
    let set = PathBuf::from(std::env::var("OUT_DIR")?).join("rls.bin");
    // What gRPC reflection answers with.
    std::fs::write(set, descriptors.encode_to_vec())?;
    // The server is our own; the client is for the tests.
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
