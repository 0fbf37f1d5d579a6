//! The names in this configuration that error messages may show.

use crate::yaml::{Redaction, schema_fields};

use super::Config;

pub(super) const NAMES: Redaction = Redaction {
    open_sections: &["listen", "client_ip", "headers", "envoy", "gateway"],
    secret_fields: &["store", "redis", "sentinel"],
    other_fields: &[
        "tls",
        "prefix",
        "timeout",
        "instances",
        "max_keys",
        "master",
        "nodes",
        "ca",
        "certificate",
        "key",
        "client_ca",
        "client_crl",
        "password_file",
        "api_token_file",
        "admin_token_file",
        "tokens",
        "token_file",
        "scopes",
    ],
    all_fields: || schema_fields(Config::schema()),
};
