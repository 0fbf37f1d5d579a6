use super::*;

#[test]
fn sample_is_valid() {
    let config = Config::parse("sample.yaml", SAMPLE).expect("valid");
    assert!(config.policies.iter().count() > 0);
}

#[test]
fn examples_in_the_documents_are_valid() {
    for document in [
        include_str!("../../../../docs/configuration.md"),
        include_str!("../../../../docs/redis.md"),
        include_str!("../../../../docs/gateway.md"),
        include_str!("../../../../docs/proxies.md"),
        include_str!("../../../../README.md"),
    ] {
        let blocks: Vec<&str> = document
            .split("```yaml\n")
            .skip(1)
            .filter_map(|rest| rest.split("```").next())
            .collect();
        assert!(!blocks.is_empty());
        for block in blocks {
            // Examples name rules of this file. Other files that they name do not exist here.
            let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/envoy/ratelimit.yaml");
            let block = block.replace("files: [ratelimit.yaml]", &format!("files: ['{rules}']"));
            match Config::parse("the document", &block) {
                Err(error) if error.to_string().contains(".pem: cannot read a certificate") => {}
                Err(error) if error.to_string().contains(".pem: cannot be read") => {}
                Err(error) if error.to_string().contains("-token.txt: cannot be read") => {}
                result => assert!(result.is_ok(), "{block}\n{}", result.expect_err("wrong")),
            }
        }
    }
}

#[test]
fn truncated_file_never_panics() {
    let policies = Config::parse("sample.yaml", SAMPLE).expect("valid").policies.iter().count();
    for end in (0..SAMPLE.len()).filter(|end| SAMPLE.is_char_boundary(*end)) {
        if let Ok(config) = Config::parse("sample.yaml", &SAMPLE[..end]) {
            assert!(config.policies.iter().count() <= policies);
        }
    }
}

fn error(text: &str) -> String {
    Config::parse("tidegate.yaml", text).expect_err("wrong").to_string()
}

#[test]
fn error_shows_the_line_and_suggests_the_nearest_name() {
    let text = error("policies:\n  - name: a\n    limt: 5\n    window: 60s\n");
    assert!(text.starts_with("tidegate.yaml:3:5: unknown field `limt`"), "{text}");
    assert!(text.contains("did you mean `limit`?"), "{text}");
    assert!(text.ends_with("  |\n3 |     limt: …\n  |     ^"), "{text}");
}

#[test]
fn validation_errors_show_their_position() {
    let policy =
        |lines: &str| format!("policies:\n  - name: a\n    limit: 5\n    window: 60s\n{lines}");
    for (text, place, message) in [
        (
            policy("").replace("limit: 5", "limit: 0"),
            "tidegate.yaml:3:12:",
            "from 1 to 1000000000000",
        ),
        (policy("").replace("60s", "60"), "tidegate.yaml:4:13:", "write it like 500ms"),
        (
            policy("    algorithm: tokn-bucket\n"),
            "tidegate.yaml:5:16:",
            "did you mean `token-bucket`?",
        ),
        (policy("    burst: 9\n"), "tidegate.yaml:5:12:", "has no burst"),
        (policy("    mode: shadwo\n"), "tidegate.yaml:5:11:", "did you mean `shadow`?"),
        (policy("    cost: 6\n"), "tidegate.yaml:5:11:", "at most 5 at once"),
        (policy("    name: b\n"), "tidegate.yaml:5:5:", "`name` is there twice"),
        (policy("  - name: a\n    limit: 5\n    window: 60s\n"), "tidegate.yaml:", "used twice"),
        ("listen: {http: localhost}\n".to_owned(), "tidegate.yaml:1:16:", "127.0.0.1:8080"),
        ("listen: {admin: 0.0.0.0:9}\n".to_owned(), "tidegate.yaml:", "auth.admin_token"),
        ("policies: 5\n".to_owned(), "tidegate.yaml:1:11:", "policies: must be a list"),
        ("auth: {api_token: a, admin_token: a}\n".to_owned(), "tidegate.yaml:", "are the same"),
    ] {
        let found = error(&text);
        assert!(found.starts_with(place) && found.contains(message), "{text}\n{found}");
    }
}

