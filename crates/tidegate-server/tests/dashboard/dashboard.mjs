// What a user sees and does on the dashboard, in Chromium, with the real binary.

import assert from 'node:assert/strict';
import http from 'node:http';
import {once} from 'node:events';
import {after, before, describe, test} from 'node:test';
import {
  accessibilityFindings, endAll, launch, Load, open, Redis, runInShell, Tidegate, TIMEOUT_MS,
  until,
} from './harness.mjs';

const POLICIES = `policies:
  - {name: per-user, key: [header.x-user-id], missing_key: skip, limit: 3, window: 1h,
     overrides: [{key: acme, limit: 1000}]}
  - {name: search, match: {path: /search/**}, key: [ip], limit: 1, window: 1h, mode: shadow}
`;
const options = {timeout: 4 * TIMEOUT_MS};
const SCREENSHOTS = process.env.SCREENSHOTS;

let browser;
let service;

before(async () => {
  browser = await launch();
  service = await new Tidegate(POLICIES).start();
}, options);

after(async () => {
  await browser?.close();
  await service?.remove();
  // Those of tests that failed at their start.
  await endAll();
}, options);

async function screenshot(page, name) {
  if (SCREENSHOTS) await page.screenshot({path: `${SCREENSHOTS}/${name}.png`, fullPage: true});
}

const byPolicy = (page, name) => page.locator('#policies tr', {hasText: name});
const finding = (page, text) => page.locator('#findings li', {hasText: text});

async function close(page) {
  assert.deepEqual(page.problems, []);
  await page.context().close();
}

async function peek(key) {
  const {text} = await service.post('/v1/peek', {policy: 'per-user', key});
  return JSON.parse(text);
}

