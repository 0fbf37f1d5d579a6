//! [`RequestHash`]: identifies a request in the cache.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::charge::Charge;
use crate::random::random_u64;
use crate::store::invalidation::CountId;

/// Number of bytes of an encoded charge beside its key and policy: a separator, five numbers, and
/// the kind of the quota.
const FIXED_BYTES: usize = 1 + 5 * 8 + 3;
/// Longest encoding of a charge that needs no allocation.
const MAX_STACK_BYTES: usize = 192;

/// Hash of all charges of a request: key, policy, quota, cost and the epoch of each. It has 128
/// bits, without the alignment of `u128`, which would enlarge the futures that hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RequestHash(pub(super) [u64; 2]);

/// Random keys of the hashes, so that a client cannot choose keys that collide.
#[derive(Debug)]
pub(super) struct HashSecret([u64; 2]);

impl HashSecret {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| random_u64()))
    }

    /// Hashes a request, and passes the count of each charge to `on_count`.
    pub(super) fn hash(
        &self,
        charges: &[Charge<'_>],
        epoch_of: impl Fn(&Charge<'_>) -> u64,
        mut on_count: impl FnMut(CountId),
    ) -> RequestHash {
        let mut hash_charge = |charge: &Charge<'_>| {
            let (count, hash) = self.hash_charge(charge, epoch_of(charge));
            on_count(count);
            hash
        };
        if let [charge] = charges {
            return hash_charge(charge);
        }
        let mut hasher = SipHasher13::new_with_keys(self.0[1], self.0[0]);
        for charge in charges {
            let RequestHash(words) = hash_charge(charge);
            for word in words {
                hasher.write_u64(word);
            }
        }
        let hash = hasher.finish128();
        RequestHash([hash.h1, hash.h2])
    }

    fn hash_charge(&self, charge: &Charge<'_>, epoch: u64) -> (CountId, RequestHash) {
        let (key, policy, quota) =
            (charge.key().as_bytes(), charge.policy().as_bytes(), charge.quota());
        // Encoding everything into one buffer and hashing it once is the fastest way by far.
        let length = key.len() + 1 + policy.len();
        let (mut on_stack, mut on_heap) = ([0; MAX_STACK_BYTES], Vec::new());
        let bytes = match on_stack.get_mut(..length + FIXED_BYTES) {
            Some(bytes) => bytes,
            None => {
                on_heap.resize(length + FIXED_BYTES, 0);
                &mut on_heap
            }
        };
        bytes[..key.len()].copy_from_slice(key);
        // This byte occurs in no UTF-8 text, so it separates the key from the policy.
        bytes[key.len()] = 0xff;
        bytes[key.len() + 1..length].copy_from_slice(policy);
        bytes[length] = 0xff;
        let numbers = [quota.limit(), quota.window_micros(), quota.burst(), charge.cost(), epoch];
        let kind =
            [quota.algorithm() as u8, quota.encoding() as u8, u8::from(quota.count_denied())];
        for (field, number) in bytes[length + 1..].chunks_exact_mut(8).zip(numbers) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        bytes[length + FIXED_BYTES - kind.len()..].copy_from_slice(&kind);
        let hash = SipHasher13::new_with_keys(self.0[0], self.0[1]).hash(bytes);
        (CountId::of_bytes(&bytes[..length]), RequestHash([hash.h1, hash.h2]))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;

    #[test]
    fn requests_differ_by_every_part_of_each_charge() {
        let quota = |limit| Quota::token_bucket(limit, Duration::from_secs(60)).expect("valid");
        let (one, two, burst) = (quota(1), quota(2), quota(1).with_burst(2).expect("a bucket"));
        let leaky = Quota::leaky_bucket(1, Duration::from_secs(60)).expect("valid");
        let (long, longer) = ("k".repeat(512), "k".repeat(513));
        let secret = HashSecret::new();
        let mut charges = Vec::new();
        for quota in [&one, &two, &burst, &leaky] {
            for (key, policy) in
                [("ab", "c"), ("a", "bc"), (&long, "c"), (&longer, "c"), (&long, &long)]
            {
                let charge = Charge::new(key, quota).with_policy(policy);
                charges.extend([charge, charge.with_cost(2)]);
            }
        }
        let mut seen = std::collections::HashSet::new();
        for charge in &charges {
            for epoch in [0, 1] {
                let mut counts = Vec::new();
                let hash = secret.hash(&[*charge], |_| epoch, |count| counts.push(count));
                assert_eq!(counts, [CountId::of(charge)]);
                assert!(seen.insert(hash));
            }
        }
        for others in [&charges[..2], &charges[1..3], &charges[..3], &[charges[1], charges[0]]] {
            assert!(seen.insert(secret.hash(others, |_| 0, |_| ())));
        }
    }
}
