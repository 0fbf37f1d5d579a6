// The dashboard: connects the live stream with the parts of the page.

import {ApiError, forgetToken, getJson, hasToken, setUnauthorizedHandler} from './api.js';
import {redrawCharts} from './charts.js';
import {byId, el, setText, show} from './dom.js';
import {Figures} from './figures.js';
import {findingsOf} from './findings.js';
import {Fleet} from './fleet.js';
import {History} from './history.js';
import {HotKeys} from './hot-keys.js';
import {Login} from './login.js';
import {Lookup} from './lookup.js';
import {Policies} from './policies.js';
import {showReload} from './reload.js';
import {Store, showInstance} from './store.js';
import {LiveStream, type StreamState} from './stream.js';
import {setUpTheme} from './theme.js';
import type {HistoryBody, HotKeysBody, Sample, Status} from './types.js';

/** The server sends a sample every second. */
const STALE_AFTER_MS = 5_000;
/** Seconds of which the first lines show the mean. */
const RECENT_MS = 10_000;
const TICK_INTERVAL_MS = 1_000;

setUpTheme(redrawCharts);
const content = byId('content');
// Charts need a width, so the content is shown before they are made.
content.hidden = false;
const samples = new History();
const figures = new Figures(samples);
const lookup = new Lookup();
const hotKeys = new HotKeys(byId('hot-keys'), (key) => lookup.lookUp(key));
const store = new Store(byId('store'));
const policies = new Policies(byId('policies'));
const fleet = new Fleet(showFleet);
const login = new Login(start);
const stream = new LiveStream(onEvent, onState);

let status: Status | null = null;
let streamState: StreamState = {kind: 'stopped'};
/** Time of the server minus that of this browser. */
let clockOffsetMs = 0;
/** Time of this browser at which data last came. */
let lastDataMs: number | null = null;
let shownFindings = '';
let isDrawing = false;

setUnauthorizedHandler((hadToken) => {
  stream.stop();
  fleet.stop();
  forgetToken();
  forget();
  login.ask(hadToken ? 'The server does not accept this token.' : '');
});

function start(): void {
  show(byId('refused'), false);
  show(content, true);
  // A link cannot send a token.
  show(byId('links'), !hasToken());
  stream.start();
  fleet.start();
  void policies.load();
  lookup.refresh();
}

/** Hides the data of the server, which no longer accepts the token. */
function forget(): void {
  status = null;
  setText(byId('instance'), '');
  show(byId('links'), false);
  lastDataMs = null;
  samples.clear();
  lookup.clear();
  hotKeys.update({allowed: [], denied: [], shadow_denied: []});
  show(content, false);
}

function onEvent(type: string, body: unknown): void {
  lastDataMs = Date.now();
  show(byId('refused'), false);
  switch (type) {
    case 'history':
      samples.replace(body as HistoryBody);
      break;
    case 'sample':
      samples.push(body as Sample);
      break;
    case 'status':
      setStatus(body as Status);
      break;
    case 'hot-keys':
      // With others, the sums over all of them are shown.
      if (!isFleet()) hotKeys.update(body as HotKeysBody);
      break;
    default:
      return;
  }
  draw();
}

function isFleet(): boolean {
  return fleet.body !== null && fleet.body.size > 1 && fleet.body.error === null;
}

function showFleet(): void {
  if (fleet.body && isFleet()) hotKeys.update(fleet.body.hot_keys);
  setText(byId('hot-scope'), isFleet() ? ' of all instances' : '');
  draw();
}

function setStatus(next: Status): void {
  const isOtherConfig = status !== null
    && (status.reload.config_loaded_at_ms !== next.reload.config_loaded_at_ms
      || status.started_at_ms !== next.started_at_ms);
  status = next;
  clockOffsetMs = next.now_ms - Date.now();
  policies.setConfigFile(next.reload.config_file);
  if (isOtherConfig) void policies.load();
}

function onState(state: StreamState): void {
  const before = streamState.kind;
  streamState = state;
  if (state.kind === 'waiting' && before !== 'waiting') void explainRefusal();
  if (state.kind !== before || state.kind === 'waiting') showConnection();
}

/** A server that refuses the page, for example because of its host name, says why. */
async function explainRefusal(): Promise<void> {
  try {
    await getJson('/v1/status');
  } catch (error) {
    if (error instanceof ApiError && error.status === 403) {
      setText(byId('refused-text'), error.message);
      show(byId('refused'), true);
      show(content, samples.last() !== undefined);
    }
  }
}

function showConnection(): void {
  const element = byId('connection');
  const isStale = staleForMs() !== null;
  const kind = streamState.kind === 'live' && isStale ? 'stale' : streamState.kind;
  element.dataset['state'] = kind;
  let text: string = kind;
  if (streamState.kind === 'waiting') {
    const seconds = Math.max(0, Math.ceil((streamState.untilMs - Date.now()) / 1000));
    text = `not connected; next attempt in ${seconds} s`;
    element.title = streamState.reason;
  } else {
    element.title = '';
    if (kind === 'stopped') text = 'not connected';
  }
  setText(byId('connection-text'), text);
  show(byId('reconnect'), streamState.kind === 'waiting');
}

/** Time without data, if it is long enough to be a problem. */
function staleForMs(): number | null {
  if (lastDataMs === null) return null;
  const age = Date.now() - lastDataMs;
  return age > STALE_AFTER_MS ? age : null;
}

function showState(): void {
  const nowMs = Date.now() + clockOffsetMs;
  const stale = staleForMs();
  content.classList.toggle('stale', stale !== null);
  if (lastDataMs === null) {
    shownFindings = '';
    byId('findings').replaceChildren(el('li', {class: 'note'}, 'Waiting for data …'));
    return;
  }
  const findings = findingsOf({
    status, fleet: fleet.body, recent: samples.recent(RECENT_MS), staleForMs: stale, nowMs,
  });
  const state = JSON.stringify(findings);
  if (state !== shownFindings) {
    shownFindings = state;
    byId('findings').replaceChildren(...findings.map(({severity, title, text}) =>
      el('li', {class: severity}, el('strong', {}, title), ' ', el('span', {}, text))));
    setText(byId('announcement'), findings.map(({kind}) => kind).join(', '));
  }
  const [worst] = findings;
  const title = [worst?.severity === 'ok' ? null : worst?.title, status?.instance, 'Tidegate'];
  const text = title.filter((part) => part).join(' · ');
  if (document.title !== text) document.title = text;
  // Without data, times that go on would be guesses.
  if (status && stale === null) {
    showInstance(byId('instance'), status, nowMs);
    showReload(byId('reload'), status, nowMs);
    store.update(status, nowMs);
  }
}

/** Draws at the next frame, once for all events of it, and not at all in a hidden tab. */
function draw(): void {
  if (isDrawing || document.hidden) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    figures.update();
    policies.update(samples.last());
    showState();
  });
}

byId('reconnect').addEventListener('click', () => stream.reconnect());
document.addEventListener('visibilitychange', draw);
// Also in a hidden tab, whose title shows a problem.
setInterval(() => {
  showConnection();
  showState();
}, TICK_INTERVAL_MS);
showState();
start();
