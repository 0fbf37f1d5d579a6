//! A Redis URL with the wrong scheme for its port, on a real server with and without TLS.

#[path = "../../tidegate/tests/support/certificates.rs"]
mod certificates;
mod support;

use std::process::{Command, Output, Stdio};

use certificates::Authority;
use support::{Redis, free_port, with_free_ports};

/// The timeout is long enough for a busy machine.
const ACQUIRE: [&str; 8] = ["acquire", "k", "--limit", "5", "--window", "60s", "--timeout", "5s"];

/// Runs a command that is expected to exit.
fn tidegate(arguments: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.arg("60").arg(env!("CARGO_BIN_EXE_tidegate")).args(arguments);
    command.stdin(Stdio::null()).output().expect("the binary runs")
}

#[test]
fn wrong_scheme_is_named_by_acquire_doctor_and_serve() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let authority = Authority::new();
    let (certificate, key) = authority.sign("127.0.0.1").write(folder.path());
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, authority.pem()).expect("written");
    let [certificate, key, ca] =
        [&certificate, &key, &ca].map(|path| path.to_str().expect("UTF-8").to_owned());
    let tls_port = free_port();
    let tls_options = [
        ["--tls-port", &tls_port.to_string()],
        ["--tls-cert-file", &certificate],
        ["--tls-key-file", &key],
        ["--tls-ca-cert-file", &ca],
        ["--tls-auth-clients", "no"],
    ];
    let redis = Redis::start_with(&tls_options.concat());
    let to_plain_port = redis.url().replace("redis://", "rediss://:hunter2@");
    let to_tls_port = format!("redis://:hunter2@127.0.0.1:{tls_port}");
    let file = folder.path().join("tidegate.yaml");
    std::fs::write(&file, with_free_ports("store: {timeout: 5s}\n")).expect("written");
    let file = file.to_str().expect("UTF-8");
    for (url, reason) in [
        (&to_plain_port, "the server speaks no TLS on this port, and the URL is rediss://"),
        (&to_tls_port, "the server speaks TLS on this port, and the URL is redis://"),
    ] {
        for arguments in [
            &[&ACQUIRE[..], &["--redis", url]].concat()[..],
            &["doctor", "--timeout", "5s", "--redis", url],
            &["serve", "--config", file, "--redis", url],
        ] {
            let output = tidegate(arguments);
            // The doctor reports it as a finding.
            let text =
                String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
            assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
            assert!(text.contains(reason) && !text.contains("hunter2"), "{arguments:?}: {text}");
        }
        // Through the discovery of a cluster the reason is the same.
        let cluster = format!("{url},{url}");
        let output = tidegate(&[&ACQUIRE[..], &["--redis", &cluster]].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(reason) && !text.contains("hunter2"), "{text}");
    }
}