#[test]
fn errors_in_cors_show_their_position() {
    for (cors, place, message) in [
        ("{}", "1:", "allow_origins"),
        ("{allow_origins: []}", "1:33:", "list 1 to 100 origins"),
        ("{allow_origins: [app.example.com]}", "1:34:", "is not an origin: write it like https://"),
        ("{allow_origins: ['https://a/']}", "1:34:", "without a path"),
        ("{allow_origins: ['*', 'https://a']}", "1:34:", "remove the others"),
        ("{allow_origins: ['*'], allow_credentials: true}", "1:33:", "list the origins instead"),
        ("{allow_origins: ['*'], expose_headers: ['a b']}", "1:57:", "is not the name of a header"),
        (
            "{allow_origins: ['https://a'], expose_headers: ['*'], allow_credentials: true}",
            "1:65:",
            "list the headers instead",
        ),
        ("{allow_origin: ['*']}", "1:18:", "did you mean `allow_origins`?"),
    ] {
        let text = error(&format!("gateway: {{cors: {cors}}}\n"));
        let starts = text.starts_with(&format!("tidegate.yaml:{place}"));
        assert!(starts && text.contains(message), "{cors}: {text}");
    }
}

#[test]
fn errors_of_numbers_show_the_valid_range() {
    for number in
        ["-1", "1.5", "1e30", "'5'", "yes", "null", "many", "99999999999999999999999", "0", "[1]"]
    {
        let text =
            error(&format!("policies:\n  - name: a\n    limit: {number}\n    window: 60s\n"));
        let expected = "tidegate.yaml:3:12: limit: must be a whole number from 1 to 1000000000000";
        assert!(text.starts_with(expected), "{number}: {text}");
    }
    let prefix = error("client_ip: {ipv6_prefix: 129}\n");
    assert!(prefix.contains("1:26: ipv6_prefix: must be a whole number from 1 to 128"), "{prefix}");
}

