// Real processes for the tests of the dashboard: tidegate, redis-server, Chromium, and load. All on
// loopback, each ended by its id.

import {execFileSync, spawn} from 'node:child_process';
import {once} from 'node:events';
import {mkdtempSync, rmSync, writeFileSync} from 'node:fs';
import http from 'node:http';
import {createRequire} from 'node:module';
import net from 'node:net';
import {tmpdir} from 'node:os';
import {dirname, join} from 'node:path';

const require = createRequire(new URL('../../../tidegate-service/dashboard/package.json', import.meta.url));
const {chromium} = require('playwright-core');
export const axeSource = require('axe-core').source;

/** Time after which a condition is considered to fail. */
export const TIMEOUT_MS = 30_000;

/** Waits until a function returns something other than false, null or undefined. */
export async function until(what, happened) {
  const deadline = Date.now() + TIMEOUT_MS;
  for (;;) {
    const result = await happened();
    if (result !== false && result !== null && result !== undefined) return result;
    if (Date.now() > deadline) throw new Error(`timeout while waiting until ${what}`);
    await new Promise((next) => setTimeout(next, 20));
  }
}

const running = new Set();

/** Starts a process, which `endAll` ends if the test does not. */
function start(program, args, options) {
  const process = spawn(program, args, options);
  running.add(process);
  process.once('exit', () => running.delete(process));
  return process;
}

export async function endAll() {
  await Promise.all(Array.from(running, end));
}

async function end(process) {
  if (process.exitCode !== null || process.signalCode !== null) return;
  const exited = once(process, 'exit');
  process.kill('SIGKILL');
  await exited;
}

export class Tidegate {
  constructor(config, listen = {}) {
    this.folder = mkdtempSync(join(tmpdir(), 'tidegate-dashboard-'));
    this.file = join(this.folder, 'tidegate.yaml');
    this.listen = {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0', ...listen};
    this.write(config);
  }

  /** Writes the configuration; a running service loads it. */
  write(config) {
    const listen = Object.entries(this.listen).map(([name, address]) => `${name}: '${address}'`);
    writeFileSync(this.file, `listen: {${listen.join(', ')}}\n${config}`);
  }

  async start() {
    const binary = globalThis.process.env.TIDEGATE;
    const process = start(binary, ['serve', '--config', this.file], {
      env: {},
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    this.process = process;
    this.output = '';
    for (const stream of [process.stdout, process.stderr]) {
      stream.on('data', (bytes) => (this.output += bytes));
    }
    await until('tidegate listens', () => {
      if (process.exitCode !== null) throw new Error(`tidegate ended:\n${this.output}`);
      return /listening.*\n/.test(this.output);
    });
    const [, line] = this.output.split('listening');
    for (const name of ['http', 'admin']) {
      this.listen[name] = line.match(new RegExp(` ${name}=(\\S+)`))[1];
    }
    this.url = `http://${this.listen.admin}/`;
    return this;
  }

  async stop() {
    await end(this.process);
  }

  async remove() {
    await this.stop();
    rmSync(this.folder, {recursive: true, force: true});
  }

  post(path, body, address = this.listen.http, headers = {}) {
    return new Promise((resolve, reject) => {
      const [host, port] = address.split(':');
      const request = http.request(
        {host, port, path, method: 'POST', agent,
          headers: {'content-type': 'application/json', ...headers}},
        (response) => {
          let text = '';
          response.on('data', (bytes) => (text += bytes));
          response.on('end', () => resolve({status: response.statusCode, text}));
        },
      );
      request.on('error', reject);
      request.setTimeout(TIMEOUT_MS, () => request.destroy());
      request.end(JSON.stringify(body));
    });
  }
}

const agent = new http.Agent({keepAlive: true});

/** Sends requests one after the other, until it is stopped. */
export class Load {
  constructor(service, query) {
    this.isRunning = true;
    this.done = (async () => {
      while (this.isRunning) {
        // The server may be down: that is what some tests are about.
        await service.post('/v1/acquire', query).catch(() => {});
        await new Promise((next) => setTimeout(next, 5));
      }
    })();
  }

  async stop() {
    this.isRunning = false;
    await this.done;
  }
}

/** Runs a command of the page in a folder with these files, and returns its output. */
export function runInShell(command, files) {
  const folder = mkdtempSync(join(tmpdir(), 'tidegate-dashboard-'));
  try {
    for (const [name, text] of Object.entries(files)) writeFileSync(join(folder, name), text);
    const env = {PATH: `${dirname(process.env.TIDEGATE)}:${process.env.PATH}`};
    return execFileSync('sh', ['-c', command], {cwd: folder, env, encoding: 'utf8'});
  } finally {
    rmSync(folder, {recursive: true, force: true});
  }
}

export async function freePort() {
  const server = net.createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const {port} = server.address();
  server.close();
  await once(server, 'close');
  return port;
}

export class Redis {
  async start(port) {
    this.port = port ?? (await freePort());
    this.process = start('redis-server', [
      '--port', String(this.port), '--bind', '127.0.0.1', '--save', '', '--appendonly', 'no',
    ], {stdio: 'ignore', cwd: tmpdir()});
    await until('Redis listens', () => new Promise((resolve) => {
      const socket = net.connect(this.port, '127.0.0.1');
      socket.on('connect', () => { socket.destroy(); resolve(true); });
      socket.on('error', () => resolve(false));
    }));
    return this;
  }

  async stop() {
    await end(this.process);
  }
}

export function launch() {
  return chromium.launch({
    executablePath: '/usr/bin/chromium',
    args: ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
      '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
}

/** Page that records errors of the console, dialogs, and requests to other hosts. */
export async function open(browser, url, options = {}) {
  const context = await browser.newContext({viewport: {width: 1280, height: 900}, ...options});
  context.setDefaultTimeout(TIMEOUT_MS);
  const page = await context.newPage();
  page.problems = [];
  const origin = new URL(url).origin;
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type())) page.problems.push(message.text());
  });
  page.on('pageerror', (error) => page.problems.push(String(error)));
  page.on('dialog', (dialog) => {
    page.problems.push(`dialog: ${dialog.message()}`);
    void dialog.dismiss();
  });
  page.on('request', (request) => {
    const target = new URL(request.url());
    if (target.protocol !== 'data:' && target.origin !== origin) {
      page.problems.push(`request to ${target.href}`);
    }
  });
  await page.goto(url);
  return page;
}

/** Serious findings of axe-core. */
export async function accessibilityFindings(page) {
  await page.evaluate(axeSource);
  const {violations} = await page.evaluate(() => globalThis.axe.run());
  return violations
    .filter(({impact}) => ['serious', 'critical'].includes(impact))
    .map(({id, nodes}) => `${id}: ${nodes.map(({html}) => html.slice(0, 200)).join(' | ')}`);
}
