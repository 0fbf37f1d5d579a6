//! [`enum_names!`]: the names of enum variants in the configuration, the API and documents.

/// Error for a name that is not one of the allowed names.
///
/// It is the `FromStr` error of [`Algorithm`](crate::Algorithm), [`Encoding`](crate::Encoding),
/// [`Mode`](crate::Mode), [`MissingKey`](crate::MissingKey) and
/// [`OnStoreFailure`](crate::OnStoreFailure). Names are case-sensitive. The message lists the
/// allowed names:
///
/// ```
/// use tidegate::{Mode, UnknownName};
///
/// let error: UnknownName = "dry-run".parse::<Mode>().unwrap_err();
/// let text = r#"unknown mode "dry-run": it must be one of enforce, shadow"#;
/// assert_eq!(error.to_string(), text);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {name:?}: it must be one of {allowed}")]
pub struct UnknownName {
    what: &'static str,
    name: String,
    allowed: String,
}

impl UnknownName {
    /// Creates the error of a name that is not one of the allowed ones.
    #[must_use]
    pub fn new(what: &'static str, name: &str, allowed: &[&str]) -> Self {
        Self { what, name: name.to_owned(), allowed: allowed.join(", ") }
    }
}

/// Implements `Display`, `FromStr` and the JSON schema of an enum by the names of its variants.
macro_rules! enum_names {
    ($type:ident, $what:literal, $($variant:ident = $name:literal),+) => {
        impl $type {
            /// All variants, in the order of their definition.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// Returns the name in the configuration, the API and documents.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::enum_names::UnknownName;

            fn from_str(name: &str) -> Result<Self, Self::Err> {
                match name {
                    $($name => Ok(Self::$variant),)+
                    _ => Err($crate::enum_names::UnknownName::new($what, name, &[$($name),+])),
                }
            }
        }

        #[cfg(feature = "schema")]
        impl schemars::JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({"type": "string", "enum": [$($name),+]})
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
pub(crate) use enum_names;
