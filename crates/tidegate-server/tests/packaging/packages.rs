//! Unit of systemd, Debian package, archives of releases, packages of crates.io.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{check_config, read, root, run, succeed};

/// Highest exposure of the unit by `systemd-analyze security`, in tenths: 0 is best, 100 worst.
const MAX_EXPOSURE: &str = "11";

#[test]
fn unit_is_valid_and_hardened() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.service");
    // The program must exist, or the unit is not valid.
    let unit = read("deploy/systemd/tidegate.service");
    let command = "/usr/bin/tidegate serve --config /etc/tidegate/tidegate.yaml";
    assert!(unit.contains(&format!("ExecStart={command}\n")), "{unit}");
    let unit = unit.replace("/usr/bin/tidegate", env!("CARGO_BIN_EXE_tidegate"));
    std::fs::write(&file, unit).expect("written");
    let file = file.to_str().expect("UTF-8");
    let output = run("systemd-analyze", ["verify", "--man=no", file]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !message.contains("tidegate.service:"), "{message}");
    let threshold = format!("--threshold={MAX_EXPOSURE}");
    succeed("systemd-analyze", ["security", "--offline=true", "--no-pager", &threshold, file]);
}

/// Only root and the service can read the configuration; secrets are credentials.
#[test]
fn configuration_is_readable_by_the_service_only() {
    let system = tempfile::tempdir().expect("a temporary directory");
    let path = |path: &str| system.path().join(path);
    for folder in ["etc/tidegate", "usr/lib/sysusers.d", "usr/lib/tmpfiles.d"] {
        std::fs::create_dir_all(path(folder)).expect("created");
    }
    std::fs::write(path("etc/tidegate/tidegate.yaml"), "policies: []\n").expect("written");
    std::fs::write(path("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").expect("written");
    std::fs::write(path("etc/group"), "root:x:0:\n").expect("written");
    for kind in ["sysusers", "tmpfiles"] {
        let installed = path(&format!("usr/lib/{kind}.d/tidegate.conf"));
        std::fs::write(installed, read(&format!("deploy/systemd/{kind}.conf"))).expect("written");
    }
    let at = format!("--root={}", system.path().display());
    // The commands of the package, in another root.
    let script = read("deploy/systemd/postinst");
    for command in ["systemd-sysusers tidegate.conf", "systemd-tmpfiles --create tidegate.conf"] {
        assert!(script.contains(&format!("    {command}\n")), "{script}");
        let mut words = command.split(' ');
        let tool = words.next().expect("a program");
        succeed(tool, std::iter::once(at.as_str()).chain(words));
    }
    let groups = std::fs::read_to_string(path("etc/group")).expect("groups");
    let group =
        groups.lines().find_map(|line| line.strip_prefix("tidegate:x:")).expect("its group");
    let group: u32 = group.trim_end_matches(':').parse().expect("a number");
    for (file, mode) in [("etc/tidegate", 0o750), ("etc/tidegate/tidegate.yaml", 0o640)] {
        let metadata = std::fs::metadata(path(file)).expect("it exists");
        assert_eq!((metadata.mode() & 0o777, metadata.gid()), (mode, group), "{file}");
    }
    let unit = read("deploy/systemd/tidegate.service");
    assert!(unit.contains("\nUser=tidegate\n") && !unit.contains("\nDynamicUser="), "{unit}");
    for name in ["admin-token", "api-token", "redis-password"] {
        assert!(unit.contains(&format!("\nLoadCredential=tidegate.{name}\n")), "{name}");
        std::fs::write(path(&format!("tidegate.{name}")), "secret\n").expect("written");
    }
    let page = read("docs/install.md");
    let blocks = page.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let mut blocks = blocks.filter(|block| block.contains("CREDENTIALS_DIRECTORY"));
    let config = blocks.next().expect("the configuration of the page");
    let folder = system.path().to_str().expect("UTF-8");
    check_config("credentials", config, &[("CREDENTIALS_DIRECTORY", folder)]);
}

/// Drop-ins change the unit, and name an existing command.
#[test]
fn drop_in_runs_the_gateway() {
    let text = read("deploy/systemd/gateway.conf");
    assert!(text.contains("ExecStart=\nExecStart=/usr/bin/tidegate gateway --config"), "{text}");
}

/// Writes manual pages and completions to target/share.
fn generate_share() {
    let binary = env!("CARGO_BIN_EXE_tidegate");
    let generated = Command::new("make")
        .args(["-s", "--no-print-directory", "share", &format!("TIDEGATE={binary}")])
        .current_dir(root())
        .output()
        .expect("make runs");
    assert!(generated.status.success(), "{}", String::from_utf8_lossy(&generated.stderr));
    assert!(root().join("target/share/man/tidegate-serve.1").exists());
}

#[test]
fn files_of_the_debian_package_exist() {
    generate_share();
    let manifest = read("crates/tidegate-server/Cargo.toml");
    let (_, assets) = manifest.split_once("\nassets = [\n").expect("assets");
    let (assets, _) = assets.split_once("\n]").expect("the end of the assets");
    let sources = assets.lines().map(|line| line.split('"').nth(1).expect("a path"));
    let sources: Vec<&str> = sources.filter(|path| !path.starts_with("target/release")).collect();
    assert!(sources.len() >= 6, "{sources:?}");
    for source in sources {
        let path = root().join("crates/tidegate-server").join(source.trim_end_matches("/*"));
        assert!(path.exists(), "{source}");
    }
}

/// Builds the package of the binary of this test, with the assets of the real one.
#[test]
#[ignore = "needs cargo-deb, which takes minutes to build: make test-deb"]
fn debian_package_has_the_unit_the_configuration_and_the_pages() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let binary = env!("CARGO_BIN_EXE_tidegate");
    generate_share();

    // `cargo deb` copies the binary of a release, here the one that is tested.
    let target = folder.path().join("target");
    std::fs::create_dir_all(target.join("release")).expect("created");
    std::fs::copy(binary, target.join("release/tidegate")).expect("copied");
    let package = folder.path().join("tidegate.deb");
    let output = Command::new("cargo-deb")
        .args(["--no-build", "--no-strip", "--fast", "-p", "tidegate-server", "--output"])
        .arg(&package)
        .env("CARGO_TARGET_DIR", &target)
        .current_dir(root())
        .output()
        .expect("cargo-deb is installed by `make test-deb`");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let package = package.to_str().expect("UTF-8");
    let contents = succeed("dpkg-deb", ["--contents", package]);
    for file in [
        "./usr/bin/tidegate\n",
        "./etc/tidegate/tidegate.yaml\n",
        "./usr/lib/sysusers.d/tidegate.conf\n",
        "./usr/lib/tmpfiles.d/tidegate.conf\n",
        "/systemd/system/tidegate.service\n",
        "./usr/share/man/man1/tidegate-serve.1.gz\n",
        "./usr/share/bash-completion/completions/tidegate\n",
        "./usr/share/zsh/vendor-completions/_tidegate\n",
        "./usr/share/fish/vendor_completions.d/tidegate.fish\n",
    ] {
        assert!(contents.contains(file), "{file:?} is not in\n{contents}");
    }
    let mut lines = contents.lines();
    let config = lines.find(|line| line.ends_with("/tidegate.yaml")).expect("its configuration");
    assert!(config.starts_with("-rw-r-----"), "{config}");
    let script = succeed("dpkg-deb", ["--info", package, "postinst"]);
    assert!(script.contains("systemd-sysusers tidegate.conf"), "{script}");
    let fields = succeed("dpkg-deb", ["--field", package]);
    let version = env!("CARGO_PKG_VERSION");
    for field in ["Package: tidegate\n", &format!("Version: {version}"), "Section: net\n"] {
        assert!(fields.contains(field), "{field:?} is not in\n{fields}");
    }
    assert!(
        succeed("dpkg-deb", ["--info", package, "conffiles"])
            .contains("/etc/tidegate/tidegate.yaml")
    );
}

