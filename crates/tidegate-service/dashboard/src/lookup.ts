// Look-up of one key in every policy, the reset of its count, and the change of its limit.

import {errorText, getJson, postJson} from './api.js';
import {byId, Cards, el, foreign, setText, show} from './dom.js';
import * as format from './format.js';
import {OverrideForm} from './override-form.js';
import type {LookupBody, LookupResult} from './types.js';

const PREFIX = '#lookup=';
const MAX_ROWS = 200;
const HASH = /^sha256:[0-9a-f]{16}$/;

export class Lookup {
  private readonly input = byId<HTMLInputElement>('lookup-key');
  private readonly message = byId('lookup-message');
  private readonly results = byId('lookup-results');
  private readonly close = byId<HTMLButtonElement>('lookup-close');
  private readonly dialog = byId<HTMLDialogElement>('confirm');
  private abort: AbortController | null = null;
  private key: string | null = null;
  private readonly overrides = new OverrideForm((note) => {
    if (this.key !== null) void this.load(this.key, note);
    this.input.focus({preventScroll: true});
  });

  constructor() {
    byId<HTMLFormElement>('lookup-form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.lookUp(this.input.value);
    });
    this.close.addEventListener('click', () => {
      history.replaceState(null, '', location.pathname);
      this.clear();
      this.input.focus();
    });
    addEventListener('hashchange', () => this.followLink());
  }

  /** Looks up the key of the address, if it has one. */
  followLink(): void {
    if (!location.hash.startsWith(PREFIX)) return;
    try {
      const key = decodeURIComponent(location.hash.slice(PREFIX.length));
      this.input.value = key;
      void this.load(key);
    } catch {
      setText(this.message, 'The key in the address is not valid.');
    }
  }

  /** Looks a key up, and puts it into the address. */
  lookUp(key: string): void {
    const hash = PREFIX + encodeURIComponent(key);
    if (location.hash === hash) this.followLink();
    else location.hash = hash;
    this.input.scrollIntoView({block: 'center'});
    this.input.focus({preventScroll: true});
  }

  /** Looks the key up again, for example after a login. */
  refresh(): void {
    if (this.key !== null) void this.load(this.key);
    else this.followLink();
  }

  clear(): void {
    this.abort?.abort();
    this.key = null;
    this.input.value = '';
    this.results.replaceChildren();
    setText(this.message, '');
    show(this.close, false);
  }

  private async load(key: string, note = ''): Promise<void> {
    this.abort?.abort();
    const abort = new AbortController();
    this.abort = abort;
    this.key = key;
    setText(this.message, `${note} Looking up …`.trim());
    try {
      const path = `/v1/lookup?key=${encodeURIComponent(key)}`;
      const body = await getJson<LookupBody>(path, abort.signal);
      if (this.abort === abort) this.render(body, note);
    } catch (error) {
      if (this.abort !== abort) return;
      this.results.replaceChildren();
      setText(this.message, errorText(error));
    }
  }

  private render({key, denied: isKnown, results, truncated}: LookupBody, note: string): void {
    show(this.close, true);
    const shown = results.slice(0, MAX_ROWS);
    const denied = results.filter((result) => isDenied(result) && result.mode !== 'shadow');
    const name = format.shortened(format.visible(key), 60);
    const summary = results.length === 0
      ? `No policy counts by a single key such as “${name}”.`
      : denied.length > 0
        ? `“${name}” is denied by ${list(denied.map(({policy}) => policy))}.`
        : isKnown === false
          ? `“${name}” is not denied by any policy.`
          : `“${name}” is not denied by the policies that could be asked, but not all could.`;
    const isCut = truncated || results.length > MAX_ROWS;
    const more = isCut
      ? ` ${MAX_ROWS} policies are shown: first those that deny, then those in use.` : '';
    setText(this.message, `${note} ${summary}${more} As of ${format.clock(Date.now())}.`.trim());
    const cards = new Cards(`Counts of the key ${name}`, [
      {name: 'policy'},
      {name: 'next request'},
      {name: 'remaining', class: 'number'},
      {name: 'next free'},
      {name: 'why'},
      {name: 'actions'},
    ]);
    // Denials first: they are the reason for most questions.
    const sorted = [...shown].sort((a, b) => Number(isDenied(b)) - Number(isDenied(a)));
    cards.body.append(...sorted.map((result) => this.row(cards, result)));
    cards.table.hidden = shown.length === 0;
    this.results.replaceChildren(cards.table);
  }

  private row(cards: Cards, result: LookupResult): HTMLTableRowElement {
    const name = el('div', {}, foreign(result.policy, 48));
    if (result.mode && result.mode !== 'enforce') {
      name.append(' ', el('span', {class: 'badge'}, result.mode));
    }
    if (result.error) {
      return cards.row(name, {child: 'unknown', class: 'warn'}, '–', '–',
        foreign(result.error, 300, 'prose'), '–');
    }
    if (result.limit !== undefined && result.window_ms !== undefined) {
      const quota = format.limitText(result.limit, result.window_ms, result.calendar);
      name.append(el('div', {class: 'detail'}, quota, result.override ? ' (override)' : ''));
      if (result.value !== undefined) {
        name.append(el('div', {class: 'detail'}, 'if the value is ', foreign(result.value, 40)));
      }
    }
    const {run_time: override} = result;
    if (override) {
      const until = override.until_ms;
      const end = until === null ? 'no end' : `until ${format.dateTime(until)}`;
      name.append(el('div', {class: 'detail'}, `changed at run time, ${end}, by `,
        foreign(override.by, 40), ': ', foreign(override.reason, 80, 'prose')));
    }
    const change = el('button', {
      type: 'button',
      class: 'small',
      'aria-label': `Change limit in ${format.visible(result.policy).slice(0, 100)}`,
      onclick: () => this.overrides.open(result, this.plain(result.key)),
    }, 'Change limit …');
    const reset = el('button', {
      type: 'button',
      class: 'small',
      'aria-label': `Reset in ${format.visible(result.policy).slice(0, 100)}`,
      onclick: () => void this.reset(result),
    }, 'Reset …');
    return cards.row(
      name, verdictCell(result), inFlight(result) ?? remaining(result), nextFree(result),
      result.reason ? foreign(result.reason, 400, 'prose') : '–',
      el('div', {class: 'actions'}, change, reset),
    );
  }

  /** The server shows a credential as a hash, which names only a listed key. */
  private plain(key: string): string {
    return HASH.test(key) && this.key !== null ? this.key : key;
  }

  private async reset({policy, key}: LookupResult): Promise<void> {
    const wanted = this.key;
    byId('confirm-text').replaceChildren(
      'The key ', el('strong', {}, foreign(key)), ' gets its whole limit of the policy ',
      el('strong', {}, foreign(policy)), ' back at once, on all instances. This is logged.',
    );
    this.dialog.returnValue = 'cancel';
    this.dialog.showModal();
    await new Promise((closed) => this.dialog.addEventListener('close', closed, {once: true}));
    if (this.dialog.returnValue !== 'reset' || wanted === null) return;
    try {
      await postJson('/v1/reset', {policy, key: HASH.test(key) ? wanted : key});
      const name = format.shortened(format.visible(policy), 40);
      if (this.key === wanted) await this.load(wanted, `Reset in ${name}.`);
      this.input.focus({preventScroll: true});
    } catch (error) {
      setText(this.message, `The key was not reset: ${errorText(error)}`);
    }
  }
}

