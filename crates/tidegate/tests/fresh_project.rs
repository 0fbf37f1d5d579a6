//! A new project with the dependencies of the README: its code and all examples compile and run.
//!
//! The project uses this library in place of the one on GitHub, and the target folder and lock file
//! of this workspace, so that nothing is downloaded and little is compiled.

#[path = "support/server.rs"]
mod server;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use server::Redis;

const README: &str = include_str!("../../../README.md");

/// Examples that end: the name, and a part of the output.
const EXAMPLES: [(&str, &str); 7] = [
    ("blocking_redis", "worker 3: allowed true"),
    ("conformance_sequences", "\"action\":\"acquire\""),
    ("manual_clock", "without a wait"),
    ("own_store", "500 sequences conform"),
    ("policies_file", "attempt 4: allowed false, by Some(\"login\")"),
    ("redis_fallback", "decided by store"),
    ("waiting", "allowed within 1 ms: false"),
];

/// Examples that serve until they are stopped. They are only compiled.
const SERVERS: [&str; 3] = ["axum", "hyper", "tonic"];

fn library() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the blocks of the README in this language.
fn blocks(language: &str) -> Vec<&'static str> {
    let opening = format!("```{language}\n");
    README.split(&opening).skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

/// Writes a project with these programs, and returns its folder.
fn write_project(name: &str, dependencies: &str, programs: &[(String, String)]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("src/bin")).expect("created");
    for (program, code) in programs {
        fs::write(folder.join(format!("src/bin/{program}.rs")), code).expect("written");
    }
    // As in this workspace, so that compiled dependencies can be reused.
    let manifest = format!(
        "[package]\nname = \"{name}\"\nedition = \"2024\"\n\n{dependencies}\n\
         [workspace]\n\n[profile.dev]\ndebug = \"line-tables-only\"\n"
    );
    fs::write(folder.join("Cargo.toml"), manifest).expect("written");
    fs::copy(library().join("../../Cargo.lock"), folder.join("Cargo.lock")).expect("copied");
    folder
}

fn cargo(folder: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target folder");
    Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(folder)
        .env("CARGO_TARGET_DIR", target)
        .envs(environment.iter().copied())
        .output()
        .expect("cargo runs")
}

/// Compiles the programs of a project.
fn build(folder: &Path) {
    let mut output = cargo(folder, &["build", "--quiet", "--offline"], &[]);
    if !output.status.success() {
        // A dependency that this workspace does not have is downloaded once.
        output = cargo(folder, &["build", "--quiet"], &[]);
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a program, which must succeed, and returns its output.
fn run(folder: &Path, program: &str, environment: &[(&str, &str)]) -> String {
    let output = cargo(folder, &["run", "--quiet", "--offline", "--bin", program], environment);
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{program}: {text}");
    text
}

/// Returns the `[dependencies]` of the README, with the path of this library.
fn readme_dependencies() -> String {
    const SOURCE: &str = "path = \"../tidegate/crates/tidegate\"";
    let block = blocks("toml").into_iter().find(|block| block.contains("[dependencies]"));
    let block = block.expect("the README has a block with dependencies");
    assert!(block.contains(SOURCE), "{block}");
    block.replace(SOURCE, &format!("path = '{}'", library().display()))
}

#[test]
fn code_of_the_readme_runs_with_its_dependencies() {
    let mut programs = Vec::new();
    for (index, block) in blocks("rust").into_iter().enumerate() {
        let mut code = block.to_owned();
        if !code.contains("fn main()") {
            let _ = write!(code, "\nfn main() {{\n    app().expect(\"an application\");\n}}\n");
        }
        programs.push((format!("readme_{index}"), code));
    }
    assert!(programs.len() >= 2);
    let folder = write_project("readme-project", &readme_dependencies(), &programs);
    build(&folder);
    for (program, _) in &programs {
        run(&folder, program, &[]);
    }
}

#[test]
fn examples_run_in_a_new_project() {
    let read = |name: &str| {
        let file = library().join(format!("examples/{name}.rs"));
        (name.to_owned(), fs::read_to_string(file).expect("an example"))
    };
    let names = EXAMPLES.iter().map(|(name, _)| *name).chain(SERVERS);
    let programs: Vec<_> = names.map(read).collect();
    let folder = library().join("examples");
    let count = fs::read_dir(folder).expect("examples").count();
    assert_eq!(programs.len(), count, "every example is tested");

    let mut dependencies = readme_dependencies();
    let with_all = ["redis", "testing", "tower"].map(|name| format!("{name:?}")).join(", ");
    let features =
        dependencies.split("features = [").nth(1).and_then(|rest| rest.split(']').next());
    let features = features.expect("the features of the library").to_owned();
    dependencies = dependencies.replacen(&features, &with_all, 1);
    let config = library().join("../tidegate-config");
    let _ = writeln!(dependencies, "tidegate-config = {{ path = {config:?} }}");
    // Those of the servers.
    dependencies.push_str(
        "bytes = \"1\"\nhttp = \"1\"\nhttp-body-util = \"0.1\"\nhyper = \"1\"\n\
         serde_json = \"1\"\n\
         hyper-util = { version = \"0.1\", features = [\"tokio\", \"server\", \"service\", \"http1\"] }\n\
         tonic = \"0.14\"\ntonic-health = \"0.14\"\ntonic-types = \"0.14\"\n\
         tower = { version = \"0.5\", features = [\"util\"] }\n",
    );
    let project = write_project("examples-project", &dependencies, &programs);
    build(&project);
    let redis = Redis::start();
    for (name, expected) in EXAMPLES {
        let output = run(&project, name, &[("REDIS_URL", &redis.url())]);
        assert!(output.contains(expected), "{name}: {output}");
    }
    // Without Redis, the example with a fallback decides locally.
    let down = [("REDIS_URL", "redis://127.0.0.1:1")];
    let output = run(&project, "redis_fallback", &down);
    assert!(
        output.contains("decided by local") && output.contains("falling back: true"),
        "{output}"
    );
}
