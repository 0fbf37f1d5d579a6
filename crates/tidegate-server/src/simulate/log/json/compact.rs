//! Fast scan of a line without spaces between its tokens, as all servers write it.
//!
//! It gives up at anything unusual, and then the plain scanner decides. A fuzz test compares both.

use super::{MAX_DEPTH, Members, Role, Value, is_literal};
use crate::simulate::log::record::Span;

/// Bytes of a word, by which strings are searched.
const WORD_BYTES: usize = size_of::<u64>();

/// Maximum number of names that are remembered, and of their bytes.
const MAX_NAMES: usize = 64;
const MAX_NAME_BYTES: usize = 64;
/// Bytes of a name that are compared at once.
const START_BYTES: usize = size_of::<u128>();

/// Names of the members of earlier lines, in their order. A server writes the same in each line, so
/// most names are recognized by one comparison.
#[derive(Debug, Default)]
pub(in crate::simulate::log) struct Shape(Vec<KnownMember>);

#[derive(Debug)]
struct KnownMember {
    /// Name with its quotes and the colon.
    text: Vec<u8>,
    /// A short text as a number, and ones where it has bytes.
    start: u128,
    mask: u128,
    is_in_request: bool,
    role: Role,
}

impl KnownMember {
    fn new(text: &[u8], is_in_request: bool, role: Role) -> Self {
        let (mut start, mut mask) = ([0; START_BYTES], [0; START_BYTES]);
        for (place, byte) in text.iter().take(START_BYTES).enumerate() {
            (start[place], mask[place]) = (*byte, 0xff);
        }
        let (start, mask) = (u128::from_le_bytes(start), u128::from_le_bytes(mask));
        Self { text: text.to_vec(), start, mask, is_in_request, role }
    }

    /// Returns whether a line has this name at `at`.
    #[inline]
    fn is_at(&self, line: &[u8], at: usize) -> bool {
        let rest = line.get(at..).unwrap_or_default();
        match rest.first_chunk::<START_BYTES>() {
            Some(start) if self.text.len() <= START_BYTES => {
                (u128::from_le_bytes(*start) & self.mask) == self.start
            }
            _ => rest.starts_with(&self.text),
        }
    }
}

/// Returns the members of a line, or `None` if it is unusual or invalid.
pub(super) fn scan(line: &[u8], shape: &mut Shape) -> Option<Members> {
    let mut found = Members::default();
    // Place in the line, and number of the member.
    let (mut at, mut number) = (start_of_members(line, 0)?, 0);
    let mut is_in_request = false;
    loop {
        let (role, value) = shape.member(line, at, number, is_in_request)?;
        number += 1;
        if role == Role::Request && line.get(value) == Some(&b'{') {
            is_in_request = true;
            at = start_of_members(line, value)?;
            continue;
        }
        at = value_end(line, value)?;
        if role != Role::None {
            found.set(role, typed(line, value, at));
        }
        if is_in_request && line.get(at)? == &b'}' {
            is_in_request = false;
            at += 1;
        }
        match line.get(at)? {
            b',' => at += 1,
            b'}' if !is_in_request => return (at + 1 == line.len()).then_some(found),
            _ => return None,
        }
    }
}

/// Returns the place of the first name of the object at `at`.
fn start_of_members(line: &[u8], at: usize) -> Option<usize> {
    (line.get(at) == Some(&b'{')).then_some(at + 1)
}

/// Returns the value from `at` to `end`.
fn typed(line: &[u8], at: usize, end: usize) -> Value {
    match line[at] {
        b'"' => Value::Text(Span::new(at + 1..end - 1)),
        b'{' => Value::Object(Span::new(at..end)),
        b'[' => Value::List(Span::new(at..end)),
        _ => Value::Literal(Span::new(at..end)),
    }
}

