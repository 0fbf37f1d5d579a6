//! Advice for a connection that fails, by its cause.

use tidegate::StoreError;

use super::Finding;

pub(super) const CHECK: &str = "connection";

/// Part of an error, and the advice for it.
const ADVICE: [(&str, &str); 12] = [
    (
        "Connection refused",
        "start Redis, or correct the host and the port: nothing accepts connections there",
    ),
    (
        "WRONGPASS",
        "compare the user and the password with ACL LIST on the server: the password is that of \
         store.password_file, of store.sentinel, or of the URL",
    ),
    (
        "NOAUTH",
        "set store.password_file or --redis-password-file, or redis://user:password@host as the \
         URL",
    ),
    (
        "without any password configured",
        "the server has no password: leave it out, or set requirepass on the server",
    ),
    ("SELECT", DATABASE),
    ("DB index", DATABASE),
    ("UnknownIssuer", AUTHORITY),
    // The authority has the name of a trusted one, but another key.
    ("BadSignature", AUTHORITY),
    (
        "not valid for name",
        "use a name of the certificate in the URL, or set store.tls.server_name to one",
    ),
    ("certificate expired", "renew the server's certificate"),
    ("CertificateRequired", CLIENT_CERTIFICATE),
    ("client certificate", CLIENT_CERTIFICATE),
];

const DATABASE: &str = "use database 0, without a number in the URL: clusters and most services \
                        have no other; store.prefix separates the counts of several deployments";
const AUTHORITY: &str =
    "set store.tls.ca to the certificate of the authority that signed the server's, in PEM";
const CLIENT_CERTIFICATE: &str = "set store.tls.certificate and store.tls.key to a client \
                                  certificate that the server's authority has signed";

/// Returns the finding of an error of a known cause.
pub(super) fn finding(error: &StoreError) -> Option<Finding> {
    let text = error.to_string();
    // The error of a wrong scheme contains its advice.
    if let Some((message, advice)) = text.split_once(": use redis") {
        return Some(Finding::error(CHECK, message).advice(format!("use redis{advice}")));
    }
    let (_, advice) = ADVICE.into_iter().find(|(part, _)| text.contains(part))?;
    Some(Finding::error(CHECK, text).advice(advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_depends_on_the_cause() {
        let advice = |error: &str| {
            let finding = finding(&StoreError::Unreachable(error.to_owned()))?;
            Some((finding.message, finding.advice.expect("an advice")))
        };
        let (message, given) = advice("h:1: no TLS here: use redis://, or that").expect("known");
        assert!(message.ends_with("h:1: no TLS here"), "{message}");
        assert_eq!(given, "use redis://, or that");
        let (_, given) = advice("h:1: received fatal alert: CertificateRequired").expect("known");
        assert_eq!(given, CLIENT_CERTIFICATE);
        let (_, given) = advice("h:1: ERR DB index is out of range").expect("known");
        assert_eq!(given, DATABASE);
        assert_eq!(advice("h:1: No route to host (os error 113)"), None);
    }
}
