//! Limit on open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on open files to the hard limit. Every connection needs a file descriptor,
/// and many systems start a process with a soft limit of 1,024.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| limit.maximum.is_none_or(|maximum| current < maximum))
        && let Err(error) =
            setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::warn!(%error, limit = limit.current, "raising the limit on open files failed");
    }
}