function isDenied(result: LookupResult): boolean {
  return result.allowed === false;
}

function verdict(result: LookupResult): {child: string; class: string} {
  if (!isDenied(result)) {
    const delay = result.delay_ms ?? 0;
    return {child: delay > 0 ? `allowed after ${format.duration(delay)}` : 'allowed', class: 'ok'};
  }
  return result.mode === 'shadow'
    ? {child: 'would be denied', class: 'warn'}
    : {child: 'denied', class: 'bad'};
}

/** The verdict, with the instance that denied the key last. */
function verdictCell(result: LookupResult): {child: Node; class: string} {
  const {child, class: style} = verdict(result);
  const cell = el('div', {}, child);
  if (result.last_denial) {
    const {instance, at_ms: at} = result.last_denial;
    cell.append(el('div', {class: 'detail'}, 'denied last by ', foreign(instance, 48),
      ` at ${format.clock(at)}`));
  }
  return {child: cell, class: style};
}

function remaining(result: LookupResult): HTMLElement | string {
  const {remaining: left} = result;
  if (left === undefined) return '–';
  const most = Math.max(result.capacity ?? result.burst ?? result.limit ?? 0, left);
  return el('span', {},
    el('meter', {min: 0, max: most || 1, value: left, 'aria-hidden': 'true'}),
    el('span', {class: 'figure'}, `${format.count(left)} of ${format.count(most)}`));
}

/** Units in flight, with the ends of their holds. */
function inFlight({in_flight: held, capacity, reset_after_ms: last}: LookupResult) {
  if (!held) return null;
  const most = capacity ?? held.units;
  const cell = el('div', {},
    el('meter', {min: 0, max: most || 1, value: held.units, 'aria-hidden': 'true'}),
    el('span', {class: 'figure'}, `${format.count(held.units)} of ${format.count(most)} in flight`));
  for (const [name, end] of [['first', held.first_end_ms], ['last', last]] as const) {
    if (end) cell.append(el('div', {class: 'detail'}, `${name} ends in ${format.duration(end)}`));
  }
  return cell;
}

function nextFree(result: LookupResult): string {
  if (!isDenied(result)) return 'now';
  const wait = result.retry_after_ms;
  if (wait === null || wait === undefined) return 'never: it costs more than the limit';
  if (result.in_flight) return `when one is released, at the latest in ${format.duration(wait)}`;
  return `in ${format.duration(wait)} (${format.clock(Date.now() + wait)})`;
}

/** Names as part of a sentence. */
function list(names: string[]): string {
  const shown = names.slice(0, 3).map((name) => format.shortened(format.visible(name), 40));
  if (names.length > 3) shown.push(`${names.length - 3} more`);
  const last = shown.pop() ?? '';
  return shown.length > 0 ? `${shown.join(', ')} and ${last}` : last;
}
