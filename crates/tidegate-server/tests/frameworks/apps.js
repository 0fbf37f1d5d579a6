// Applications that answer with what their framework read from the request. Run as
// `node apps.js FRAMEWORK`. Prints its port, and exits when its standard input ends.
"use strict";

/** What the application would identify the client and the resource by. */
function seen(route, request) {
  const authorization = request.headers.authorization ?? "";
  const bearer = /^Bearer\s+(.+)$/i.exec(authorization);
  const basic = /^Basic\s+(.+)$/i.exec(authorization);
  const text = (value) => (value === undefined ? null : String(value));
  return {
    route,
    cookie: text(request.cookies.session_id),
    header: text(request.headers["x-user-id"]),
    query: text(request.query.api_key),
    token: bearer ? bearer[1].trim() : null,
    basic: basic ? Buffer.from(basic[1], "base64").toString("latin1") : null,
  };
}

function ready(error, port) {
  if (error) throw error;
  console.log(port);
}

function express(module) {
  return () => {
    const app = require(module)();
    app.use(require("cookie-parser")());
    app.get("/limited/x", (request, response) => response.json(seen("limited", request)));
    app.use((request, response) => response.json(seen("other", request)));
    const server = app.listen(0, "127.0.0.1", (error) => ready(error, server.address().port));
  };
}

const apps = {
  "express 5": express("express"),
  "express 4": express("express4"),

  fastify() {
    const app = require("fastify")();
    app.register(require("@fastify/cookie"));
    app.get("/limited/x", (request, reply) => reply.send(seen("limited", request)));
    app.get("/*", (request, reply) => reply.send(seen("other", request)));
    app.listen({ host: "127.0.0.1", port: 0 }, (error) => ready(error, app.server.address().port));
  },
};

apps[process.argv[2]]();
process.stdin.resume();
process.stdin.on("end", () => process.exit(0));
