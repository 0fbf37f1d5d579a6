// The state of the server in plain words: what an engineer on call must know first.

import * as format from './format.js';
import type {FleetBody, Sample, Status, StoreState} from './types.js';

export type Severity = 'bad' | 'warn' | 'note' | 'ok';

export interface Finding {
  /** Name of the kind. Screen readers hear of a new kind, not of new numbers. */
  kind: string;
  severity: Severity;
  title: string;
  text: string;
}

const ORDER: Severity[] = ['bad', 'warn', 'ok', 'note'];
/** Part of the capacity from which the memory store is nearly full. */
const NEARLY_FULL = 0.9;

export interface Facts {
  status: Status | null;
  fleet: FleetBody | null;
  /** Samples of the last seconds. */
  recent: Sample[];
  /** Time without data, if the figures are stale. */
  staleForMs: number | null;
  nowMs: number;
}

/** The findings, worst first; "OK" if nothing is wrong. */
export function findingsOf({status, fleet, recent, staleForMs, nowMs}: Facts): Finding[] {
  const found: Finding[] = [];
  const add = (kind: string, severity: Severity, title: string, text: string) =>
    found.push({kind, severity, title, text});
  if (staleForMs !== null) {
    add('no live data', 'bad', 'No live data',
      `The figures below are ${format.age(staleForMs)} old.`);
  }
  if (status) {
    addStore(status, nowMs, add);
    addReload(status, nowMs, add);
    const down = (status.upstreams ?? []).filter(({up, ejected}) => !up || ejected);
    if (down.length > 0) {
      add('upstream failing', 'warn', 'Upstream failing',
        `${down.length} of ${format.plural(status.upstreams?.length ?? 0, 'upstream')}: `
        + down.slice(0, 3).map(({url}) => format.visible(url)).join(', '));
    }
  }
  const other = (fleet?.instances ?? []).filter(({differs}) => differs.length > 0);
  if (other.length > 0) {
    const names = other.slice(0, 3).map(({name, changes: [first]}) =>
      format.visible(name ?? '') + (first ? ` (${format.visible(first.text)})` : ''));
    add('instances differ', 'warn', 'Instances differ',
      `${other.length} of ${format.plural(fleet?.size ?? 0, 'instance')}: ${names.join(', ')}.`);
  }
  const hasTraffic = addTraffic(recent, add);
  if (!found.some(({severity}) => severity !== 'note')) {
    const text = hasTraffic ? 'All requests are allowed.' : 'No requests in the last seconds.';
    const quiet = found.length === 0;
    add('OK', 'ok', 'OK', quiet ? text : 'The store and the configuration are fine.');
  }
  return found.sort((a, b) => ORDER.indexOf(a.severity) - ORDER.indexOf(b.severity));
}

type Add = (kind: string, severity: Severity, title: string, text: string) => void;

function addStore({store}: Status, nowMs: number, add: Add): void {
  const failing = store.nodes.filter(({connected, circuit}) => !connected || circuit !== 'closed');
  const error = failing.map(({last_error}) => last_error).find((text) => text !== null);
  const why = error ? ` Last error: ${format.shortened(format.visible(error), 200)}` : '';
  const nodes = `${failing.length} of ${format.plural(store.nodes.length, 'node')}`;
  const part = lostPart(store);
  if (part !== null) {
    add('store partly down', 'bad', 'Store partly down', `${part} unavailable.${why}`);
  } else if (!store.up) {
    add('store down', 'bad', 'Store down',
      store.nodes.length > 0 ? `Redis does not answer: ${nodes}.${why}` : 'It does not answer.');
  } else if (failing.length > 0) {
    add('store degraded', 'warn', 'Store degraded', `${nodes} of Redis failing.${why}`);
  }
  const {fallback, memory} = store;
  if (fallback?.active) {
    const since = fallback.since_ms;
    const length = since === null ? '' : ` for ${format.age(nowMs - since)}`;
    const {instances} = fallback;
    const share = instances > 1 ? `, with 1/${instances} of each limit` : '';
    const decides = part === null ? 'This instance decides alone'
      : 'This instance decides the keys of these slots alone';
    add('fallback active', 'bad', 'Fallback active',
      `${decides}${length}${share}. `
      + `${format.plural(fallback.pending_debit_units, 'unit')} to charge to Redis afterwards.`);
  } else if (fallback && fallback.pending_debit_units > 0) {
    add('settling debits', 'warn', 'Settling',
      `${format.plural(fallback.pending_debit_units, 'unit')} of the last outage still to charge `
      + 'to Redis.');
  }
  if (memory?.full) {
    add('memory full', 'bad', 'Memory full',
      `There is no room for new counts: ${format.count(memory.keys)} keys, and those at their limit `
      + 'keep their place. Raise store.max_keys, or find the policy whose keys clients invent.');
  } else if (memory?.max_keys && memory.keys >= memory.max_keys * NEARLY_FULL) {
    add('memory nearly full', 'warn', 'Memory nearly full',
      `${format.count(memory.keys)} of ${format.plural(memory.max_keys, 'key')}.`);
  }
}

