//! A test of your own code that needs no `sleep`: the clock moves only when the test moves it.
//!
//! ```sh
//! cargo run -p tidegate --example manual_clock
//! ```

use std::time::Duration;

use tidegate::{Charge, Error, Limiter, ManualClock, MemoryStore, Quota};

/// Code under test: three attempts to log in per minute.
struct Logins {
    limiter: Limiter,
    quota: Quota,
}

impl Logins {
    fn new(store: MemoryStore) -> Result<Self, tidegate::QuotaError> {
        let quota = Quota::sliding_log(3, Duration::from_secs(60))?;
        Ok(Self { limiter: Limiter::new(store), quota })
    }

    fn may_try(&self, user: &str) -> Result<bool, Error> {
        Ok(self.limiter.blocking().acquire(&Charge::new(user, &self.quota))?.allowed)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let clock = ManualClock::new();
    let logins = Logins::new(MemoryStore::builder().clock(clock.clone()).build())?;

    for _ in 0..3 {
        assert!(logins.may_try("ann")?);
        clock.advance(Duration::from_secs(10));
    }
    assert!(!logins.may_try("ann")?, "a fourth attempt within a minute");
    assert!(logins.may_try("bob")?, "another user");

    clock.advance(Duration::from_secs(29));
    assert!(!logins.may_try("ann")?, "59 seconds after the first attempt");
    clock.advance(Duration::from_secs(1));
    assert!(logins.may_try("ann")?, "60 seconds after the first attempt");
    println!("a minute of logins was tested without a wait");
    Ok(())
}
