//! The checker finds planted idioms and constants.

use super::{check_constants, check_words};

fn found(path: &str, text: &str) -> Vec<(usize, String)> {
    check_words(path, text).into_iter().map(|finding| (finding.line, finding.found)).collect()
}

#[track_caller]
fn assert_found(path: &str, text: &str, expected: &[(usize, &str)]) {
    let expected: Vec<_> =
        expected.iter().map(|(line, found)| (*line, (*found).to_owned())).collect();
    assert_eq!(found(path, text), expected, "{text}");
}

#[test]
fn finds_idioms_in_comments_of_each_language() {
    let rust = "/// A call under\n/// way.\nfn send() {} // by itself\n";
    assert_found("a.rs", rust, &[(1, "under way"), (3, "by itself")]);
    assert_found("a.lua", "local x = 1 -- given back\n", &[(1, "given back")]);
    assert_found("a.yaml", "# In vain.\nkey: \"#told\"\n", &[(1, "in vain")]);
    assert_found("Makefile", "all: # all the\n# same\n", &[(1, "all the same")]);
}

#[test]
fn finds_idioms_in_documents_but_not_in_code_spans() {
    assert_found("a.md", "A client is\ntold so.\n\n- so\n- many\n", &[(2, "told")]);
    assert_found("a.md", "`told` and `is none` are quoted.\n", &[]);
}

#[test]
fn finds_idioms_in_string_literals() {
    let text = "fn f() { info!(\"it goes \\\n    away\"); let c = '\"'; g(\"nobody\"); }\n";
    assert_found("a.rs", text, &[(1, "goes away")]);
    assert_found("a.rs", "const A: &str = r#\"x \"seldom\" y\"#;\n", &[(1, "seldom")]);
    assert_found("a.rs", "let c = '\\''; // in vain\n", &[(1, "in vain")]);
}

#[test]
fn finds_idioms_in_names() {
    assert_found("a.rs", "fn not_in_vain() {}\n", &[(1, "in vain (in fn not_in_vain)")]);
    assert_found("a.rs", "struct LastTrouble;\n", &[(1, "LastTrouble")]);
    assert_found("a.rs", "let first = told.is_none();\n", &[(1, "told")]);
    assert_found("a.rs", "fn is_none() {}\n", &[]);
}

#[test]
fn finds_pronouns_as_subjects_except_in_questions() {
    assert_found("a.md", "Who waits gets in.\n", &[(1, "who waits …")]);
    assert_found("a.rs", "// It runs. What is left stays.\n", &[(1, "what is …")]);
    assert_found("a.md", "Who waits here?\n\n# What it does\n", &[]);
    assert_found("a.md", "A client who waits gets in.\n", &[]);
}

#[test]
fn finds_a_in_place_of_per() {
    assert_found("a.md", "one call a decision\n", &[(1, "one call a decision")]);
    assert_found("a.md", "100 requests a second\n", &[(1, "requests a second")]);
    assert_found("a.md", "to request a key, once a second\n", &[]);
}

#[test]
fn suggests_a_plain_word() {
    let finding = check_words("docs/a.md", "The calls under way.\n").remove(0);
    let expected = "docs/a.md:1: \"under way\"; plain: in flight, in progress";
    assert_eq!(finding.to_string(), expected);
}

#[test]
fn finds_constants_without_a_usual_form() {
    let names = |text: &str| -> Vec<String> {
        check_constants("a.rs", text).into_iter().map(|finding| finding.found).collect()
    };
    assert_eq!(names("const SETTLE: Duration = Duration::ZERO;\n"), ["SETTLE"]);
    assert_eq!(names("    pub(crate) const MOST_TAGS: usize = 3;\n"), ["MOST_TAGS"]);
    assert_eq!(names("const SLOTS_A_SWEEP: usize = 3;\n"), ["SLOTS_A_SWEEP"]);
    assert_eq!(names("const FIRST_DELAY: u64 = 3;\n"), ["FIRST_DELAY"]);
    let usual = "const MAX_LINGER: Duration = X;\nconst CALL_TIMEOUT: Duration = X;\n\
        const DEBOUNCE: Duration = X;\nconst SECOND: Duration = X;\nconst fn x(y: u8) {}\n";
    assert!(names(usual).is_empty());
}

#[test]
fn constant_functions_are_not_constants() {
    let setter = "    pub const fn with_reset_after(mut self, reset_after: Duration) -> Self {\n";
    assert_eq!(check_constants("a.rs", setter), []);
    let getter = "const fn first_delay(delay: u64) -> u64 {\n";
    assert_eq!(check_constants("a.rs", getter), []);
    let constant = "pub const RESET: Duration = Duration::ZERO;\n";
    assert_eq!(check_constants("a.rs", constant).len(), 1);
}
