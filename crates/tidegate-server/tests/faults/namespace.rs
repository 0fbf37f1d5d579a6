use std::process::Command;

/// Network namespace behind a veth pair, whose packets can be dropped. Needs root.
pub(crate) struct NetworkNamespace {
    pub(crate) namespace: String,
    /// Address inside the namespace.
    pub(crate) inside: String,
    cable: String,
    far_end: String,
}

impl NetworkNamespace {
    pub(crate) fn new() -> Self {
        let id = std::process::id();
        let net = format!("10.213.{}", id % 250);
        let this = Self {
            namespace: format!("tidegate-{id}"),
            inside: format!("{net}.2"),
            cable: format!("tga{id}"),
            far_end: format!("tgb{id}"),
        };
        let Self { namespace, inside, cable, far_end } = &this;
        ip(&["netns", "add", namespace]);
        ip(&["link", "add", cable, "type", "veth", "peer", "name", far_end, "netns", namespace]);
        ip(&["addr", "add", &format!("{net}.1/30"), "dev", cable]);
        ip(&["-n", namespace, "addr", "add", &format!("{inside}/30"), "dev", far_end]);
        ip(&["link", "set", cable, "up"]);
        ip(&["-n", namespace, "link", "set", far_end, "up"]);
        // Both ends have static ARP entries. Otherwise a lost ARP reply would report the host as
        // unreachable within seconds, unlike a real black hole.
        let (near, far) = (hardware(&[], cable), hardware(&["-n", namespace], far_end));
        let forever = |address: &str, hardware: &str, device: &str| {
            ["neigh", "replace", address, "lladdr", hardware, "nud", "permanent", "dev", device]
                .map(str::to_owned)
        };
        ip(&forever(inside, &far, cable).each_ref().map(String::as_str));
        let there = forever(&format!("{net}.1"), &near, far_end);
        let there: Vec<&str> =
            ["-n", namespace].into_iter().chain(there.iter().map(String::as_str)).collect();
        ip(&there);
        this
    }

    /// Drops every packet in both directions, with a queue of length zero.
    pub(crate) fn drop_packets(&self) {
        run("tc", &["qdisc", "replace", "dev", &self.cable, "root", "pfifo", "limit", "0"]);
        run(
            "tc",
            &[
                "-n",
                &self.namespace,
                "qdisc",
                "replace",
                "dev",
                &self.far_end,
                "root",
                "pfifo",
                "limit",
                "0",
            ],
        );
    }

    pub(crate) fn deliver_packets(&self) {
        run("tc", &["qdisc", "del", "dev", &self.cable, "root"]);
        run("tc", &["-n", &self.namespace, "qdisc", "del", "dev", &self.far_end, "root"]);
    }
}

impl Drop for NetworkNamespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.cable]).status();
        let _ = Command::new("ip").args(["netns", "del", &self.namespace]).status();
    }
}

/// Returns the hardware address of a device.
fn hardware(prefix: &[&str], device: &str) -> String {
    let words: Vec<&str> = prefix.iter().copied().chain(["-br", "link", "show", device]).collect();
    let text = run("ip", &words);
    text.split_whitespace().nth(2).expect("name, state, address").to_owned()
}

fn ip(words: &[&str]) {
    run("ip", words);
}

fn run(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output();
    let output = output
        .unwrap_or_else(|error| panic!("{program} ({error}): install iproute2 with `make setup`"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{program} {words:?}: {errors} (a network namespace needs root)"
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}
