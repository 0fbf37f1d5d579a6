//! The image, as `compose.yaml` runs it: its last stage, built by buildah from a static binary.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::server::{Redis, free_port};
use crate::{read, root};

const TIMEOUT: Duration = Duration::from_secs(30);
const USER: &str = "65532";

/// Runs the program of the image with a read-only root. Arguments: the root, the folder of the
/// configuration, the file with the token, then the program.
const RUN_READ_ONLY: &str = r#"
set -e
root=$1 config=$2 token=$3
shift 3
mount --bind "$root" "$root"
mkdir -p "$root/etc/tidegate" "$root/run/secrets"
touch "$root/run/secrets/tidegate_admin_token"
mount --bind -o ro "$config" "$root/etc/tidegate"
mount --bind -o ro "$token" "$root/run/secrets/tidegate_admin_token"
mount -o remount,bind,ro "$root"
exec chroot --userspec=65532:65532 "$root" "$@"
"#;

/// Images and containers in a folder.
struct Buildah(tempfile::TempDir);

impl Buildah {
    fn run(&self, arguments: &[&str]) -> Output {
        Command::new("buildah")
            .arg("--root")
            .arg(self.0.path().join("root"))
            .arg("--runroot")
            .arg(self.0.path().join("run"))
            .args(["--storage-driver", "vfs"])
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .expect("buildah is installed by `make test-image`")
    }

    /// Runs a command that must succeed, and returns its output.
    fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "buildah {arguments:?}: {error}");
        String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
    }
}

/// Process in the image, killed at the end of the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Builds the last stage from a binary, and returns the storage.
fn build(binary: &Path) -> Buildah {
    let buildah = Buildah(tempfile::tempdir().expect("a temporary directory"));
    let context = tempfile::tempdir().expect("a temporary directory");
    let certificates = context.path().join("etc/ssl/certs");
    std::fs::create_dir_all(&certificates).expect("created");
    std::fs::write(certificates.join("ca-certificates.crt"), "").expect("written");
    std::fs::copy(binary, context.path().join("tidegate")).expect("a static binary");
    let names = context.path().join("names");
    std::fs::create_dir(&names).expect("created");
    std::os::unix::fs::symlink("/usr/bin/tidegate", names.join("ratelimit")).expect("a symlink");
    let dockerfile = read("Dockerfile");
    let (_, last_stage) = dockerfile.rsplit_once("\nFROM ").expect("stages");
    let file = context.path().join("Dockerfile");
    let text = format!("FROM {}", last_stage.replace("--from=build /", ""));
    std::fs::write(&file, text).expect("written");
    let [file, context] = [&file, context.path()].map(|path| path.to_str().expect("UTF-8"));
    // Only this format has a health check.
    let flags = ["build", "--isolation", "chroot", "--format", "docker", "--pull-never"];
    buildah.succeed(&[&flags[..], &["-t", "tidegate", "-f", file, context]].concat());
    buildah
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

#[test]
#[ignore = "needs root, buildah and a static binary: make test-image"]
fn image_runs_read_only_with_the_settings_of_compose_and_is_healthy() {
    let binary = std::env::var("STATIC_BINARY").expect("STATIC_BINARY of `make test-image`");
    let buildah = build(&PathBuf::from(binary));
    let container = buildah.succeed(&["from", "--pull-never", "tidegate"]);
    let image = buildah.succeed(&["inspect", "--type", "image", "tidegate"]);
    let image: Value = serde_json::from_str(&image).expect("JSON");
    let image = &image["Docker"]["config"];
    assert_eq!(image["User"], format!("{USER}:{USER}"), "{image}");

    // The variables, the configuration and the secret of compose.yaml; other ports.
    let redis = Redis::start();
    let compose: Value = serde_saphyr::from_str(&read("deploy/compose.yaml")).expect("YAML");
    let service = &compose["services"]["tidegate"];
    assert_eq!(service["read_only"], true);
    let ports = [free_port(), free_port(), free_port()].map(|port| format!("127.0.0.1:{port}"));
    let mut variables: Vec<(&str, &str)> = strings(&image["Env"])
        .into_iter()
        .filter_map(|variable| variable.split_once('='))
        .collect();
    let own = service["environment"].as_object().expect("variables").iter();
    variables.extend(own.map(|(name, value)| (name.as_str(), value.as_str().expect("a text"))));
    let url = redis.url();
    variables.extend([
        ("TIDEGATE_STORE", url.as_str()),
        ("TIDEGATE_LISTEN_HTTP", &ports[0]),
        ("TIDEGATE_LISTEN_GRPC", &ports[1]),
        ("TIDEGATE_LISTEN_ADMIN", &ports[2]),
    ]);
    let secrets = tempfile::tempdir().expect("a temporary directory");
    let token = secrets.path().join("admin-token");
    std::fs::write(&token, "token\n").expect("written");
    // As the commands of compose.yaml create it.
    std::fs::set_permissions(&token, Permissions::from_mode(0o644)).expect("our own file");

    let program = strings(&image["Entrypoint"]).into_iter().chain(strings(&service["command"]));
    let process = Command::new("unshare")
        .args(["--mount", "sh", "-c", RUN_READ_ONLY, "sh"])
        .arg(buildah.succeed(&["mount", &container]))
        .arg(root().join("deploy/compose/tidegate").canonicalize().expect("a folder"))
        .arg(&token)
        .args(program)
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .spawn();
    let mut running = Running(process.expect("unshare starts"));

    // The command that Envoy Gateway starts.
    let flags = ["run", "--isolation", "chroot", "--user", "65534:65534", &container, "--"];
    let version = buildah.succeed(&[&flags[..], &["/bin/ratelimit", "--version"]].concat());
    assert!(version.starts_with("ratelimit "), "{version}");

    let health = strings(&image["Healthcheck"]["Test"]);
    assert_eq!(health.first(), Some(&"CMD"), "{image}");
    let address = format!("TIDEGATE_LISTEN_ADMIN={}", ports[2]);
    let flags = ["run", "--isolation", "chroot", "--user", USER, "--env", &address, &container];
    let health = [&flags[..], &["--"], &health[1..], &["--require", "store"]].concat();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let asked = buildah.run(&health);
        if asked.status.success() {
            break;
        }
        assert_eq!(running.0.try_wait().expect("our own child"), None, "it has exited");
        assert!(Instant::now() < deadline, "{asked:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let of_process = |file: &str| {
        std::fs::read_to_string(format!("/proc/{}/{file}", running.0.id())).expect("it runs")
    };
    let status = of_process("status");
    assert!(status.contains(&format!("\nUid:\t{USER}\t{USER}\t")), "{status}");
    let mounts = of_process("mountinfo");
    let is_read_only = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        fields[4] == "/" && fields[5].split(',').any(|option| option == "ro")
    };
    assert!(mounts.lines().any(is_read_only), "{mounts}");

    let id = running.0.id().to_string();
    assert!(Command::new("kill").arg(&id).status().expect("kill runs").success());
    assert!(running.0.wait().expect("our own child").success(), "it drains and exits");
}
