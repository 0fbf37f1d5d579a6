//! Generates the messages of Envoy's rate limit service for the no-op server.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proto = "../crates/tidegate-api/proto";
    println!("cargo::rerun-if-changed={proto}");
    let descriptors = protox::compile(["envoy/service/ratelimit/v3/rls.proto"], [proto])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