#[test]
fn errors_in_policies_show_their_position() {
    // Each text starts at line 5 of the file.
    for (rest, place, message) in [
        ("cost: 0", "5:11:", "cost 0 takes nothing"),
        (
            "cost: {attribute: header.c, default: 7, max: 5}",
            "5:11:",
            "the default cost 7 is more than the max 5",
        ),
        ("cost: {attribute: header., max: 5}", "5:23:", "a name is missing after the dot"),
        ("cost: {attribute: heder.x, max: 5}", "5:23:", "did you mean `header.x`?"),
        ("cost: {reserve: 11, actual: {response_header: t}}", "5:11:", "at most 10 at once"),
        (
            "cost: {reserve: {attribute: heder.x}, actual: {response_header: t}}",
            "5:33:",
            "cost.reserve.attribute: unknown attribute \"heder.x\"",
        ),
        (
            "cost: {reserve: 5, actual: {response_header: 'x tokens'}}",
            "5:50:",
            "\"x tokens\" is not the name of a response header: write one such as x-tokens-used",
        ),
        ("cost: {reserve: 5}", "5:11:", "has `actual: {response_header: NAME}`"),
        (
            "cost: {actual: {response_header: t}}",
            "5:11:",
            "has `reserve`, the units to take before",
        ),
        (
            "cost: {reserve: 5, max: 5, actual: {response_header: t}}",
            "5:11:",
            "move `attribute`, `default` and `max` into `reserve`",
        ),
        (
            "cost: {reserve: {reserve: 5, actual: {response_header: t}}, actual: {response_header: t}}",
            "5:21:",
            "a reserve is a whole number, or {attribute: NAME, default: 2000}",
        ),
        (
            "key: host\n    overrides:\n      - {key: k, limit: 1}\n      - {key: k, limit: 2}",
            "8:15:",
            "overridden twice",
        ),
        ("overrides:\n      - {key: k, limit: 1, window: 400d}", "6:36:", "from 1ms to 366 days"),
        ("overrides:\n      - {key: k, limit: 20000000}", "6:25:", "too large for sliding-log"),
        ("overrides: [{key: a, limit: 1}]", "5:23:", "give it a key, such as `key: [ip]`"),
        ("key: ip\n    overrides: [{key: [], limit: 1}]", "6:23:", "one value, not a list"),
        ("key: ip\n    overrides: [{key: ten, limit: 1}]", "6:23:", "neither an address"),
        (
            "key: [ip, host]\n    overrides: [{key: [10.0.0.0/8, a], limit: 1}]",
            "6:23:",
            "counts by ip alone",
        ),
        ("match: {ip: 10.0.0.0/33}", "5:17:", "neither an address nor a network"),
        ("match: {ip: '2001:db8::1'}", "5:17:", "inside the group 2001:db8::/64"),
        ("unless: [{ip: 10.0.0}]", "5:14:", "neither an address"),
        ("unless: [{ip: 10.0.0.1}, {}]", "5:30:", "would exempt every request"),
        ("unless: [{ips: 10.0.0.1}]", "5:15:", "unless: unknown attribute \"ips\""),
        ("limits: {attribute: header.x, other: 5}", "3:12:", "move this one to `limits.other`"),
        (
            "key: ip\n    overrides: [{key: 192.0.2.1, limit: 1, window: {calendar: month}}]",
            "6:52:",
            "sliding-log has no calendar: its windows start with each request",
        ),
        ("lanes: {attribute: header.x, low: 9%}", "5:24:", "has less than one unit"),
        ("lanes: {attribute: header.x, low: 80}", "5:39:", "from 1% to 100%, such as 80%"),
        (
            "cost: {reserve: 5, actual: {response_header: X-RateLimit-Used}}",
            "5:",
            "is not the name of a response header",
        ),
        ("hold: {ttl: 2m, max_ttl: 1m}", "5:11:", "longer than their max_ttl"),
        ("hold: {ttl: 0s}", "5:17:", "must be from 1s to 1d"),
        ("algorithm: concurrency", "4:13:", "concurrency has no window"),
        ("match: {path: '^/api/.*$'}", "5:19:", "such as `/api/**`"),
        ("match: {method: 'GET|POST'}", "5:21:", "`[GET, POST]`"),
        ("match: {method: '!GET'}", "5:21:", "`unless: [{method: GET}]`"),
        ("match: {host: 'https://example.com'}", "5:19:", "write `example.com`"),
        ("key: ip\n    overrides: [{key: [a, b], limit: 1}]", "6:23:", "counts only by ip"),
        (
            "key: [ip, path]\n    overrides: [{key: 'a:b', limit: 1}]",
            "6:23:",
            "write a list of ip, path",
        ),
        ("match:\n      path: /\n      method: []", "7:15:", "has no value to match"),
        ("match: {header.X-A: a, header.x-a: b}", "5:40:", "header.x-a is there twice"),
        ("match: {'': a}", "5:13:", "is not an attribute name"),
        ("match: {paths: /x}", "5:13:", "match: unknown attribute \"paths\""),
        ("key: ['']", "5:11:", "is not an attribute name"),
        ("on_store_failure: error", "5:23:", "it must be one of local, allow, deny"),
        ("key: [headers.x-user]", "5:11:", "did you mean `header.x-user`?"),
        ("key: tenant", "5:10:", "key: unknown attribute \"tenant\""),
        ("key: null", "5:5:", "a text or a list of texts, not nothing"),
        ("key: [ip, header.]", "5:15:", "a name is missing after the dot"),
        ("limit: 5", "5:5:", "the field `limit` is there twice"),
    ] {
        let found =
            error(&format!("policies:\n  - name: a\n    limit: 10\n    window: 60s\n    {rest}\n"));
        assert!(
            found.starts_with(&format!("tidegate.yaml:{place}")) && found.contains(message),
            "{rest}\n{found}"
        );
    }
    for (rest, place, message) in [
        ("algorithm: sliding-log", "2:11:", "missing field `window`: the time of the limit"),
        ("algorithm: concurrency\n    hold: {on_expire: charge}", "5:23:", "leave `on_expire` out"),
        ("algorithm: concurrency\n    burst: 5", "5:12:", "burst"),
        (
            "algorithm: concurrency\n    cost: {reserve: 5, actual: {response_header: t}}",
            "5:50:",
            "a policy of concurrency is not settled by a response",
        ),
        ("algorithm: concurrency\n    block_for: 10m", "5:16:", "concurrency has no blocks"),
        ("algorithm: concurrency\n    encoding: packed", "5:15:", "encoding"),
        (
            "algorithm: concurrency\n    key: ip\n    overrides: [{key: 10.0.0.1, limit: 2000000}]",
            "6:40:",
            "too large for concurrency",
        ),
    ] {
        let found = error(&format!("policies:\n  - name: a\n    limit: 10\n    {rest}\n"));
        assert!(
            found.starts_with(&format!("tidegate.yaml:{place}")) && found.contains(message),
            "{rest}\n{found}"
        );
    }
    let window = error("policies:\n  - name: a\n    limit: 10\n    window: 400d\n");
    assert!(window.starts_with("tidegate.yaml:4:13: window 34560000s is out of range"), "{window}");
    let twice = error(
        "policies:\n  - {name: a, limit: 1, window: 1s}\n  - {name: a, limit: 1, window: 1s}\n",
    );
    assert!(
        twice.starts_with("tidegate.yaml:3:12: the policy name \"a\" is used twice"),
        "{twice}"
    );
}