/// `cargo binstall` downloads what `make release` builds.
#[test]
fn archive_has_the_name_that_binstall_expects() {
    let manifest = read("crates/tidegate-server/Cargo.toml");
    let makefile = read("Makefile");
    assert!(manifest.contains("/v{ version }/tidegate-{ version }-{ target }.tar.gz\""));
    assert!(
        manifest.contains("bin-dir = \"tidegate-{ version }-{ target }/{ bin }{ binary-ext }\"")
    );
    assert!(
        makefile.contains("RELEASE_NAME = tidegate-$(VERSION)-$(RELEASE_TARGET)"),
        "{makefile}"
    );
    assert!(makefile.contains("$(RELEASE_NAME).tar.gz"));
}

/// Returns the files that `cargo publish` would upload for a crate.
fn packaged(name: &str) -> BTreeSet<PathBuf> {
    let flags = ["package", "--list", "--allow-dirty", "--offline", "--locked", "-p", name];
    succeed(env!("CARGO"), flags).lines().map(PathBuf::from).collect()
}

/// Returns the sources of a crate, relative to its folder.
fn sources(folder: &Path, inside: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder.join(inside)).expect("a folder") {
        let entry = entry.expect("an entry");
        let path = inside.join(entry.file_name());
        if entry.path().is_dir() {
            sources(folder, &path, found);
        } else {
            found.push(path);
        }
    }
}

/// `cargo install tidegate-server` compiles the package alone: what the sources include must be
/// inside of it.
#[test]
fn packages_of_the_crates_contain_all_that_they_compile() {
    let crates = [
        ("tidegate", 10),
        ("tidegate-api", 0),
        ("tidegate-config", 1),
        ("tidegate-gateway", 0),
        ("tidegate-net", 0),
        ("tidegate-server", 0),
        ("tidegate-service", 3),
        ("tidegate-tools", 1),
    ];
    for (name, least) in crates {
        let folder = root().join("crates").join(name);
        let files = packaged(name);
        let mut all = Vec::new();
        sources(&folder, Path::new("src"), &mut all);
        let mut included = 0;
        for source in &all {
            assert!(files.contains(source), "{} is not in {name}", source.display());
            let text = std::fs::read_to_string(folder.join(source)).unwrap_or_default();
            let calls = text.split("include_str!(\"").skip(1);
            for path in calls.map(|rest| rest.split('"').next().expect("a path")) {
                let path = normalized(&source.parent().expect("a folder").join(path));
                // Only tests read the documents of the repository.
                if path.extension().is_some_and(|kind| kind == "md")
                    || path.iter().any(|part| part == "tests")
                {
                    continue;
                }
                assert!(files.contains(&path), "{} includes {}", source.display(), path.display());
                included += 1;
            }
        }
        assert!(included >= least, "{name} includes {included} files");
        assert!(files.contains(Path::new("README.md")), "{name}: crates.io shows it");
        let hidden = files.iter().find(|file| file.iter().any(|part| part == "node_modules"));
        assert_eq!(hidden, None, "{name}");
    }
    let api = packaged("tidegate-api");
    let proto = api.iter().filter(|file| file.starts_with("proto")).count();
    assert_eq!(proto, 6, "messages of Envoy, which build.rs compiles");
}

/// Returns a path without `..`, as far as it is inside of the crate.
fn normalized(path: &Path) -> PathBuf {
    let mut all = PathBuf::new();
    for part in path {
        if part == ".." {
            all.pop();
        } else {
            all.push(part);
        }
    }
    all
}
