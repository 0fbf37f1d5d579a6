//! [`join_all`]: futures that are awaited concurrently.

use std::future::{Future, poll_fn};
use std::task::Poll;

use crate::store::StoreError;

/// Awaits futures concurrently, in this task, and returns their outputs in order.
pub(crate) async fn join_all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    poll_fn(|context| {
        for (future, output) in running.iter_mut().filter(|(_, output)| output.is_none()) {
            if let Poll::Ready(ready) = future.as_mut().poll(context) {
                *output = Some(ready);
            }
        }
        if running.iter().all(|(_, output)| output.is_some()) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
    running.into_iter().filter_map(|(_, output)| output).collect()
}

/// Collects the results of calls that do not depend on each other. If one failed and another ran,
/// the error forbids to make them again.
#[cfg(feature = "resilience")]
pub(crate) fn collect_independent<T>(
    results: Vec<Result<T, StoreError>>,
) -> Result<Vec<T>, StoreError> {
    let ran = results.iter().any(|result| match result {
        Ok(_) => true,
        Err(error) => error.may_have_run(),
    });
    let collected: Result<Vec<T>, StoreError> = results.into_iter().collect();
    collected
        .map_err(|error| if ran && !error.may_have_run() { error.answer_lost() } else { error })
}

#[cfg(all(test, feature = "resilience"))]
mod tests {
    use super::*;

    #[test]
    fn failure_beside_a_success_forbids_a_repetition() {
        let down = || StoreError::Unreachable("down".to_owned());
        assert_eq!(collect_independent(vec![Ok(1), Ok(2)]), Ok(vec![1, 2]));
        assert_eq!(collect_independent(vec![Err::<u64, _>(down()), Err(down())]), Err(down()));
        let lost = Err(down().answer_lost());
        assert_eq!(collect_independent(vec![Ok(1), Err(down())]), lost);
        assert_eq!(collect_independent(vec![Err(down()), lost.clone().map(|_: Vec<u64>| 1)]), lost);
    }
}
