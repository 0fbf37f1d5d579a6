//! Tokens of clients: one table for all listeners. Only the hashes of tokens are kept.

use std::fmt;
use std::sync::Arc;

use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use subtle::ConstantTimeEq;
use tidegate::Action;

use crate::Secret;

/// Permission of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Acquire, peek and report, over every protocol.
    Acquire,
    Refund,
    Reset,
    /// Peek, and the data of the admin listener.
    Read,
}

impl Scope {
    pub const ALL: [Self; 4] = [Self::Acquire, Self::Refund, Self::Reset, Self::Read];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Refund => "refund",
            Self::Reset => "reset",
            Self::Read => "read",
        }
    }

    /// Returns the scopes that permit an action, each of them alone. An acquire returns all that a
    /// peek does.
    pub fn of_action(action: Action) -> &'static [Self] {
        match action {
            Action::Peek => &[Self::Read, Self::Acquire],
            Action::Refund => &[Self::Refund],
            Action::Reset => &[Self::Reset],
            _ => &[Self::Acquire],
        }
    }
}

/// Token of a client.
pub struct Token {
    name: String,
    hash: [u8; SHA256_OUTPUT_LEN],
    scopes: Vec<Scope>,
}

impl Token {
    pub fn new(name: &str, secret: &Secret, scopes: &[Scope]) -> Self {
        let hash = hash(secret.reveal().as_bytes());
        Self { name: name.to_owned(), hash, scopes: scopes.to_vec() }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn is_same_secret(&self, other: &Self) -> bool {
        self.hash == other.hash
    }

    /// Returns an error unless the token has one of these scopes.
    pub fn check(&self, scopes: &[Scope]) -> Result<(), AuthError> {
        if scopes.iter().any(|scope| self.scopes.contains(scope)) {
            return Ok(());
        }
        let names: Vec<&str> = scopes.iter().map(|scope| scope.as_str()).collect();
        Err(AuthError::MissingScope { token: self.name.clone(), scope: names.join(" or ") })
    }
}

/// A short token could be guessed from its hash.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.name, self.scopes)
    }
}

/// Reason why a request is not permitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    #[error("a bearer token is required: Authorization: Bearer …")]
    Missing,
    #[error("the token is wrong")]
    Wrong,
    #[error("the token {token:?} lacks the scope {scope}: add it in auth.tokens, or use another")]
    MissingScope { token: String, scope: String },
}

/// Tokens of the configuration.
#[derive(Debug, Clone, Default)]
pub struct Tokens {
    list: Vec<Arc<Token>>,
    /// Whether the API needs a token, over every protocol.
    is_api_closed: bool,
    /// Whether the admin listener, and every reset, needs a token.
    is_admin_closed: bool,
}

impl Tokens {
    /// Adds a token. One that may acquire or refund closes the API, one that may read or reset the
    /// admin listener; `admin_token` has all scopes and closes only the latter.
    pub fn add(&mut self, token: Token, closes_api: bool) {
        let has = |scopes: [Scope; 2]| token.scopes.iter().any(|scope| scopes.contains(scope));
        self.is_api_closed |= closes_api && has([Scope::Acquire, Scope::Refund]);
        self.is_admin_closed |= has([Scope::Read, Scope::Reset]);
        self.list.push(Arc::new(token));
    }

    pub fn iter(&self) -> impl Iterator<Item = &Token> {
        self.list.iter().map(Arc::as_ref)
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the tokens if the API needs one.
    pub fn of_api(&self) -> Option<&Self> {
        self.is_api_closed.then_some(self)
    }

    /// Returns the tokens if the admin listener needs one.
    pub fn of_admin(&self) -> Option<&Self> {
        self.is_admin_closed.then_some(self)
    }

    /// Finds a token. All are compared, in constant time, by their hashes.
    pub fn find(&self, given: &[u8]) -> Option<&Arc<Token>> {
        let hash = hash(given);
        self.list.iter().fold(None, |found, token| {
            if bool::from(token.hash.ct_eq(&hash)) { Some(token) } else { found }
        })
    }

    /// Returns the token of a request if it has one of these scopes.
    pub fn authorize(
        &self,
        given: Option<&[u8]>,
        scopes: &[Scope],
    ) -> Result<&Arc<Token>, AuthError> {
        let token = self.find(given.ok_or(AuthError::Missing)?).ok_or(AuthError::Wrong)?;
        token.check(scopes).map(|()| token)
    }
}

fn hash(token: &[u8]) -> [u8; SHA256_OUTPUT_LEN] {
    let mut hash = [0; SHA256_OUTPUT_LEN];
    hash.copy_from_slice(digest(&SHA256, token).as_ref());
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(name: &str, secret: &str, scopes: &[Scope]) -> Token {
        Token::new(name, &Secret::new(secret), scopes)
    }

    #[test]
    fn only_tokens_with_its_scopes_close_a_listener() {
        use Scope::{Acquire, Read, Refund, Reset};
        for (scopes, closes_api, expected) in [
            ([Acquire].as_slice(), true, (true, false)),
            (&[Refund], true, (true, false)),
            (&[Read], true, (false, true)),
            (&[Reset], true, (false, true)),
            (&[Acquire, Read], true, (true, true)),
            (&Scope::ALL, false, (false, true)),
        ] {
            let mut tokens = Tokens::default();
            assert!(tokens.of_api().is_none() && tokens.of_admin().is_none());
            tokens.add(token("a", "secret", scopes), closes_api);
            let closed = (tokens.of_api().is_some(), tokens.of_admin().is_some());
            assert_eq!(closed, expected, "{scopes:?}");
        }
    }

    #[test]
    fn token_is_found_by_its_whole_text() {
        let mut tokens = Tokens::default();
        tokens.add(token("a", "first", &[Scope::Acquire]), true);
        tokens.add(token("b", "second", &[Scope::Read]), true);
        let authorize = |given: Option<&str>, scope| {
            let authorized = tokens.authorize(given.map(str::as_bytes), &[scope]);
            authorized.map(|token| token.name()).map_err(|error| error.to_string())
        };
        assert_eq!(authorize(Some("first"), Scope::Acquire), Ok("a"));
        assert_eq!(authorize(Some("second"), Scope::Read), Ok("b"));
        for wrong in ["", "firs", "first ", "First", "firstsecond"] {
            assert_eq!(authorize(Some(wrong), Scope::Acquire), Err("the token is wrong".into()));
        }
        assert!(authorize(None, Scope::Read).is_err());
        let lacking = authorize(Some("first"), Scope::Reset).expect_err("no scope");
        assert!(lacking.starts_with("the token \"a\" lacks the scope reset"), "{lacking}");
        assert!(!format!("{tokens:?}").contains("first"));
    }
}