#[test]
fn errors_in_other_sections_show_their_position() {
    for (text, place, message) in [
        ("store:\n  redis: ''\n", "2:10:", "it must look like redis://[user:password@]host"),
        ("store:\n  redis:\n", "2:8:", "store.redis is empty"),
        ("store:\n  redis: []\n", "2:10:", "store.redis is empty"),
        (
            "store:\n  redis: redis://h\n  sentinel: {master: m, nodes: [redis://h]}\n",
            "3:13:",
            "both redis and sentinel",
        ),
        ("store:\n  sentinel: {master: m, nodes: []}\n", "2:32:", "store.sentinel.nodes is empty"),
        ("store:\n  redis: redis://h\n  timeout: 0s\n", "3:12:", "must be from 1ms to 1m"),
        ("store:\n  redis: redis://h\n  timeout: 5m\n", "3:12:", "must be from 1ms to 1m"),
        ("store:\n  redis: redis://h\n  instances: 0\n", "3:14:", "a whole number from 1 to 10000"),
        ("store:\n  redis: redis://h\n  prefix: ''\n", "3:11:", "is not usable"),
        (
            "store:\n  redis: rediss://h\n  tls: {key: a.pem}\n",
            "3:8:",
            "certificate and key together",
        ),
        (
            "store:\n  redis: rediss://h\n  tls: {ca: nowhere.pem}\n",
            "3:13:",
            "nowhere.pem: cannot be read",
        ),
        ("listen:\n  admin: 0.0.0.0:9\n", "2:10:", "auth.admin_token"),
        ("listen:\n  resp: 0.0.0.0:9\n", "2:9:", "auth.api_token"),
        (
            "listen:\n  gateway: 127.0.0.1:9\n  resp: 127.0.0.1:9\n",
            "3:9:",
            "127.0.0.1:9 is already in use",
        ),
        (
            "listen:\n  http: 127.0.0.1:9\n  grpc: 127.0.0.1:9\n",
            "3:9:",
            "127.0.0.1:9 is already in use",
        ),
        (
            "listen:\n  http: 0.0.0.0:9\n  admin: 127.0.0.1:9\n",
            "3:10:",
            "0.0.0.0:9 is already in use",
        ),
        (
            "listen:\n  http: unix:/run/a.sock\n  admin: unix:/run/a.sock\n",
            "3:10:",
            "unix:/run/a.sock is already in use",
        ),
        ("listen:\n  grpc: unix:a.sock\n", "2:9:", "must be absolute"),
        ("listen:\n  unix_mode: '1660'\n", "2:14:", "three octal digits"),
        ("listen:\n  unix_mode: 660\n", "2:14:", "three octal digits in quotes"),
        ("listen:\n  max_connection_age: 10ms\n", "2:23:", "from 1s to 366d, or off"),
        ("listen:\n  max_connection_age: soon\n", "2:23:", "is not a duration"),
        ("listen:\n  idle_timeout: 10ms\n", "2:17:", "must be from 1s to 1d"),
        ("listen:\n  idle_timeout: 2d\n", "2:17:", "must be from 1s to 1d"),
        ("listen:\n  max_connections: 0\n", "2:20:", "from 1 to 1000000"),
        ("listen:\n  max_connections_per_address: many\n", "2:32:", "from 1 to 1000000"),
        ("envoy:\n  on_store_failure: closed\n", "2:21:", "one of local, allow, deny, error"),
        ("envoy:\n  on_store_failures: {a: deny}\n", "2:26:", "no rule is named \"a\""),
        ("envoy:\n  algorithms: {a: token-bucket}\n", "2:19:", "no rule is named \"a\""),
        ("envoy:\n  holds: {a: {reserve: 1}}\n", "2:14:", "holds: no rule is named \"a\""),
        ("envoy:\n  holds: {a: {ttl: 1ms}}\n", "2:20:", "must be from 1s to 1d"),
        ("envoy:\n  hold_id: ''\n", "2:12:", "hold_id is empty"),
        ("envoy:\n  files:\n    - nowhere.yaml\n", "3:7:", "nowhere.yaml: cannot be read"),
        ("envoy:\n  files: [nowhere/*.yaml]\n", "2:11:", "no file matches this pattern"),
        ("envoy:\n  near_limit_ratio: 1.5\n", "2:21:", "must be a number from 0 to 1"),
        ("envoy:\n  near_limit_ratio: '0.5'\n", "2:21:", "from 0 to 1, without quotes"),
        ("envoy:\n  on_store_failure: eror\n", "2:21:", "did you mean `error`?"),
        (
            "gateway:\n  access_log:\n    path: a\n    format: jsn\n",
            "4:13:",
            "one of combined, json (did you mean `json`?)",
        ),
        (
            "tls:\n  certificate: nowhere.pem\n  key: key.pem\n",
            "2:16:",
            "nowhere.pem: cannot read a certificate",
        ),
        ("gateway:\n  ca: nowhere.pem\n", "2:7:", "nowhere.pem: cannot read a certificate"),
        ("auth: {api_token: ''}\n", "1:19:", "this token is empty"),
        ("auth:\n  admin_token:\n", "2:14:", "this token is empty"),
        ("auth: {api_token: a, api_token: b}\n", "1:22:", "`api_token` is there twice"),
        (
            "auth:\n  tokens:\n    - {name: a, token: t, scopes: []}\n",
            "3:35:",
            "scopes is empty: list some of acquire, refund, reset and read",
        ),
        (
            "auth:\n  tokens:\n    - {name: a, token: t, scopes: [read, adquire]}\n",
            "3:42:",
            "unknown scope: the scopes are acquire, refund, reset and read",
        ),
        (
            "auth:\n  tokens:\n    - {name: a, token: t, scopes: [read]}\n    \
             - {name: a, token: u, scopes: [read]}\n",
            "4:14:",
            "another token has this name",
        ),
        (
            "auth:\n  api_token: t\n  tokens:\n    - {name: a, token: t, scopes: [read]}\n",
            "4:14:",
            "another entry has the same token",
        ),
        (
            "auth:\n  tokens:\n    - {name: a, scopes: [read]}\n",
            "3:14:",
            "this entry has no token: add token_file, or token",
        ),
        (
            "auth:\n  tokens:\n    - {name: a, token: t, token_file: f, scopes: [read]}\n",
            "3:39:",
            "auth has both token and token_file",
        ),
        (
            "attributes:\n  - tenant\n  - header.x\n",
            "3:5:",
            "attributes: \"header.x\" cannot be declared",
        ),
        ("attributes: [tenant, tenant]\n", "1:22:", "is declared twice"),
        ("attribute: [tenant]\n", "1:1:", "did you mean `attributes`?"),
        ("policies: []\n---\npolicies: []\n", "3:1:", "a configuration is one document"),
        ("listen: 5\n", "1:9:", "listen: must be fields"),
        ("headers: {x_ratelimit: maybe}\n", "1:24:", "x_ratelimit: must be true or false"),
        ("headers: {x_ratelimit: yes}\n", "1:24:", "YAML 1.2 has no yes, no, on or off"),
        ("headers: {x_ratelimit: 'true'}\n", "1:24:", "must be true or false, without quotes"),
        (
            "store:\n  sentinel: {master: '', nodes: [redis://h]}\n",
            "2:22:",
            "store.sentinel.master is empty",
        ),
        ("store: {prefix: '{a}'}\n", "1:17:", "is not usable"),
        ("gateway:\n  header_timeout: 0s\n", "2:19:", "must be from 1ms to 1d"),
        ("gateway:\n  connect_timeout: 2d\n", "2:20:", "must be from 1ms to 1d"),
        ("gateway:\n  idle_timeout: 60\n", "2:17:", "write it like 500ms"),
        ("gateway:\n  upstreams: ['http://h:99999']\n", "2:15:", "is not an upstream"),
    ] {
        let found = error(text);
        assert!(
            found.starts_with(&format!("tidegate.yaml:{place}")) && found.contains(message),
            "{text}\n{found}"
        );
    }
    for good in [
        "listen: {http: 127.0.0.1:0, grpc: 127.0.0.1:0}\n",
        "listen: {admin: 127.0.0.1:8080}\n",
        "listen: {http: unix:/run/a.sock, admin: unix:/run/b.sock, unix_mode: '0660'}\n",
        "listen: {max_connection_age: off}\n",
        "listen: {idle_timeout: 10m, max_connections: 50000, max_connections_per_address: 1}\n",
    ] {
        assert!(Config::parse("good", good).is_ok(), "{good}");
    }
}

