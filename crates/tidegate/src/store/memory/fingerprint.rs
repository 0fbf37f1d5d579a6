use std::hash::{BuildHasher, Hasher, RandomState};
use siphasher::sip128::{Hasher128, SipHasher13};
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fingerprint {
    high: u64,
    low: u64,
}
#[derive(Debug)]
pub(super) struct Secret(u64, u64);
impl Secret {
    pub(super) fn new() -> Self {
        let random = RandomState::new();
        Self(random.hash_one(1_u8), random.hash_one(2_u8))
    }
    pub(super) fn fingerprint(&self, key: &str, policy: &str) -> Fingerprint {
        let mut hasher = SipHasher13::new_with_keys(self.0, self.1);
        hasher.write(key.as_bytes());
        hasher.write_u8(0xff);
        hasher.write(policy.as_bytes());
        let h = hasher.finish128();
        Fingerprint::new(h.h1, h.h2)
    }
}
impl Fingerprint {
    pub(super) const NONE: Self = Self { high: u64::MAX, low: u64::MAX };
    pub(super) fn new(high: u64, low: u64) -> Self {
        Self { high, low: low.min(u64::MAX - 1) }
    }
    pub(super) fn shard(self) -> usize {
        (self.low % super::SHARDS as u64) as usize
    }
    pub(super) fn share_of(self, count: u32) -> usize {
        ((u128::from(self.high) * u128::from(count)) >> 64) as usize
    }
}
