//! Errors of the library as exceptions: `ValueError` for a wrong argument, `tidegate.StoreError` if
//! the store could not decide.

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::{PyErr, create_exception};
use tidegate::{Error, QueryError, StoreError as LibraryStoreError};

create_exception!(
    tidegate,
    StoreError,
    PyException,
    "The store could not decide. A denial is not an error."
);

pub(crate) fn value_error(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

pub(crate) fn limiter_error(error: Error) -> PyErr {
    match error {
        Error::Store(error) => store_error(&error),
        error => value_error(error),
    }
}

pub(crate) fn query_error(error: QueryError) -> PyErr {
    match error {
        QueryError::Store(error) => store_error(&error),
        error => value_error(error),
    }
}

pub(crate) fn store_error(error: &LibraryStoreError) -> PyErr {
    StoreError::new_err(error.to_string())
}