#[test]
fn usual_mistakes_in_yaml_are_named() {
    let mut wrong = Vec::new();
    let mut compare = |text: &str, place: &str, message: &str| {
        let found = error(text);
        let is_right =
            found.starts_with(&format!("tidegate.yaml:{place}")) && found.contains(message);
        if !is_right || found.contains("S3CR3T") {
            wrong.push(format!("{text}\n{found}"));
        }
    };
    // Each text starts at line 5 of the file.
    for (rest, place, message) in [
        ("\tmode: shadow", "5:1:", "a tab in the indentation: use spaces"),
        ("    match:\n\t  path: /a", "6:1:", "a tab in the indentation: use spaces"),
        ("  \u{a0} mode: shadow", "5:3:", "a special space in the indentation"),
        ("    cost:5", "5:5:", "a space is missing after the colon"),
        ("    match: {path:/a}", "5:13:", "a space is missing after the colon"),
        ("    match: {host: *.example.com}", "5:19:", "starts with * must be in quotes, such as"),
        ("    match:\n      path: *", "6:13:", "a text that starts with * must be in quotes"),
        ("    match:\n      path: **/x", "6:13:", "a text that starts with * must be in quotes"),
        ("    match: {path: /users/{id}}", "5:26:", "must be in quotes, such as '/users/{id}'"),
        ("    match:\n      path: {id}/a", "6:13:", "a text that starts with { must be in quotes"),
        ("    match: {path: [/a, /b}", "5:19:", "mismatched bracket '[' closed by '}'"),
        ("    match: {path: /a", "5:12:", "unclosed bracket '{'"),
        ("   mode: shadow", "5:4:", "the indentation does not fit the lines above"),
        ("     mode: shadow", "5:10:", "the indentation does not fit the lines above"),
        ("    match: {path: @a}", "5:19:", "a text that starts with @ must be in quotes"),
        ("    match:\n      path: a: b", "6:14:", "a text with a colon and a space must be in"),
        ("    match: {path: 'a}\n    mode: shadow", "5:19:", "unclosed quote"),
        ("    count_denied: yes", "5:19:", "YAML 1.2 has no yes, no, on or off"),
        ("    count_denied: On", "5:19:", "YAML 1.2 has no yes, no, on or off"),
    ] {
        let text = format!("policies:\n  - name: a\n    limit: 10\n    window: 60s\n{rest}\n");
        // The ends of lines do not matter, nor does a byte order mark.
        for text in [text.clone(), text.replace('\n', "\r\n"), format!("\u{feff}{text}")] {
            compare(&text, place, message);
        }
    }
    for (text, place, message) in [
        ("policies:\n\t- name: a\n", "2:1:", "a tab in the indentation: use spaces"),
        ("policies:\n  - name:a\n    limit: 5\n", "2:5:", "a space is missing after the colon"),
        (
            "policies:\n  - name: a\n  limit: 5\n  window: 60s\n",
            "3:3:",
            "the indentation does not fit the lines above: fields of one level start in the same",
        ),
        ("listen\n", "1:1:", "a colon is missing after this name"),
        ("auth:\n\tapi_token: S3CR3T\n", "2:1:", "a tab in the indentation"),
        ("auth:\n  api_token:S3CR3T\n", "2:3:", "a space is missing after the colon"),
        ("auth:\n  api_token: *S3CR3T\n", "2:14:", "a text that starts with * must be in quotes"),
        ("auth:\n  api_token: @S3CR3T\n", "2:14:", "a text that starts with @ must be in quotes"),
        ("auth:\n  api_token: 'S3CR3T\nlisten: {}\n", "2:14:", "this quote is not closed"),
    ] {
        compare(text, place, message);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    let valid = "\u{feff}policies:\r\n  - {name: a, limit: 10, window: 60s}\r\n";
    assert!(Config::parse("windows.yaml", valid).is_ok());
}

#[test]
fn flag_with_a_server_keeps_the_other_settings_of_the_store() {
    for text in [
        "store: {prefix: api, timeout: 50ms}\n",
        "store: {prefix: api, timeout: 50ms, redis: 'redis://h'}\n",
    ] {
        let store = Config::parse("tidegate.yaml", text).expect("valid").store;
        let StoreConfig::Redis(redis) = store.with_redis("redis://other") else { panic!("Redis") };
        assert_eq!((redis.prefix(), redis.timeout().as_millis()), ("api", 50), "{text}");
    }
}

#[test]
fn empty_files_are_rejected() {
    for text in [
        "",
        "\n",
        "# only a comment\n",
        "null\n",
        "~",
        "{}\n",
        "---\n",
        "---\n{}\n...\n",
        "{} # none\n",
    ] {
        assert!(
            error(text).starts_with("tidegate.yaml: is empty: `tidegate config sample`"),
            "{text}"
        );
    }
}

#[test]
fn schema_lists_names_and_bounds() {
    let schema = serde_json::to_value(Config::schema()).expect("JSON");
    let policy = &schema["$defs"]["Policy"]["properties"];
    for (field, name) in [
        ("algorithm", "leaky-bucket"),
        ("mode", "shadow"),
        ("missing_key", "deny"),
        ("on_store_failure", "local"),
        ("encoding", "packed"),
    ] {
        let names = policy[field]["enum"]
            .as_array()
            .unwrap_or_else(|| panic!("{field} has no names: {policy}"));
        assert!(names.iter().any(|known| known == name), "{names:?}");
    }
    assert_eq!(policy["limit"]["minimum"], 1);
    let attributes = &schema["properties"]["attributes"];
    assert_eq!(attributes["items"]["minLength"], 1, "{attributes}");
    assert_eq!(schema["$defs"]["ClientIp"]["properties"]["ipv6_prefix"]["maximum"], 128);
}

#[test]
fn blocks_apply_to_overrides_and_wrong_ones_are_named() {
    let text = |block_for: &str| {
        format!(
            "policies:\n  - name: login\n    key: [ip]\n    limit: 5\n    window: 60s\n    \
             overrides: [{{key: 192.0.2.1, limit: 50}}]\n    block_for: {block_for}\n"
        )
    };
    let config = Config::parse("tidegate.yaml", &text("[1m, 10m, 1h]")).expect("valid");
    let policy = config.policies.get("login").expect("there");
    let lengths = [60, 600, 3_600].map(std::time::Duration::from_secs);
    assert_eq!(policy.quota().block_for(), lengths);
    assert_eq!(policy.quota_for("192.0.2.1").block_for(), lengths);
    for (block_for, column, message) in [
        ("0s", 16, "block 0ns is out of range: it must be from 1ms to 366 days"),
        ("[1m, 0s]", 16, "block 0ns is out of range: it must be from 1ms to 366 days"),
        ("10", 16, "\"10\" is not a duration: write it like 500ms, 60s, 5m, 1h30m or 30d"),
        ("[1m, 10]", 16, "\"10\" is not a duration: write it like 500ms, 60s, 5m, 1h30m or 30d"),
        ("true", 16, "\"true\" is not a duration"),
        ("{a: 1m}", 16, "a text or a list of texts"),
        ("[]", 16, "0 blocks: it must be one, or a list of up to 10"),
        ("[1s,1s,1s,1s,1s,1s,1s,1s,1s,1s,1s]", 16, "11 blocks: it must be one, or a list of up"),
        ("1m\n    count_denied: true", 16, "cannot both count denied requests and block"),
    ] {
        let found = error(&text(block_for));
        let place = format!("tidegate.yaml:7:{column}: ");
        assert!(found.starts_with(&place) && found.contains(message), "{block_for}: {found}");
    }
}

#[test]
fn requests_of_envoy_in_flight_need_an_id() {
    let policies = "policies:\n  - name: exports\n    match: {descriptor.route: export}\n    \
                    algorithm: concurrency\n    limit: 5\n";
    let warnings = |text: &str| Config::parse("a.yaml", text).expect("valid").warnings;
    let found = warnings(policies);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].to_string().contains("set envoy.hold_id"), "{found:?}");
    assert!(warnings(&format!("envoy: {{hold_id: id}}\n{policies}")).is_empty());
}

