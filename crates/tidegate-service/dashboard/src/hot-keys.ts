// Hot keys: who sends most of the requests that are denied, would be denied, or are allowed.

import {el, foreign, Rows, setText, show} from './dom.js';
import * as format from './format.js';
import type {HotKey, HotKeysBody} from './types.js';

const MAX_ROWS = 20;
/** Rows that are shown before the user asks for all. */
const MAX_FIRST_ROWS = 8;

const LISTS: [keyof HotKeysBody, string, string][] = [
  ['denied', 'Denied', 'No denied requests.'],
  ['shadow_denied', 'Shadow-denied', 'No requests that shadow mode would deny.'],
  ['allowed', 'Allowed', 'No allowed requests.'],
];

export class HotKeys {
  private readonly lists: {
    name: keyof HotKeysBody;
    rows: Rows<HotKey & {most: number}>;
    table: HTMLElement;
    empty: HTMLElement;
    all: HTMLButtonElement;
  }[] = [];
  private body: HotKeysBody = {allowed: [], denied: [], shadow_denied: []};

  constructor(container: HTMLElement, lookUp: (key: string) => void) {
    for (const [name, title, emptyText] of LISTS) {
      const body = el('tbody');
      const table = el(
        'table',
        {class: 'hot-table', hidden: true},
        el('caption', {class: 'hidden-text'}, `Hot keys: ${title.toLowerCase()}`),
        el('thead', {}, el('tr', {},
          el('th', {scope: 'col'}, 'key'),
          el('th', {scope: 'col'}, 'policy'),
          el('th', {scope: 'col', class: 'number'}, 'requests'))),
        body,
      );
      const empty = el('p', {class: 'empty'}, emptyText);
      const heading = el('h3', {id: `hot-${name}`}, title);
      const all = el('button', {
        type: 'button',
        class: 'small',
        'aria-expanded': 'false',
        onclick: () => {
          const isExpanded = all.getAttribute('aria-expanded') === 'true';
          all.setAttribute('aria-expanded', String(!isExpanded));
          this.update(this.body);
        },
      });
      container.append(
        el('section', {class: `panel ${name}`, 'aria-labelledby': heading.id},
          heading, table, empty, all),
      );
      const rows = new Rows<HotKey & {most: number}>(
        body,
        ({policy, key}) => JSON.stringify([policy, key]),
        (hot) => rowOf(hot, lookUp),
      );
      this.lists.push({name, rows, table, empty, all});
    }
  }

  update(body: HotKeysBody): void {
    this.body = body;
    for (const {name, rows, table, empty, all} of this.lists) {
      const keys = (body[name] ?? []).slice(0, MAX_ROWS);
      const most = Math.max(1, ...keys.map(({count}) => count));
      const isExpanded = all.getAttribute('aria-expanded') === 'true';
      const shown = isExpanded ? keys : keys.slice(0, MAX_FIRST_ROWS);
      rows.update(shown.map((hot) => ({...hot, most})));
      setText(all, isExpanded ? 'Show fewer' : `Show all ${keys.length}`);
      show(all, keys.length > MAX_FIRST_ROWS);
      show(table, keys.length > 0);
      show(empty, keys.length === 0);
    }
  }
}

function rowOf(hot: HotKey & {most: number}, lookUp: (key: string) => void): HTMLTableRowElement {
  const {policy, key, count, error, most} = hot;
  const button = el(
    'button',
    {type: 'button', class: 'link', onclick: () => lookUp(key)},
    el('span', {class: 'hidden-text'}, 'Look up '),
    foreign(key, 40),
  );
  const range = error > 0
    ? `between ${format.count(count - error)} and ${format.count(count)}` : null;
  const meter = el('meter', {min: 0, max: most, value: count, 'aria-hidden': 'true'});
  return el(
    'tr',
    {},
    el('th', {scope: 'row'}, button),
    el('td', {class: 'policy', title: format.visible(policy).slice(0, 200)}, foreign(policy, 48)),
    el('td', {class: 'number', title: range}, meter,
      el('span', {class: 'figure'}, `${error > 0 ? '≤ ' : ''}${format.count(count)}`)),
  );
}
