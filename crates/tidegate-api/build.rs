//! Generates the messages of Envoy's rate limit service from `proto/`, without protoc.
//!
//! Four small proto files replace the crate `envoy-types`, which has every message of Envoy: a
//! release build takes 34 seconds of CPU time instead of 77.

use std::path::PathBuf;

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["envoy/service/ratelimit/v3/rls.proto"], ["proto"])?;
    let set = PathBuf::from(std::env::var("OUT_DIR")?).join("rls.bin");
    // Served by gRPC reflection.
    std::fs::write(set, descriptors.encode_to_vec())?;
    // The server is written by hand, and only the tests need the client.
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
