//! [`EventReader`]: parser of server-sent events.

use anyhow::ensure;

/// Maximum size of an event: the history of the last 15 minutes with 200 policies fits.
const MAX_EVENT_BYTES: usize = 32 << 20;

/// One server-sent event.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ServerEvent {
    pub(super) name: String,
    pub(super) data: String,
}

/// Parser of a stream of events that arrives in parts.
#[derive(Debug, Default)]
pub(super) struct EventReader {
    /// Bytes of lines that are not complete.
    rest: Vec<u8>,
    name: String,
    data: String,
}

impl EventReader {
    /// Adds bytes of the stream, and returns the events that they complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> anyhow::Result<Vec<ServerEvent>> {
        self.rest.extend_from_slice(bytes);
        ensure!(
            self.rest.len() + self.data.len() <= MAX_EVENT_BYTES,
            "an event has more than {MAX_EVENT_BYTES} bytes"
        );
        let mut events = Vec::new();
        let mut start = 0;
        while let Some(length) = memchr::memchr(b'\n', &self.rest[start..]) {
            let line = String::from_utf8_lossy(&self.rest[start..start + length]).into_owned();
            start += length + 1;
            events.extend(self.line(line.strip_suffix('\r').unwrap_or(&line)));
        }
        self.rest.drain(..start);
        Ok(events)
    }

    fn line(&mut self, line: &str) -> Option<ServerEvent> {
        if line.is_empty() {
            let event = ServerEvent {
                name: std::mem::take(&mut self.name),
                data: std::mem::take(&mut self.data),
            };
            return (!event.data.is_empty()).then_some(event);
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.name),
            "data" => {
                if !self.data.is_empty() {
                    self.data.push('\n');
                }
                self.data.push_str(value);
            }
            // A line that starts with a colon is a comment; other fields are not used.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_from_parts_of_any_size() {
        let stream = ": hello\n\nevent: status\ndata: {\"a\":1}\n\nevent:sample\r\ndata:1\r\n\
                      data: 2\r\nid: 7\r\n\r\nevent: empty\n\ndata: é\n\ndata: not complete\n";
        let event = |name: &str, data: &str| ServerEvent { name: name.into(), data: data.into() };
        let expected = [event("status", "{\"a\":1}"), event("sample", "1\n2"), event("", "é")];
        for size in [1, 2, 7, stream.len()] {
            let mut reader = EventReader::default();
            let mut events = Vec::new();
            for part in stream.as_bytes().chunks(size) {
                events.extend(reader.push(part).expect("small"));
            }
            assert_eq!(events, expected, "parts of {size} bytes");
        }
    }

    #[test]
    fn event_that_never_ends_is_an_error() {
        let mut reader = EventReader::default();
        let part = vec![b'x'; 1 << 20];
        let error = (0..64).find_map(|_| reader.push(&part).err());
        assert!(error.is_some_and(|error| error.to_string().contains("more than")));
    }
}
