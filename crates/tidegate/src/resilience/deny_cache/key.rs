//! [`EntryKey`]: identifies a charge in the cache by hashes of its key, policy and quota.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::charge::Charge;
use crate::random::random_u64;
use crate::store::invalidation::CountId;

/// Number of bytes of an encoded quota: a separator, three numbers, and its kind.
const QUOTA_BYTES: usize = 1 + 3 * 8 + 3;
/// Longest encoding of a charge that needs no allocation.
const MAX_STACK_BYTES: usize = 192;

/// Identity of a charge in the cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct EntryKey {
    /// Count that the charge is on, which invalidations refer to.
    pub(super) count: CountId,
    /// Hash of key, policy and quota.
    pub(super) hash: KeyHash,
}

/// Hash of 128 bits, without the alignment of `u128`, which would enlarge the futures that hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct KeyHash([u64; 2]);

/// Random keys of the hashes, so that a client cannot choose keys that collide.
#[derive(Debug)]
pub(super) struct EntryHashSecret([u64; 4]);

impl EntryHashSecret {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| random_u64()))
    }

    pub(super) fn key(&self, charge: &Charge<'_>) -> EntryKey {
        let (key, policy, quota) =
            (charge.key().as_bytes(), charge.policy().as_bytes(), charge.quota());
        // Encoding everything into one buffer and hashing it once is the fastest way by far.
        let length = key.len() + 1 + policy.len();
        let (mut on_stack, mut on_heap) = ([0; MAX_STACK_BYTES], Vec::new());
        let bytes = match on_stack.get_mut(..length + QUOTA_BYTES) {
            Some(bytes) => bytes,
            None => {
                on_heap.resize(length + QUOTA_BYTES, 0);
                &mut on_heap
            }
        };
        bytes[..key.len()].copy_from_slice(key);
        // This byte occurs in no UTF-8 text, so it separates the key from the policy.
        bytes[key.len()] = 0xff;
        bytes[key.len() + 1..length].copy_from_slice(policy);
        bytes[length] = 0xff;
        let numbers = [quota.limit(), quota.window_micros(), quota.burst()];
        let kind =
            [quota.algorithm() as u8, quota.encoding() as u8, u8::from(quota.count_denied())];
        for (field, number) in bytes[length + 1..].chunks_exact_mut(8).zip(numbers) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        bytes[length + QUOTA_BYTES - kind.len()..].copy_from_slice(&kind);
        let hash = SipHasher13::new_with_keys(self.0[0], self.0[1]).hash(bytes);
        EntryKey { count: CountId::of_bytes(&bytes[..length]), hash: KeyHash([hash.h1, hash.h2]) }
    }

    /// Hashes all charges of a request, with their costs.
    pub(super) fn request_hash(
        &self,
        charges: &[Charge<'_>],
        keys: impl Iterator<Item = EntryKey>,
    ) -> u128 {
        let mut hasher = SipHasher13::new_with_keys(self.0[1], self.0[0]);
        for (charge, key) in charges.iter().zip(keys) {
            let KeyHash(words) = key.hash;
            for word in words {
                hasher.write_u64(word);
            }
            hasher.write_u64(charge.cost());
        }
        hasher.finish128().as_u128()
    }

    /// Returns the shard of a count and its set in that shard, as two words of which the upper
    /// halves are uniformly distributed.
    pub(super) fn shard_and_set(&self, count: CountId) -> [u64; 2] {
        let [low, high] = halves(u128::from(count.0 ^ self.0[2]) * u128::from(self.0[3] | 1));
        [low ^ high, (low ^ high).rotate_right(32)]
    }
}

#[expect(clippy::cast_possible_truncation, reason = "each half is one word")]
fn halves(product: u128) -> [u64; 2] {
    [product as u64, (product >> 64) as u64]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;

    #[test]
    fn keys_differ_by_key_policy_and_quota_and_have_the_count_id_of_invalidations() {
        let quota = |limit| Quota::token_bucket(limit, Duration::from_secs(60)).expect("valid");
        let (one, two, burst) = (quota(1), quota(2), quota(1).with_burst(2).expect("a bucket"));
        let leaky = Quota::leaky_bucket(1, Duration::from_secs(60)).expect("valid");
        let (long, longer) = ("k".repeat(512), "k".repeat(513));
        let secret = EntryHashSecret::new();
        let mut seen = std::collections::HashSet::new();
        for quota in [&one, &two, &burst, &leaky] {
            for (key, policy) in
                [("ab", "c"), ("a", "bc"), (&long, "c"), (&longer, "c"), (&long, &long)]
            {
                let charge = Charge::new(key, quota).with_policy(policy);
                let key = secret.key(&charge);
                assert_eq!(key.count, CountId::of(&charge));
                assert!(seen.insert(key.hash));
            }
        }
    }
}