/// Returns the policy of a file with this window and these further lines.
fn with_window(window: &str, rest: &str) -> String {
    format!(
        "policies:\n  - name: a\n    limit: 10\n    algorithm: fixed-window\n    window: {window}\n\
         {rest}"
    )
}

#[test]
fn calendars_have_specific_errors() {
    for (window, rest, place, message) in [
        ("{calendar: hour}", "", "5:24:", "one of day, week, month, quarter, year"),
        ("{calendar: month, timezone: Berlin}", "", "5:41:", "unknown timezone \"Berlin\""),
        ("{calendar: month, anchor: 32}", "", "5:39:", "must be from 1 to 31"),
        ("{calendar: month, anchor: monday}", "", "5:39:", "must be from 1 to 31"),
        ("{calendar: week, anchor: 1}", "", "5:38:", "one of monday, tuesday"),
        ("{calendar: day, anchor: 1}", "", "5:37:", "leave it out"),
        ("{calendar: day, anchor: {attribute: header.x}}", "", "5:37:", "leave it out"),
        ("{calendar: month, anchor: {attribute: path}}", "", "2:11:", "path"),
        ("{calendar: month, anchor: {attribute: plan}}", "", "5:51:", "unknown attribute \"plan\""),
        ("{timezone: UTC}", "", "5:14:", "missing field `calendar`"),
        ("{calendar: month, zone: UTC}", "", "5:", "unknown field `zone`"),
        ("[month]", "", "5:5:", "a duration such as 60s, or {calendar: month"),
        (
            "{calendar: month, anchor: {attribute: header.x}}",
            "    key: ip\n    overrides: [{key: 192.0.2.1, limit: 1}]\n",
            "7:23:",
            "the anchor of an override is a day",
        ),
    ] {
        let found = error(&with_window(window, rest));
        assert!(
            found.starts_with(&format!("tidegate.yaml:{place}")) && found.contains(message),
            "{window}\n{found}"
        );
    }
    let found = error("policies:\n  - {name: a, limit: 1, window: {calendar: month}}\n");
    assert!(found.contains("sliding-log has no calendar"), "{found}");
}

