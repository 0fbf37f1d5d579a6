//! Runs the Python tests on the extension module of this build, with the virtual environment of
//! `make setup`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Copies the Python part and the extension module into one folder, as a wheel has them.
fn build_package(to: &Path) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let package = to.join("tidegate");
    let _ = std::fs::remove_dir_all(&package);
    std::fs::create_dir_all(&package).expect("the folder can be created");
    for file in std::fs::read_dir(here.join("python/tidegate")).expect("it exists") {
        let file = file.expect("it can be read").path();
        let name = file.file_name().expect("it has a name");
        // A developer may have linked a module of another build.
        if file.is_file() && file.extension().is_none_or(|extension| extension != "so") {
            std::fs::copy(&file, package.join(name)).expect("it can be copied");
        }
    }
    std::fs::copy(extension_module(), package.join("_tidegate.abi3.so")).expect("it was built");
}

/// Returns the library that cargo has built beside this test.
fn extension_module() -> PathBuf {
    let test = std::env::current_exe().expect("this test has a path");
    test.with_file_name("libtidegate_python.so")
}

#[test]
fn python_tests_pass() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let packages = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python");
    build_package(&packages);
    let python = root.join(".venv/bin/python");
    assert!(python.exists(), "no {}: run `make setup` first", python.display());
    let status = Command::new(python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10", "tests"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("PYTHONPATH", packages)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .status()
        .expect("pytest starts");
    assert!(status.success(), "the Python tests failed: see above");
}
