//! Names of attributes, as they are written in a policy.

/// The name that a request has it under. Names of headers are alike in either case; front doors have them in lower case.
pub(super) fn name(written: &str) -> Result<String, String> {
    if written.is_empty() || written.chars().any(|character| character.is_whitespace() || character.is_control()) {
        return Err(format!("{written:?} is no attribute: write a name, such as ip, path or header.x-user-id"));
    }
    match written.split_once('.') {
        Some((kind @ ("header" | "query" | "cookie" | "descriptor"), "")) => {
            Err(format!("{written:?} is no attribute: a name is missing after the dot, such as {kind}.x-user-id"))
        }
        Some(("header", header)) if !header.chars().all(is_of_header) => {
            Err(format!("{written:?} is no attribute: {header:?} cannot be the name of a header"))
        }
        Some(("header", _)) => Ok(written.to_ascii_lowercase()),
        _ => Ok(written.to_owned()),
    }
}

/// What RFC 9110 calls a token.
fn is_of_header(character: char) -> bool {
    character.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(character)
}

#[cfg(test)]
mod tests {
    use super::name;

    #[test]
    fn headers_are_in_lower_case_and_all_else_is_as_it_is_written() {
        for (written, read) in [
            ("header.X-User-ID", "header.x-user-id"),
            ("query.User", "query.User"),
            ("cookie.SID", "cookie.SID"),
            ("Tenant", "Tenant"),
            ("descriptor.key with", ""),
        ] {
            assert_eq!(name(written).unwrap_or_default(), read);
        }
    }

    #[test]
    fn what_no_request_can_have_is_no_attribute() {
        for written in ["", " ", "header.", "query.", "cookie.", "descriptor.", "header.a:b", "header.é", "a\nb"] {
            assert!(name(written).is_err_and(|error| error.contains("is no attribute")), "{written}");
        }
        assert!(name("query.a.b").is_ok() && name("header.x.y").is_ok());
    }
}
