//! Small enums that have a name in configuration, API and documents.

/// A name that is none of those allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {name:?}: it must be one of {allowed}")]
pub struct UnknownName {
    what: &'static str,
    name: String,
    allowed: String,
}

impl UnknownName {
    pub(crate) fn new(what: &'static str, name: &str, allowed: &[&str]) -> Self {
        Self { what, name: name.to_owned(), allowed: allowed.join(", ") }
    }
}

/// The names of an enum's variants: to print, and to read.
macro_rules! named {
    ($type:ident, $what:literal, $($variant:ident = $name:literal),+) => {
        impl $type {
            /// All of them.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// The name in configuration, API and documents.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::named::UnknownName;

            fn from_str(name: &str) -> Result<Self, Self::Err> {
                match name {
                    $($name => Ok(Self::$variant),)+
                    _ => Err($crate::named::UnknownName::new($what, name, &[$($name),+])),
                }
            }
        }

        #[cfg(feature = "config")]
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
pub(crate) use named;