impl Shape {
    /// Returns the role of the member at `at`, and the place of its value.
    #[inline]
    fn member(
        &mut self,
        line: &[u8],
        at: usize,
        number: usize,
        is_in_request: bool,
    ) -> Option<(Role, usize)> {
        if let Some(known) = self.0.get(number)
            && known.is_in_request == is_in_request
            && known.is_at(line, at)
        {
            return Some((known.role, at + known.text.len()));
        }
        self.new_member(line, at, number, is_in_request)
    }

    #[cold]
    fn new_member(
        &mut self,
        line: &[u8],
        at: usize,
        number: usize,
        is_in_request: bool,
    ) -> Option<(Role, usize)> {
        if line.get(at) != Some(&b'"') {
            return None;
        }
        let name_end = find_quote(line, at + 1)?;
        let name = &line[at + 1..name_end];
        if line.get(name_end + 1) != Some(&b':') || name.contains(&b'\\') {
            return None;
        }
        let role = if is_in_request { Role::of_request(name) } else { Role::of_line(name) };
        let value = name_end + 2;
        if number < MAX_NAMES && name.len() <= MAX_NAME_BYTES {
            let known = KnownMember::new(&line[at..value], is_in_request, role);
            match self.0.get_mut(number) {
                Some(other) => *other = known,
                None => self.0.push(known),
            }
        }
        Some((role, value))
    }
}

/// Returns the end of the value at `at`.
#[inline]
fn value_end(line: &[u8], at: usize) -> Option<usize> {
    match line.get(at)? {
        b'"' => Some(text_end(line, at + 1)? + 1),
        b'{' | b'[' => nested_end(line, at),
        _ => {
            let length = line[at..].iter().position(|byte| !is_literal(*byte))?;
            (length > 0).then_some(at + length)
        }
    }
}

/// Returns the end of the object or list at `at`.
fn nested_end(line: &[u8], mut at: usize) -> Option<usize> {
    let mut closing = [0_u8; MAX_DEPTH];
    let mut depth = 0;
    loop {
        match line.get(at)? {
            b'"' => at = text_end(line, at + 1)?,
            open @ (b'{' | b'[') => {
                *closing.get_mut(depth)? = if *open == b'{' { b'}' } else { b']' };
                depth += 1;
            }
            close @ (b'}' | b']') => {
                depth -= 1;
                if closing[depth] != *close {
                    return None;
                }
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
        at += 1;
    }
}

/// Returns the place of the quote that ends the text at `at`.
#[inline]
fn text_end(line: &[u8], at: usize) -> Option<usize> {
    let quote = find_quote(line, at)?;
    if line.get(quote.wrapping_sub(1)) == Some(&b'\\') {
        return escaped_text_end(line, at);
    }
    Some(quote)
}

/// Returns the place of the quote that ends a text with escapes.
#[cold]
fn escaped_text_end(line: &[u8], mut at: usize) -> Option<usize> {
    loop {
        at += memchr::memchr2(b'"', b'\\', line.get(at..)?)?;
        if line[at] == b'"' {
            return Some(at);
        }
        // A backslash, and the byte after it.
        at += 2;
    }
}

/// Returns the place of the first quote from `at` on.
#[inline]
fn find_quote(line: &[u8], mut at: usize) -> Option<usize> {
    while let Some(word) = line.get(at..).and_then(<[u8]>::first_chunk::<WORD_BYTES>) {
        let found = zero_bytes(u64::from_le_bytes(*word) ^ repeated(b'"'));
        if found != 0 {
            return Some(at + found.trailing_zeros() as usize / 8);
        }
        at += WORD_BYTES;
    }
    Some(at + line.get(at..)?.iter().position(|byte| *byte == b'"')?)
}

/// Returns a word of equal bytes.
const fn repeated(byte: u8) -> u64 {
    u64::from_le_bytes([byte; WORD_BYTES])
}

/// Returns a word whose lowest bit is the highest bit of the first zero byte, or 0 without one.
/// Bits above it may be set for bytes that are not zero.
const fn zero_bytes(word: u64) -> u64 {
    word.wrapping_sub(repeated(1)) & !word & repeated(0x80)
}
