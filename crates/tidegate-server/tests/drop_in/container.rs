use std::process::Command;

use crate::control_plane::ControlPlane;
use crate::program::{Program, Variables, program_in};
use crate::support::{Redis, TEST_TIMEOUT};
use crate::{limited, rules_of, send};

/// Runs a program as user 65534 without capabilities, on a root that is read-only. The namespace
/// of users makes it work without root, too.
const AS_IN_A_CONTAINER: &str = r#"
set -e
mount -o remount,bind,ro /
for folder in /tmp /var /run /dev/shm; do
    if mountpoint -q $folder; then mount -o remount,bind,ro $folder; fi
done
exec unshare --user --map-user=65534 --map-group=65534 setpriv --no-new-privs sh -c '
    test "$(id -u):$(id -g)" = 65534:65534
    grep -q "^CapEff:.0000000000000000$" /proc/self/status
    for folder in / /tmp /var/tmp /run; do
        if touch $folder/probe 2>/dev/null; then exit 9; fi
    done
    exec "$0"
' "$0"
"#;

#[tokio::test(flavor = "multi_thread")]
async fn it_runs_as_any_user_on_a_root_that_is_read_only() {
    let (redis, mut plane) = (Redis::start(), ControlPlane::start().await);
    let variables = Variables::of_gateway(&plane.address.to_string(), &redis)
        .with("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    let folder = tempfile::tempdir().expect("a temporary directory");
    let program = program_in(folder.path());
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", AS_IN_A_CONTAINER]);
    command.arg(program.get_program());
    let mut program = Program::start_by(command, folder, &variables);
    tokio::time::timeout(TEST_TIMEOUT, plane.request()).await.expect("a stream");
    plane.accept("1", &[rules_of("edge", vec![limited("user", "", 1)])]).await;
    program.wait_until("it is healthy", || program.health().0 == 200);
    let mut client = program.client().await;
    assert_eq!(send(&mut client, "edge", &[("user", "ann")]).await, (true, Some(1)));
    assert_eq!(send(&mut client, "edge", &[("user", "ann")]).await, (false, Some(1)));
    program.terminate();
    assert!(program.wait_for_exit().success(), "{}", program.output());
}