// Most of the time is spent waiting for events, so the tests with a server of their own run beside
// those that share one.
describe('dashboard', {concurrency: true}, () => {
  describe('of one server', {concurrency: 1}, () => {
    test('numbers move, and a hot key is found, looked up and reset', options, async () => {
      const page = await open(browser, service.url);
      await finding(page, 'No requests').waitFor();
      const unmatched = byPolicy(page, 'per-user').getByText('no request has matched it');
      await unmatched.waitFor();
      const loads = [
        new Load(service, {policy: 'per-user', key: 'mallory'}),
        new Load(service, {policy: 'per-user', key: 'acme'}),
        new Load(service, {attributes: {path: '/search/x', ip: '192.0.2.7'}}),
      ];
      try {
        await finding(page, /Denying [\d.]+\/s.*per-user/).waitFor();
        await finding(page, /Shadow mode.*search/).waitFor();
        for (const name of ['allowed', 'denied', 'shadow']) {
          await until(`${name}/s moves`, async () =>
            Number((await page.textContent(`#value-${name}`)).replace(',', '')) > 0);
        }
        const cells = byPolicy(page, 'per-user').locator('td');
        await until('the policy has its rate', async () =>
          Number(await cells.nth(1).textContent()) > 0);
        await unmatched.waitFor({state: 'detached'});
        await page.locator('#chart-policies', {hasText: 'per-user'}).waitFor();
        await until('a latency is shown', async () =>
          /\d (µs|ms)$/.test(await page.textContent('#value-p99')));
        await until('decisions have their source', async () =>
          /store\s*[1-9]/.test(await page.textContent('#chart-sources tbody')));
        const hot = page.locator('section.denied tr', {hasText: 'mallory'});
        await hot.locator('td', {hasText: 'per-user'}).waitFor();
        await page.locator('section.shadow_denied tr', {hasText: '192.0.2.7'}).waitFor();
        await page.locator('section.allowed tr', {hasText: 'acme'}).waitFor();
        await screenshot(page, 'load');
        await loads[0].stop();

        await hot.getByRole('button', {name: 'Look up mallory'}).click();
        await page.getByText('“mallory” is denied by per-user.').waitFor();
        assert.equal(new URL(page.url()).hash, '#lookup=mallory');
        const result = page.locator('#lookup-results tbody tr', {hasText: 'per-user'});
        assert.match(await result.textContent(), /3 per 1 h.*denied.*0 of 3.*in (1 h|\d+ min)/);
        await screenshot(page, 'lookup');

        // The first answer is "Cancel", also by the keyboard.
        const reset = result.getByRole('button', {name: 'Reset in per-user'});
        await reset.click();
        await page.getByRole('dialog', {name: 'Reset this key?'}).waitFor();
        assert.deepEqual(await accessibilityFindings(page), []);
        await screenshot(page, 'confirm');
        await page.keyboard.press('Escape');
        await page.getByRole('dialog').waitFor({state: 'hidden'});
        await page.keyboard.press('Enter');
        await page.getByRole('dialog').waitFor();
        await page.keyboard.press('Enter');
        await page.getByRole('dialog').waitFor({state: 'hidden'});
        assert.equal((await peek('mallory')).allowed, false, 'neither of them resets');

        await reset.click();
        await page.getByRole('button', {name: 'Reset', exact: true}).click();
        await page.getByText('Reset in per-user. “mallory” is not denied by any policy.').waitFor();
        assert.match(await result.textContent(), /allowed.*3 of 3/);
        assert.equal((await peek('mallory')).allowed, true);

        // An override has its own limit.
        await page.fill('#lookup-key', 'acme');
        await page.keyboard.press('Enter');
        await page.locator('#lookup-results', {hasText: '1,000 per 1 h (override)'}).waitFor();
        await page.getByRole('button', {name: 'Close'}).click();
        assert.equal(new URL(page.url()).hash, '');
      } finally {
        await Promise.all(loads.map((load) => load.stop()));
      }
      await close(page);
    });

    test('policies show match, key, limit and overrides', options, async () => {
      const page = await open(browser, `${service.url}#lookup=acme`);
      await page.locator('#lookup-results', {hasText: 'per-user'}).waitFor();
      const row = byPolicy(page, 'per-user');
      await row.getByText('3 per 1 h').waitFor();
      await row.getByText('header.x-user-id').waitFor();
      await row.getByText('1 key').click();
      await row.getByText('acme: 1,000').waitFor();
      await byPolicy(page, 'search').getByText('/search/**').waitFor();
      await byPolicy(page, 'search').getByText('shadow', {exact: true}).waitFor();
      await page.fill('#policy-filter', 'sear');
      await row.waitFor({state: 'detached'});
      const command = await page.textContent('#what-if');
      assert.match(command,
        /^tidegate simulate --access-log access.log --config \S+ --policy per-user --limit 1$/m);
      const log = 'time,path,header.x-user-id\n1,/,ann\n2,/,ann\n3,/,ben\n';
      const simulated = runInShell(command, {'access.log': log});
      assert.match(simulated, /^per-user .* 3 +2 +1 /m, 'half the limit denies one request');
      assert.match(await page.textContent('#instance'), /^\S+:\d+, version \d+\.\d+\.\d+, up \d/);
      await close(page);
    });

    test('failed reload shows its error with file and line', options, async () => {
      const page = await open(browser, service.url);
      await page.getByText('none since the start').waitFor();
      service.write(POLICIES.replace('limit: 1, window', 'limt: 1, window'));
      await finding(page, /Reload failed.*tidegate\.yaml:5:\d+: .*limt/).waitFor();
      await page.locator('#reload-error', {hasText: /tidegate\.yaml:5:\d+: .*limt/}).waitFor();
      await screenshot(page, 'reload');
      assert.deepEqual(await accessibilityFindings(page), []);
      // The policies of before stay active; the corrected file is loaded, and shown at once.
      assert.equal(await page.locator('#policies tbody tr').count(), 2);
      service.write(`${POLICIES}  - {name: third, limit: 9, window: 1s}\n`);
      await page.getByText(/^succeeded,/).waitFor();
      await byPolicy(page, 'third').waitFor();
      await finding(page, 'Reload failed').waitFor({state: 'detached'});
      await close(page);
    });

    test('changes that need a restart are shown until they are undone', options, async () => {
      const page = await open(browser, service.url);
      service.write(`${POLICIES}store: {max_keys: 5}\n`);
      const pending = finding(page, /Restart pending.*Changes in .*store.*restart the service/);
      await pending.waitFor();
      service.write(POLICIES);
      await pending.waitFor({state: 'detached'});
      await close(page);
    });

    test('light, dark and 360 pixels are accessible', options, async () => {
      const page = await open(browser, service.url, {colorScheme: 'light'});
      const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
      await page.locator('#policies tbody tr').first().waitFor();
      await page.locator('#findings li').first().waitFor();
      const light = await background();
      assert.deepEqual(await accessibilityFindings(page), []);
      await page.emulateMedia({colorScheme: 'dark'});
      const dark = await background();
      assert.notEqual(dark, light);
      assert.deepEqual(await accessibilityFindings(page), []);
      await screenshot(page, 'dark');
      // The choice of the user is kept.
      await page.selectOption('#theme', 'light');
      assert.equal(await background(), light);
      await page.reload();
      assert.equal(await background(), light);

      await page.setViewportSize({width: 360, height: 780});
      await page.fill('#lookup-key', 'acme');
      await page.keyboard.press('Enter');
      await page.locator('#lookup-results tbody tr').first().waitFor();
      await page.locator('#policies tbody tr').first().waitFor();
      await until('nothing is wider than the screen', () =>
        page.evaluate(() => document.documentElement.scrollWidth <= 360));
      assert.deepEqual(await accessibilityFindings(page), []);
      await screenshot(page, 'narrow');
      await close(page);
    });

    test('keys of clients are shown as text', options, async () => {
      const key = `<img src=x onerror=alert(1)>\u202e${'long '.repeat(60)}`;
      const page = await open(browser, service.url);
      const load = new Load(service, {policy: 'per-user', key});
      try {
        const hot = page.locator('section.denied tr', {hasText: '<img src=x'});
        await hot.locator('bdi', {hasText: '⟨U+202E⟩'}).waitFor();
        await hot.getByRole('button').click();
        await page.getByText(/^“<img src=x.*is denied by per-user/).waitFor();
        assert.equal(await page.locator('img').count(), 0);
        await page.setViewportSize({width: 360, height: 780});
        await until('nothing is wider than the screen', () =>
          page.evaluate(() => document.documentElement.scrollWidth <= 360));
      } finally {
        await load.stop();
      }
      await close(page);
    });

    test('a limit is raised, applied everywhere on the page, and taken back', options, async () => {
      const page = await open(browser, `${service.url}#lookup=carol`);
      const result = page.locator('#lookup-results tbody tr', {hasText: 'per-user'});
      const change = result.getByRole('button', {name: 'Change limit in per-user'});
      await change.click();
      const dialog = page.getByRole('dialog', {name: 'Change the limit for a while'});
      await dialog.waitFor();
      assert.deepEqual(await accessibilityFindings(page), []);
      await page.getByLabel('Units per window').fill('5000');
      assert.match(await dialog.textContent(), /3 per 1 h → 5,000 per 1 h for this key, until /);
      const confirm = dialog.getByRole('button', {name: 'Change', exact: true});
      await confirm.click();
      assert.equal((await peek('carol')).limit, 3, 'a reason is required');
      await page.getByLabel('Reason').fill('launch');
      await screenshot(page, 'override');
      await confirm.click();
      await page.getByText('Limit changed. “carol” is not denied by any policy.').waitFor();
      assert.match(await result.textContent(),
        /5,000 per 1 h \(override\)changed at run time, until .*, by 127\.0\.0\.1: launch/);
      assert.equal((await peek('carol')).limit, 5000);

      await change.click();
      const changes = page.locator('#override-changes li');
      await changes.filter({hasText: 'none → 5,000, by 127.0.0.1: launch'}).waitFor();
      await screenshot(page, 'override-changes');
      await dialog.getByRole('button', {name: 'Take back'}).click();
      await page.getByText('Override removed. “carol” is not denied by any policy.').waitFor();
      assert.match(await result.textContent(), /3 per 1 h/);
      assert.equal((await peek('carol')).limit, 3);

      // What the service refuses is said in the dialog.
      await change.click();
      await page.getByLabel('Units per window').fill('99999999999999');
      await page.getByLabel('Reason').fill('too much');
      await confirm.click();
      const refused = {hasText: 'The limit was not changed: limit'};
      await page.locator('#override-message', refused).waitFor();
      assert.match(page.problems.splice(0).join(), /400 \(Bad Request\)/);
      await dialog.getByRole('button', {name: 'Cancel'}).click();
      await dialog.waitFor({state: 'hidden'});
      await close(page);
    });

    test('page of another origin can neither read, reset nor frame', options, async () => {
      const query = {policy: 'per-user', key: 'victim'};
      while ((await service.post('/v1/acquire', query)).status === 200);
      const site = http.createServer((_, response) => {
        response.writeHead(200, {'content-type': 'text/html'});
        response.end('<!doctype html><title>evil</title><p>evil</p>');
      }).listen(0, '127.0.0.1');
      await once(site, 'listening');
      try {
        const {port} = site.address();
        // Another port of the same host is the same site, but another origin.
        for (const host of ['127.0.0.1', 'localhost']) {
          const page = await open(browser, `http://${host}:${port}/`);
          const seen = await page.evaluate(async (target) => {
            const body = JSON.stringify({policy: 'per-user', key: 'victim'});
            const json = {'content-type': 'application/json'};
            const attempts = {
              read: () => fetch(`${target}v1/hot-keys`),
              look: () => fetch(`${target}v1/lookup?key=victim`, {mode: 'no-cors'}),
              live: () => fetch(`${target}v1/live`),
              post: () => fetch(`${target}v1/reset`, {method: 'POST', body, mode: 'no-cors'}),
              json: () => fetch(`${target}v1/reset`, {method: 'POST', body, headers: json}),
            };
            const results = {};
            for (const [name, attempt] of Object.entries(attempts)) {
              results[name] = await attempt().then((response) => response.text(), () => '');
            }
            const frame = document.createElement('iframe');
            frame.src = target;
            const loaded = new Promise((resolve) => frame.addEventListener('load', resolve));
            document.body.append(frame);
            await loaded;
            return results;
          }, service.url);
          assert.deepEqual(seen, {read: '', look: '', live: '', post: '', json: ''}, host);
          const [, frame] = page.frames();
          await until('the frame has an error', () => frame.url().startsWith('chrome-error:'));
          assert.equal((await peek('victim')).allowed, false, host);
          await page.context().close();
        }
      } finally {
        site.close();
        site.closeAllConnections();
      }
    });
  });

  test('stream reconnects after a restart of the server', options, async () => {
    const restarted = await new Tidegate(POLICIES).start();
    try {
      const page = await open(browser, restarted.url);
      const connection = page.locator('#connection-text');
      await connection.getByText('live', {exact: true}).waitFor();
      await restarted.stop();
      await connection.getByText('not connected').waitFor();
      await page.getByRole('button', {name: 'Reconnect now'}).waitFor();
      await finding(page, 'No live data').waitFor();
      await page.locator('#content.stale').waitFor();
      await screenshot(page, 'stale');
      restarted.write(POLICIES.replace('name: search', 'name: find'));
      await restarted.start();
      await connection.getByText('live', {exact: true}).waitFor();
      await finding(page, 'No live data').waitFor({state: 'detached'});
      await byPolicy(page, 'find').waitFor();
      // A browser reports each attempt that fails.
      page.problems = page.problems.filter((text) => !/ERR_(CONNECTION|INCOMPLETE|SOCKET)/.test(text));
      await close(page);
    } finally {
      await restarted.remove();
    }
  });

  test('outage of Redis and the fallback are visible', options, async () => {
    const redis = await new Redis().start();
    const store = `store: {redis: 'redis://127.0.0.1:${redis.port}', timeout: 50ms}`;
    const policy = '{name: all, key: [ip], limit: 100000, window: 1h, on_store_failure: local}';
    const limited = new Tidegate(`${store}\npolicies: [${policy}]\n`);
    await limited.start();
    const load = new Load(limited, {policy: 'all', key: 'ann'});
    try {
      const page = await open(browser, limited.url);
      await finding(page, 'OK').waitFor();
      const node = page.locator('#store tbody tr', {hasText: `127.0.0.1:${redis.port}`});
      await node.getByText('connected', {exact: true}).waitFor();
      await until('the node has its latency', async () =>
        /\d (µs|ms)/.test(await node.textContent()));
      await redis.stop();
      await finding(page, 'Store down').waitFor();
      await finding(page, 'Fallback active').waitFor();
      await node.getByText('not connected').waitFor();
      await until('decisions are local', async () =>
        /local \(fallback\)\s*[1-9]/.test(await page.textContent('#chart-sources tbody')));
      await page.getByText(/^[1-9][\d,]* units? of 1 key$/).waitFor();
      await screenshot(page, 'fallback');
      assert.deepEqual(await accessibilityFindings(page), []);
      await redis.start(redis.port);
      await finding(page, 'Store down').waitFor({state: 'detached'});
      await finding(page, 'Fallback active').waitFor({state: 'detached'});
      await node.getByText('connected', {exact: true}).waitFor();
      await close(page);
    } finally {
      await load.stop();
      await limited.remove();
      await redis.stop();
    }
  });

  test('one page shows all instances, what differs, and what happened', options, async () => {
    const redis = await new Redis().start();
    const store = `store: {redis: 'redis://127.0.0.1:${redis.port}', timeout: 5s}`;
    const config = (limit) => `${store}
policies: [{name: all, key: [header.x-user-id], limit: ${limit}, window: 1h}]
`;
    const services = [];
    try {
      for (const limit of [5, 5, 7]) services.push(await new Tidegate(config(limit)).start());
      const [one, two, other] = services;
      const port = (it) => it.listen.admin.split(':').pop();
      const page = await open(browser, one.url);
      const instance = (it) => page.locator('#fleet tbody tr', {hasText: `:${port(it)}`});
      await instance(other).getByText('differs in configuration').waitFor();
      await instance(other).getByText('all: limit 5 → 7').waitFor();
      await finding(page, /Instances differ.*1 of 3 instances.*all: limit 5 → 7/).waitFor();
      await page.getByText(/^3 instances, 2 configurations: /).waitFor();
      await instance(one).getByText('this one').waitFor();
      assert.equal(await page.locator('#fleet .badge').count(), 1);
      await until('the title names the instance', async () =>
        (await page.title()).startsWith('Instances differ · ')
          && (await page.title()).includes(`:${port(one)} · `));
      assert.match(await page.textContent('#instance'), new RegExp(`:${port(one)}, version`));

      // The hot keys are those of all, and a look-up says which instance denied last.
      const query = {policy: 'all', key: 'mallory'};
      for (const [service, count] of [[one, 17], [two, 12]]) {
        for (let number = 0; number < count; number += 1) await service.post('/v1/acquire', query);
      }
      await page.locator('section.denied tr', {hasText: 'mallory'})
        .getByText('24', {exact: true}).waitFor();
      await page.getByText('of the last minutes of all instances.').waitFor();
      await page.fill('#lookup-key', 'mallory');
      await page.keyboard.press('Enter');
      await page.locator('#lookup-results', {hasText: /denied last by .*:\d+ at/}).waitFor();

      // The same file again, and a reset by another instance.
      const {listen} = other;
      other.listen = Object.fromEntries(Object.keys(listen).map((name) => [name, '127.0.0.1:0']));
      other.write(config(5));
      other.listen = listen;
      await page.locator('#events', {hasText: 'configuration reloaded: all: limit 7 → 5'}).waitFor();
      const reset = await two.post('/v1/reset', query, two.listen.admin);
      assert.equal(reset.status, 204);
      const event = page.locator('#events tr', {hasText: 'count of mallory under all reset by'});
      await event.getByText(`:${port(two)}`).waitFor();
      await page.locator('#fleet .badge').waitFor({state: 'detached'});
      await finding(page, 'Instances differ').waitFor({state: 'detached'});
      await screenshot(page, 'fleet');
      assert.deepEqual(await accessibilityFindings(page), []);
      await close(page);
    } finally {
      await Promise.all(services.map((service) => service.remove()));
      await redis.stop();
    }
  });

  test('units in flight are shown with the ends of their holds', options, async () => {
    const policy = '{name: exports, algorithm: concurrency, limit: 2, hold: {ttl: 1h}}';
    const limited = await new Tidegate(`policies: [${policy}]`).start();
    try {
      const query = {policy: 'exports', key: 'ann'};
      const page = await open(browser, `${limited.url}#lookup=ann`);
      await byPolicy(page, 'exports').getByText('2 in flight').waitFor();
      const ends = /2 in flight.*first ends in (1 h|\d+ min).*last ends in/;
      const released = /when one is released, at the latest in (1 h|\d+ min)/;
      for (const [units, next] of [[1, /now/], [2, released]]) {
        assert.equal((await limited.post('/v1/acquire', query)).status, 200);
        await page.fill('#lookup-key', 'ann');
        await page.keyboard.press('Enter');
        const row = page.locator('#lookup-results tbody tr', {hasText: `${units} of 2 in flight`});
        await row.waitFor();
        assert.match(await row.textContent(), ends);
        assert.match(await row.textContent(), next);
      }
      await screenshot(page, 'in-flight');
      assert.deepEqual(await accessibilityFindings(page), []);
      await close(page);
    } finally {
      await limited.remove();
    }
  });

  test('token is asked for, kept in the tab, and forgotten', options, async () => {
    const hashed = '{name: per-key, key: [header.x-api-key], limit: 2, window: 1h}';
    const config = `auth: {admin_token: open-sesame}\n${POLICIES}  - ${hashed}\n`;
    const guarded = await new Tidegate(config).start();
    try {
      const page = await open(browser, guarded.url);
      await page.getByRole('heading', {name: 'Log in'}).waitFor();
      assert.equal(await page.locator('#content').isVisible(), false);
      assert.deepEqual(await accessibilityFindings(page), []);
      await page.getByLabel('Token').fill('wrong');
      await page.keyboard.press('Enter');
      await page.getByText('The server does not accept this token.').waitFor();
      await screenshot(page, 'login');
      await page.getByLabel('Token').fill('open-sesame');
      await page.keyboard.press('Enter');
      await byPolicy(page, 'per-user').waitFor();
      await page.locator('#connection-text', {hasText: /^live$/}).waitFor();
      await page.reload();
      await byPolicy(page, 'per-user').waitFor();
      // A credential is shown as a hash, by which it is looked up and reset.
      const query = {policy: 'per-key', key: 'credential'};
      while ((await guarded.post('/v1/acquire', query)).status === 200);
      await page.locator('section.denied').getByRole('button', {name: /sha256:/}).click();
      await page.getByText(/^“sha256:[0-9a-f]{16}” is denied by per-key\./).waitFor();
      await page.getByRole('button', {name: 'Reset in per-key'}).click();
      await page.getByRole('button', {name: 'Reset', exact: true}).click();
      await page.getByText(/^Reset in per-key\..*is not denied/).waitFor();
      assert.equal((await guarded.post('/v1/acquire', query)).status, 200);
      assert.equal((await guarded.post('/v1/acquire', query)).status, 200);
      // So is one that is typed.
      await page.fill('#lookup-key', 'credential');
      await page.keyboard.press('Enter');
      await page.getByText('“credential” is denied by per-key.').waitFor();
      await page.getByRole('button', {name: 'Reset in per-key'}).click();
      await page.getByRole('button', {name: 'Reset', exact: true}).click();
      await page.getByText(/^Reset in per-key\. “credential” is not denied/).waitFor();
      assert.ok(!(await page.textContent('#hot-keys')).includes('credential'));
      const kept = await page.evaluate(() => JSON.stringify([localStorage, document.cookie]));
      assert.ok(!kept.includes('sesame'), kept);
      await page.getByRole('button', {name: 'Log out'}).click();
      await page.getByRole('heading', {name: 'Log in'}).waitFor();
      await page.reload();
      await page.getByRole('heading', {name: 'Log in'}).waitFor();
      page.problems = page.problems.filter((text) => !text.includes('401'));
      await close(page);
    } finally {
      await guarded.remove();
    }
  });
});
