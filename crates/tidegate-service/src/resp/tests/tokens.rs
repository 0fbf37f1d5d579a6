//! Tokens and their scopes.

use super::*;

#[test]
fn tokens_are_passwords() {
    let config = format!("{TOKENS}{POLICIES}");
    let mut client = Conversation::new(&config);
    for line in ["PING", "TG.ACQUIRE per-user ann", "TG.RESET per-user ann", "HELLO 3", "INFO"] {
        let reply = client.ask(line);
        assert!(reply.starts_with("-NOAUTH") && reply.contains("auth.api_token"), "{reply}");
    }
    for line in [
        "AUTH wrong",
        "AUTH admin secret",
        "AUTH other secret",
        "AUTH ci reads",
        "HELLO 3 AUTH default wrong",
        "AUTH \"\"",
    ] {
        let mut client = Conversation::new(&config);
        assert!(client.ask(line).starts_with("-WRONGPASS"), "{line}");
        assert!(client.ask("PING").starts_with("-NOAUTH"), "a wrong token gives no access");
    }
    assert!(client.ask("HELLO 3 AUTH default secret SETNAME me").starts_with("%7"));
    assert!(client.ask("TG.ACQUIRE per-user ann").starts_with("*6"));
    let denied = client.ask("TG.RESET per-user ann");
    assert!(denied.starts_with("-NOPERM") && denied.contains("lacks the scope reset"), "{denied}");
    for line in ["AUTH root", "AUTH admin root", "AUTH admin_token root", "AUTH default root"] {
        assert_eq!(client.ask("RESET"), "+RESET");
        assert!(client.ask("TG.RESET per-user ann").starts_with("-NOAUTH"));
        assert_eq!(client.ask(line), "+OK");
        assert!(client.ask("TG.RESET per-user ann").starts_with("*6 :1"));
    }
    assert!(client.ask("TG.ACQUIRE per-user ann").starts_with("*6 :1"), "it has all scopes");
    assert_eq!(client.ask("RESET"), "+RESET");
    assert_eq!(client.ask("AUTH secret"), "+OK");
    assert!(client.ask("TG.RESET per-user ann").starts_with("-NOPERM"));
}

#[test]
fn token_permits_the_commands_of_its_scopes() {
    let mut client = Conversation::new(&format!("{TOKENS}{POLICIES}"));
    let commands = [
        "TG.ACQUIRE per-user ann",
        "TG.REPORT per-user ann",
        "CL.THROTTLE ann 1 1 60",
        "TG.PEEK per-user ann",
        "TG.REFUND per-user ann AGE 5",
        "TG.RESET per-user ann",
        "TG.RESERVE per-user ann",
        "TG.COMMIT per-user ann a 0",
        "TG.RENEW per-user ann a 5000",
    ];
    for (auth, permitted) in [
        ("AUTH ci refunds", [false, false, false, false, true, false, false, false, false]),
        ("AUTH reads", [false, false, false, true, false, false, false, false, false]),
        ("AUTH api_token secret", [true, true, true, true, true, false, true, true, true]),
        ("AUTH root", [true; 9]),
    ] {
        assert_eq!(client.ask(auth), "+OK");
        assert_eq!(client.ask("PING"), "+PONG");
        for (command, permitted) in commands.into_iter().zip(permitted) {
            let reply = client.ask(command);
            assert_eq!(!reply.starts_with("-NOPERM"), permitted, "{auth}: {command}: {reply}");
        }
    }
    assert!(client.ask("CLIENT INFO").contains(" user=admin_token "));
}

#[test]
fn third_wrong_token_closes_the_connection() {
    let wrong = "-WRONGPASS";
    for attempts in [
        ["AUTH a", "HELLO 3 AUTH default b", "AUTH ci c"].as_slice(),
        ["AUTH a", "AUTH root", "RESET", "AUTH b", "AUTH c"].as_slice(),
        // A transaction runs no further command after it, either.
        ["AUTH root", "MULTI", "AUTH a", "AUTH b", "AUTH c", "PING", "EXEC"].as_slice(),
    ] {
        let mut client = Conversation::new(&format!("{TOKENS}{POLICIES}"));
        let mut input = input();
        input.push(format!("{}\r\nPING\r\n", attempts.join("\r\n")).as_bytes());
        let mut replies = Vec::new();
        let step = loop {
            match client.step(&mut input, &mut replies) {
                SessionStep::Flush => {}
                step => break step,
            }
        };
        let replies = String::from_utf8(replies).expect("text");
        assert_eq!(step, SessionStep::Close, "{replies}");
        assert_eq!(replies.matches(wrong).count(), 3, "{replies}");
        assert!(!replies.contains("PONG") && replies.ends_with("auth.tokens\r\n"), "{replies}");
        let failures = client.session.auth_failures().counts();
        assert!(failures.eq([("http", 0), ("grpc", 0), ("admin", 0), ("resp", 3)]));
    }
}

#[test]
fn reset_beyond_loopback_needs_its_scope() {
    let config = format!("auth: {{api_token: secret}}\n{POLICIES}");
    for (is_remote, reply) in [(false, "*6 :1"), (true, "-NOPERM")] {
        let mut client = Conversation::start(&config, &BufferBudget::new(1 << 20), is_remote);
        assert_eq!(client.ask("AUTH secret"), "+OK");
        assert!(client.ask("TG.RESET per-user ann").starts_with(reply), "{is_remote}");
        assert!(client.ask("TG.ACQUIRE per-user ann").starts_with("*6 :1"));
    }
}
