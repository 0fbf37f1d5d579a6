// Configuration: its file, when it was loaded, and the error of the last reload.

import {el} from './dom.js';
import {placeOf} from './findings.js';
import * as format from './format.js';
import type {Status} from './types.js';

let shown = '';

export function showReload(container: HTMLElement, {reload}: Status, nowMs: number): void {
  const time = (ms: number) => `${format.dateTime(ms)} (${ago(nowMs - ms)})`;
  const facts: [string, string, string?][] = [
    ['file', reload.config_file === null ? 'none' : format.visible(reload.config_file)],
    ['active since', time(reload.config_loaded_at_ms)],
  ];
  if (reload.at_ms === null) {
    facts.push(['last reload', 'none since the start']);
  } else {
    facts.push(['last reload', `${reload.ok ? 'succeeded' : 'failed'}, ${time(reload.at_ms)}`,
      reload.ok ? 'ok' : 'bad']);
  }
  const error = reload.ok ? null : reload.error;
  const state = JSON.stringify([facts, error]);
  if (state === shown) return;
  shown = state;
  const list = el('dl', {class: 'facts'}, ...facts.map(([name, value, style]) =>
    el('div', {}, el('dt', {}, name), el('dd', {class: style}, value))));
  container.replaceChildren(list);
  if (error) {
    const text = placeOf(error) + error.message.split('\n').map(format.visible).join('\n');
    container.append(
      el('pre', {id: 'reload-error', class: 'error', tabindex: 0,
        'aria-label': 'Error of the last reload'}, text.slice(0, 4000)),
      el('p', {}, 'The configuration before it stays active. Correct the file; it is loaded again '
        + 'when it changes.'),
    );
  }
}

/** Age in whole minutes after the first one, so that the text rarely changes. */
function ago(ms: number): string {
  if (ms < 60_000) return `${Math.max(0, Math.round(ms / 1000))} s ago`;
  return `${format.duration(Math.floor(ms / 60_000) * 60_000)} ago`;
}
