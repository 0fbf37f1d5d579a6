// The scenario of the test for Node.js: scenario.js PORT PROTOCOL
//
// ioredis speaks RESP2, so RESP3 is tested with node-redis.
const assert = require("node:assert/strict");

const [port, protocol] = process.argv.slice(2).map(Number);

/** Connects with one of the clients, behind the same functions. */
async function connect(password, name) {
  if (protocol === 2) {
    const Redis = require("ioredis");
    const options = { port, password, connectionName: name, connectTimeout: 20000 };
    const client = new Redis({ ...options, ...(password ? {} : { retryStrategy: null }) });
    client.on("error", () => {});
    return {
      call: (...words) => client.call(...words),
      pipeline: async (commands) => {
        const pipeline = client.pipeline();
        commands.forEach((words) => pipeline.call(...words));
        return (await pipeline.exec()).map(([error, reply]) => {
          assert.equal(error, null);
          return reply;
        });
      },
      reconnect: async () => client.disconnect(true),
      close: () => (password ? client.quit() : client.disconnect()),
    };
  }
  const { createClient } = require("redis");
  const reconnectStrategy = password ? 50 : false;
  const socket = { port, reconnectStrategy };
  const client = createClient({ RESP: 3, socket, password, name });
  client.on("error", () => {});
  await client.connect();
  return {
    call: (...words) => client.sendCommand(words.map(String)),
    pipeline: (commands) => {
      const pipeline = client.multi();
      commands.forEach((words) => pipeline.addCommand(words));
      return pipeline.execAsPipeline();
    },
    reconnect: async () => {
      client.destroy();
      await client.connect();
    },
    close: () => client.close(),
  };
}

function numbers(reply) {
  assert.equal(Array.isArray(reply), protocol === 2);
  return protocol === 2 ? reply : Object.values(reply);
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
  const ask = async (...words) => numbers(await client.call(...words));
  assert.deepEqual((await ask("TG.ACQUIRE", "per-user", "ann")).slice(0, 3), [1, 3, 2]);
  assert.deepEqual((await ask("TG.PEEK", "per-user", "ann")).slice(0, 3), [1, 3, 1]);
  const refund = await ask("TG.REFUND", "per-user", "ann", "AGE", "9000");
  assert.deepEqual(refund.slice(0, 3), [1, 3, 3]);
  const report = await ask("TG.REPORT", "per-user", "ann", "COST", "9");
  assert.deepEqual(report.slice(0, 3), [0, 3, 0]);
  const denied = await ask("TG.ACQUIRE", "per-user", "ann");
  assert.ok(denied[0] === 0 && denied[3] > 0);
  assert.deepEqual((await ask("TG.RESET", "per-user", "ann")).slice(0, 3), [1, 3, 3]);
  assert.deepEqual(await client.call("CL.THROTTLE", "u", 1, 1, 3600), [0, 2, 1, -1, 3600]);
  assert.deepEqual(await client.call("THROTTLE", "w", 1, 1, 3600), [1, 1, 0, 3600, 0]);
  await assert.rejects(client.call("TG.ACQUIRE", "per-usr", "ann"), /per-user/);

  const commands = Array.from({ length: 1000 }, () => ["TG.ACQUIRE", "wide", "pipeline"]);
  const replies = (await client.pipeline(commands)).map(numbers);
  assert.equal(replies.length, 1000);
  let left = Infinity;
  for (const reply of replies) {
    assert.ok(reply[0] === 1 && reply[2] <= left);
    left = reply[2];
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