/** The primaries and slots of a cluster that are lost; null if all of them are, or none. */
export function lostPart({health}: StoreState): string | null {
  if (health?.state !== 'partly-down') return null;
  const slots = Math.max(1, Math.round(health.slots_unavailable_ratio * 100));
  return `${health.primaries_unavailable} of ${format.plural(health.primaries, 'primary',
    'primaries')}, with ${slots} % of the slots,`;
}

function addReload({reload}: Status, nowMs: number, add: Add): void {
  const pending = reload.restart_pending ?? [];
  if (pending.length > 0) {
    add('restart pending', 'warn', 'Restart pending',
      `Changes in ${pending.map(format.visible).join(', ')} of the configuration are not active: `
      + 'restart the service.');
  }
  if (reload.ok) return;
  const when = reload.at_ms === null ? '' : `${format.age(nowMs - reload.at_ms)} ago: `;
  const {error} = reload;
  // Further lines show the place in the file, as the configuration section does.
  const [first = ''] = (error?.message ?? '').split('\n');
  const message = error ? `${placeOf(error)}${sentence(first)} ` : '';
  add('reload failed', 'warn', 'Reload failed',
    `${when}${message}The configuration before it stays active.`);
}

/** Line of an error, with a period at its end. */
function sentence(line: string): string {
  const text = format.shortened(format.visible(line), 300);
  return /[.?!…]$/.test(text) ? text : `${text}.`;
}

/** Place of an error in a file, as editors and compilers write it. */
export function placeOf(error: {file: string | null; line: number | null; column: number | null}) {
  const parts = [error.file && format.visible(error.file), error.line, error.column];
  const known = parts.filter((part) => part !== null && part !== undefined);
  return known.length > 0 ? `${known.join(':')}: ` : '';
}

/** Returns whether there is traffic. Averages of seconds change less than single samples. */
function addTraffic(recent: Sample[], add: Add): boolean {
  if (recent.length === 0) return false;
  const mean = (value: (sample: Sample) => number) =>
    recent.reduce((sum, sample) => sum + value(sample), 0) / recent.length;
  const allowed = mean((sample) => sample.allowed);
  const denied = mean((sample) => sample.denied);
  const shadow = mean((sample) => sample.shadow_denied);
  const errors = mean((sample) => sample.errors);
  if (errors > 0) {
    add('errors', 'bad', `Errors ${format.rate(errors)}/s`, 'These requests are not decided.');
  }
  if (denied > 0) {
    const share = Math.round((denied / (allowed + denied)) * 100);
    add('denying', 'note', `Denying ${format.rate(denied)}/s`,
      `${share < 1 ? 'under 1' : share} % of requests${mostBy(recent, 1)}.`);
  }
  if (shadow > 0) {
    add('shadow-denying', 'note', 'Shadow mode',
      `would deny ${format.rate(shadow)}/s${mostBy(recent, 2)}.`);
  }
  return allowed + denied + errors > 0;
}

/** Policy with the most decisions of an outcome. */
function mostBy(recent: Sample[], outcome: 1 | 2): string {
  const sums = new Map<string, number>();
  for (const {policies} of recent) {
    for (const [name, rates] of Object.entries(policies)) {
      sums.set(name, (sums.get(name) ?? 0) + rates[outcome]);
    }
  }
  const [first] = [...sums].filter(([, sum]) => sum > 0).sort((a, b) => b[1] - a[1]);
  if (!first) return '';
  const name = format.shortened(format.visible(first[0]), 40);
  return `, ${sums.size > 1 ? 'most ' : ''}by ${name}`;
}
