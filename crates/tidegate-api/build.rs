//! Generates the messages of Envoy's rate limit service, and of the discovery of its rules, from
//! `proto/`, without protoc.
//!
//! Some small proto files replace the crate `envoy-types`, which has every message of Envoy: a
//! release build takes 34 seconds of CPU time instead of 77.

use std::path::PathBuf;

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["envoy/service/ratelimit/v3/rls.proto"], ["proto"])?;
    let set = PathBuf::from(std::env::var("OUT_DIR")?).join("rls.bin");
    // Served by gRPC reflection.
    std::fs::write(set, descriptors.encode_to_vec())?;
    let discovery = protox::compile(["envoy/service/discovery/v3/ads.proto"], ["proto"])?;
    // The server of the rate limit service is written by hand. Only the tests need its client, and
    // the server of discovery.
    for (descriptors, has_server) in [(descriptors, false), (discovery, true)] {
        tonic_prost_build::configure()
            .build_server(has_server)
            .build_transport(false)
            .compile_fds(descriptors)?;
    }
    Ok(())
}