#[test]
fn the_anchor_is_that_of_the_request_or_of_the_override() {
    let window = "{calendar: month, timezone: Europe/Berlin, anchor: {attribute: header.x-day}}";
    let overrides = "    key: header.x-user\n    overrides:\n      - key: acme\n        limit: 5\n        \
                     window: {calendar: month, anchor: 20}\n";
    let config = Config::parse("a.yaml", &with_window(window, overrides)).expect("valid");
    let policy = config.policies.get("a").expect("the policy");
    assert_eq!(policy.anchor_attribute(), Some("header.x-day"));
    assert!(policy.limits().is_none());
    for (user, day, calendar) in [
        ("ann", Some("31"), "month from day 31, Europe/Berlin"),
        ("ann", Some("monday"), "month, Europe/Berlin"),
        ("ann", None, "month, Europe/Berlin"),
        ("acme", Some("31"), "month from day 20, UTC"),
    ] {
        let mut request = BTreeMap::from([("header.x-user".to_owned(), user.to_owned())]);
        request.extend(day.map(|day| ("header.x-day".to_owned(), day.to_owned())));
        let selected = policy.select(&request, None).expect("selected");
        let quota = selected.charges[0].quota();
        let found = quota.and_then(tidegate::Quota::calendar).expect("a calendar").to_string();
        assert_eq!(found, calendar, "{user} {day:?}");
    }
}

#[test]
fn windows_of_a_day_or_more_in_memory_are_warned_about() {
    let warnings = |text: &str| {
        let config = Config::parse("a.yaml", text).expect("valid");
        config.warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let text = with_window("{calendar: month}", "");
    let found = warnings(&text);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("a.yaml:2: policy \"a\": its counts of 31d end"), "{found:?}");
    assert!(warnings(&format!("store: {{redis: 'redis://h'}}\n{text}")).is_empty());
    assert!(warnings(&with_window("23h", "")).is_empty());
}
