use std::collections::BTreeSet;

use crate::certificates::Authority;
use crate::support::{Redis, free_port};
use crate::{advice_of, assert_found, doctor_with, report, text};

/// Redis with a plain port and a TLS port.
struct TlsRedis {
    redis: Redis,
    port: u16,
    folder: tempfile::TempDir,
}

impl TlsRedis {
    /// Starts a server whose certificate is for `redis.test`.
    fn start(more: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let authority = Authority::new();
        let (certificate, key) = authority.sign("redis.test").write(folder.path());
        let ca = folder.path().join("ca.pem");
        std::fs::write(&ca, authority.pem()).expect("written");
        let other = folder.path().join("other.pem");
        std::fs::write(&other, Authority::named("another").pem()).expect("written");
        let [certificate, key, ca] =
            [&certificate, &key, &ca].map(|path| path.to_str().expect("UTF-8").to_owned());
        let port = free_port();
        let tls_port = port.to_string();
        let options = [
            ["--tls-port", &tls_port],
            ["--tls-cert-file", &certificate],
            ["--tls-key-file", &key],
            ["--tls-ca-cert-file", &ca],
        ];
        let redis = Redis::start_with(&[&options.concat()[..], more].concat());
        Self { redis, port, folder }
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Returns a configuration with the TLS port and these fields of `store.tls`.
    fn config(&self, user: &str, fields: &str) -> String {
        format!("store: {{redis: 'rediss://{user}127.0.0.1:{}', tls: {{{fields}}}}}\n", self.port)
    }
}

#[test]
fn each_cause_of_a_failed_connection_has_its_own_advice() {
    let open = TlsRedis::start(&["--tls-auth-clients", "no"]);
    let strict = TlsRedis::start(&["--tls-auth-clients", "yes"]);
    let locked = Redis::start_with(&["--requirepass", "planted-secret"]);
    let (ca, other) = (open.file("ca.pem"), open.file("other.pem"));
    let cases = [
        (
            format!("store: {{redis: '{}'}}\n", open.redis.url().replace("redis:", "rediss:")),
            "the server speaks no TLS on this port, and the URL is rediss://",
            "use redis://, or the server's TLS port",
        ),
        (
            format!("store: {{redis: 'redis://127.0.0.1:{}'}}\n", open.port),
            "the server speaks TLS on this port, and the URL is redis://",
            "use rediss://, or the server's port without TLS",
        ),
        (open.config("", &format!("ca: {other}")), "UnknownIssuer", "store.tls.ca"),
        (open.config("", &format!("ca: {ca}")), "not valid for name", "store.tls.server_name"),
        // The port of a TLS server that is down.
        (
            format!("store: {{redis: 'rediss://127.0.0.1:{}'}}\n", free_port()),
            "Connection refused",
            "start Redis, or correct the host and the port",
        ),
        (
            strict.config("", &format!("ca: {}, server_name: redis.test", strict.file("ca.pem"))),
            "ertificate",
            "store.tls.certificate and store.tls.key",
        ),
        (
            format!("store: {{redis: 'redis://u:wrong-secret@127.0.0.1:{}'}}\n", locked.port()),
            "WRONGPASS: the user or the password is wrong",
            "ACL LIST",
        ),
        (
            format!("store: {{redis: '{}'}}\n", locked.url()),
            "NOAUTH: the server requires a password, and none was given",
            "store.password_file",
        ),
    ];
    let mut advices = BTreeSet::new();
    for (config, message, advice) in &cases {
        let (found, code) = report(&doctor_with(config, &["--json"]));
        assert_eq!(code, Some(2), "{found}");
        assert_found(&found, "connection", "error", message);
        let given = advice_of(&found, "connection", "error");
        assert!(given.contains(advice), "{given:?} does not contain {advice:?}");
        assert!(!found.to_string().contains("secret"), "{found}");
        // As text, the advice has a line of its own.
        let output = doctor_with(config, &[]);
        let shown = text(&output.stdout);
        assert_eq!(output.status.code(), Some(2), "{shown}{}", text(&output.stderr));
        assert!(shown.starts_with("error    connection "), "{shown}{}", text(&output.stderr));
        assert!(shown.contains(&format!("→ {given}\n")), "{shown}");
        advices.insert(given);
    }
    assert_eq!(advices.len(), cases.len(), "{advices:?}");
}

#[test]
fn server_name_of_the_configuration_is_verified() {
    let redis = TlsRedis::start(&["--tls-auth-clients", "no"]);
    let ca = redis.file("ca.pem");
    let named = redis.config("", &format!("ca: {ca}, server_name: redis.test"));
    let (found, code) = report(&doctor_with(&named, &["--json", "--probes", "5"]));
    assert_eq!(code, Some(0), "{found}");
    let wrong = redis.config("", &format!("ca: {ca}, server_name: other.test"));
    let (found, code) = report(&doctor_with(&wrong, &["--json", "--probes", "5"]));
    assert_eq!(code, Some(2), "{found}");
    assert_found(&found, "connection", "error", "not valid for name \"other.test\"");
}
