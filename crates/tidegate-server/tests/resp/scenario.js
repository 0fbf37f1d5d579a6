// The scenario of the tests for Node.js: scenario.js PORT CLIENT [PROTOCOL]
//
// CLIENT is ioredis, iovalkey or redis. Without a protocol, the client chooses one.
const assert = require("node:assert/strict");

const [name, protocol] = process.argv.slice(3);
const port = Number(process.argv[2]);

/** Connects with one of the clients, behind the same functions. */
async function connect(password, connectionName) {
  if (name !== "redis") {
    const Redis = require(name);
    const options = { port, password, connectionName, connectTimeout: 20000 };
    if (protocol) options.protocol = Number(protocol);
    const client = new Redis({ ...options, ...(password ? {} : { retryStrategy: null }) });
    client.on("error", () => {});
    const run = async (pipeline, commands) => {
      commands.forEach((words) => pipeline.call(...words));
      return (await pipeline.exec()).map(([error, reply]) => {
        assert.equal(error, null);
        return reply;
      });
    };
    return {
      call: (...words) => client.call(...words),
      pipeline: (commands) => run(client.pipeline(), commands),
      transaction: (commands) => run(client.multi(), commands),
      reconnect: async () => client.disconnect(true),
      close: () => (password ? client.quit() : client.disconnect()),
    };
  }
  const { createClient } = require("redis");
  const reconnectStrategy = password ? 50 : false;
  const socket = { port, reconnectStrategy };
  const options = protocol ? { RESP: Number(protocol) } : {};
  const client = createClient({ ...options, socket, password, name: connectionName });
  client.on("error", () => {});
  await client.connect();
  const queue = (commands) =>
    commands.reduce((multi, words) => multi.addCommand(words), client.multi());
  return {
    call: (...words) => client.sendCommand(words.map(String)),
    pipeline: (commands) => queue(commands).execAsPipeline(),
    transaction: (commands) => queue(commands).exec(),
    reconnect: async () => {
      client.destroy();
      await client.connect();
    },
    close: () => client.close(),
  };
}

/** Returns the field of a reply with names: a map, an object, or a flat array. */
function field(reply, name) {
  if (Array.isArray(reply)) return reply[reply.indexOf(name) + 1];
  return reply instanceof Map ? reply.get(name) : reply[name];
}

async function main() {
  await assert.rejects(async () => {
    const stranger = await connect(undefined, undefined);
    try {
      await stranger.call("PING");
    } finally {
      stranger.close();
    }
  }, /NOAUTH/);

  const client = await connect("secret", "scenario");
  assert.equal(await client.call("PING"), "PONG");
  assert.equal(await client.call("CLIENT", "GETNAME"), "scenario");
  const ask = (...words) => client.call(...words);
  assert.deepEqual((await ask("TG.ACQUIRE", "per-user", "ann")).slice(0, 3), [1, 3, 2]);
  assert.deepEqual((await ask("TG.PEEK", "per-user", "ann")).slice(0, 3), [1, 3, 1]);
  const refund = await ask("TG.REFUND", "per-user", "ann", "AGE", "9000");
  assert.deepEqual(refund.slice(0, 3), [1, 3, 3]);
  const named = await ask("TG.PEEK", "per-user", "ann", "WITHNAMES");
  assert.equal(field(named, "remaining"), 2);
  const report = await ask("TG.REPORT", "per-user", "ann", "COST", "9");
  assert.deepEqual(report.slice(0, 3), [0, 3, 0]);
  const denied = await ask("TG.ACQUIRE", "per-user", "ann");
  assert.ok(denied[0] === 0 && denied[3] > 0);
  assert.deepEqual((await ask("TG.RESET", "per-user", "ann")).slice(0, 3), [1, 3, 3]);
  assert.deepEqual(await client.call("CL.THROTTLE", "u", 1, 1, 3600), [0, 2, 1, -1, 3600]);
  assert.deepEqual(await client.call("THROTTLE", "w", 1, 1, 3600), [1, 1, 0, 3600, 0]);
  await assert.rejects(client.call("TG.ACQUIRE", "per-usr", "ann"), /per-user/);

  for (const kind of ["pipeline", "transaction"]) {
    const commands = Array.from({ length: 1000 }, () => ["TG.ACQUIRE", "wide", kind]);
    const replies = await client[kind](commands);
    assert.equal(replies.length, 1000);
    let left = Infinity;
    for (const reply of replies) {
      assert.ok(reply[0] === 1 && reply[2] <= left);
      left = reply[2];
    }
    assert.equal(left, 1_000_000 - 1000);
  }

  // Reconnects: the connection is closed in between.
  for (let round = 0; round < 20; round++) {
    await client.reconnect();
    assert.equal((await ask("TG.ACQUIRE", "wide", "reconnect"))[0], 1);
  }
  await client.close();
  console.log("ok");
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
