//! Compose file and Dockerfile.

use serde_json::Value;

use crate::{check_config, read, root, succeed};

fn compose() -> Value {
    serde_saphyr::from_str(&read("deploy/compose.yaml")).expect("YAML")
}

#[test]
fn compose_file_matches_the_schema_and_names_existing_files() {
    succeed("check-jsonschema", ["--builtin-schema", "vendor.compose-spec", "deploy/compose.yaml"]);
    let compose = compose();
    let services = compose["services"].as_object().expect("services");
    let mut files = 0;
    for (name, service) in services {
        let volumes = service["volumes"].as_array().into_iter().flatten();
        for volume in volumes.filter_map(Value::as_str) {
            let source = volume.split(':').next().expect("a source");
            let path = root().join("deploy").join(source);
            // The dashboards are a part of the monitoring, which may be installed alone.
            let is_monitoring =
                source.starts_with("./prometheus/") || source.starts_with("./grafana/");
            assert!(path.exists() || is_monitoring, "{name}: {source} is missing");
            files += 1;
        }
    }
    assert!(files >= 7, "{files} files");
}

/// Compose copies a secret of a variable into the container after its start, which fails with a
/// read-only root, and mounts a file.
#[test]
fn services_with_a_read_only_root_have_secrets_of_files() {
    let compose = compose();
    let text = read("deploy/compose.yaml");
    let mut mounted = 0;
    for (name, service) in compose["services"].as_object().expect("services") {
        let secrets = service["secrets"].as_array().into_iter().flatten().filter_map(Value::as_str);
        for secret in secrets.filter(|_| service["read_only"] == true) {
            let file = compose["secrets"][secret]["file"].as_str();
            let file = file.unwrap_or_else(|| panic!("{name}: {secret} is no file"));
            // The commands at the top create it, and no commit contains it.
            let (folder, file) = file.rsplit_once('/').expect("a folder");
            let folder = folder.replacen('.', "deploy", 1);
            assert!(text.contains(&format!("mkdir -m 700 {folder}\n")), "{folder}");
            assert!(text.contains(&format!(" {file} ")), "{file}");
            assert!(read(".gitignore").contains(&format!("/{folder}\n")), "{folder}");
            mounted += 1;
        }
    }
    assert_eq!(mounted, 2, "the token of both services");
}

/// Every flag and variable of the services is one of the binary.
#[test]
fn commands_and_variables_are_those_of_the_binary() {
    let help = |command: &str| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args([command, "--help"])
            .output()
            .expect("the binary runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let compose = compose();
    for service in ["tidegate", "gateway"] {
        let service = &compose["services"][service];
        let command: Vec<&str> = service["command"]
            .as_array()
            .expect("a command")
            .iter()
            .filter_map(Value::as_str)
            .collect();
        let help = help(command[0]);
        for flag in command.iter().filter(|word| word.starts_with("--")) {
            assert!(help.contains(flag), "{flag}");
        }
        for variable in service["environment"].as_object().expect("variables").keys() {
            assert!(help.contains(variable.as_str()), "{variable} is not in {help}");
        }
    }
    let dockerfile = read("Dockerfile");
    let all = ["serve", "gateway"].map(help).concat();
    for variable in dockerfile.split_whitespace().filter_map(|word| word.split_once('=')) {
        if variable.0.starts_with("TIDEGATE_") {
            assert!(all.contains(variable.0), "{}", variable.0);
        }
    }
}

#[test]
fn configuration_of_the_services_is_valid() {
    let config = read("deploy/compose/tidegate/tidegate.yaml");
    check_config("compose", &config, &[]);
    check_config("compose", &config, &[("TIDEGATE_STORE", "rediss://h:6380")]);
}

#[test]
fn dockerfile_passes_hadolint() {
    succeed("hadolint", ["--failure-threshold", "info", "Dockerfile"]);
    let dockerfile = read("Dockerfile");
    let (_, last_stage) = dockerfile.rsplit_once("\nFROM ").expect("stages");
    assert!(last_stage.starts_with("scratch\n"), "{last_stage}");
    for part in ["USER 65532:65532", "HEALTHCHECK", "ca-certificates.crt", "\"health\"]"] {
        assert!(last_stage.contains(part), "{part}");
    }
    // The minimum of the workspace must compile in the image.
    let version = |text: &str, before: &str| -> (u32, u32) {
        let rest = text.split(before).nth(1).expect("a version");
        let mut parts = rest.split(|character: char| !character.is_ascii_digit());
        let mut next = || parts.next().and_then(|part| part.parse().ok()).expect("a number");
        (next(), next())
    };
    let needed = version(&read("Cargo.toml"), "rust-version = \"");
    assert!(version(&dockerfile, "RUST_VERSION=") >= needed);
}

/// All that the build needs is in its context.
#[test]
fn image_is_built_from_the_files_of_its_context() {
    let ignore = read(".dockerignore");
    for copied in read("Dockerfile").lines().filter_map(|line| line.strip_prefix("COPY ")) {
        let words: Vec<&str> = copied.split_whitespace().collect();
        for source in words[..words.len() - 1].iter().filter(|_| !copied.starts_with("--from")) {
            assert!(ignore.contains(&format!("!{source}")), "{source} is ignored");
            assert!(root().join(source).exists(), "{source}");
        }
    }
}
