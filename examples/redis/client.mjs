import Redis from "ioredis";

// Without retries: a repeated command is charged again.
const options = { commandTimeout: 500, maxRetriesPerRequest: 0 };
const tidegate = new Redis("redis://127.0.0.1:8083", options);

const [allowed, limit, remaining, retryAfterMs] = await tidegate.call(
  "TG.ACQUIRE", "per-user", "user123",
);
console.log(allowed ? `allowed, ${remaining} left` : `denied, retry in ${retryAfterMs} ms`);

const pipeline = tidegate.pipeline();
for (const user of ["ann", "bob", "eve"]) pipeline.call("TG.ACQUIRE", "per-user", user);
console.log((await pipeline.exec()).map(([error, decision]) => error ?? decision[2]));

await tidegate.quit();
