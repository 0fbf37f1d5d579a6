// Form that changes the limit of a key, or of all keys of a policy, for a while.

import {errorText, getJson, request} from './api.js';
import {byId, el, foreign, setText, show} from './dom.js';
import * as format from './format.js';
import type {LookupResult, OverrideAudit, OverrideState} from './types.js';

const ALL = '*';
const MAX_CHANGES = 5;
/** A form of another page cannot send it. */
const JSON_TYPE = {'content-type': 'application/json'};
const TIMES: Record<string, number> = {
  '15m': 900_000, '1h': 3_600_000, '2h': 7_200_000, '1d': 86_400_000,
};

export class OverrideForm {
  private readonly dialog = byId<HTMLDialogElement>('override');
  private readonly keys = byId<HTMLSelectElement>('override-keys');
  private readonly mode = byId<HTMLSelectElement>('override-mode');
  private readonly limit = byId<HTMLInputElement>('override-limit');
  private readonly time = byId<HTMLSelectElement>('override-time');
  private readonly reason = byId<HTMLInputElement>('override-reason');
  private readonly preview = byId('override-preview');
  private readonly message = byId('override-message');
  private readonly remove = byId<HTMLButtonElement>('override-remove');
  private result: LookupResult | null = null;
  /** The key in plain text, by which the service knows one that it shows as a hash. */
  private key = '';

  /** `onChange` gets a sentence about what was done. */
  constructor(private readonly onChange: (note: string) => void) {
    const form = byId<HTMLFormElement>('override-form');
    form.addEventListener('input', () => this.showPreview());
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      void this.send(() => this.set());
    });
    byId('override-cancel').addEventListener('click', () => this.dialog.close());
    this.remove.addEventListener('click', () => void this.send(() => this.takeBack()));
  }

  open(result: LookupResult, key: string): void {
    this.result = result;
    this.key = key;
    const current = result.run_time;
    byId('override-text').replaceChildren(
      'Policy ', el('strong', {}, foreign(result.policy)), ', key ',
      el('strong', {}, foreign(result.key)),
      '. Within a second, a change is in force on all instances that share the store. ',
      'It is logged.',
    );
    this.keys.value = current?.key === ALL ? ALL : 'key';
    this.mode.value = current?.mode ?? 'limit';
    this.limit.value = String(result.limit ?? '');
    this.reason.value = '';
    setText(this.message, '');
    show(this.remove, current !== undefined);
    byId('override-changes').replaceChildren();
    this.showPreview();
    this.dialog.showModal();
    this.limit.select();
    void this.showChanges(result);
  }

  private showPreview(): void {
    const {result} = this;
    if (!result) return;
    const isNumber = this.mode.value === 'limit';
    this.limit.disabled = !isNumber;
    const mode = result.run_time?.mode;
    const {window_ms: window, calendar} = result;
    const limitText = (limit: number | undefined, otherwise: string): string =>
      limit === undefined || window === undefined
        ? otherwise : format.limitText(limit, window, calendar);
    const before = mode !== undefined ? modeText(mode) : limitText(result.limit, '');
    const after = !isNumber
      ? modeText(this.mode.value)
      : limitText(Number(this.limit.value), this.limit.value);
    const time = TIMES[this.time.value];
    const end = time === undefined
      ? 'until it is taken back' : `until ${format.dateTime(Date.now() + time)}`;
    const who = this.keys.value === ALL ? 'every key of the policy' : 'this key';
    setText(this.preview, `${before} → ${after} for ${who}, ${end}`);
  }

  /** Shows who has changed the limit of this key, or of all keys. */
  private async showChanges(result: LookupResult): Promise<void> {
    try {
      const {changes} = await getJson<OverrideAudit>('/v1/overrides/audit?limit=200');
      if (this.result !== result) return;
      const own = changes.filter(({policy, key}) =>
        policy === result.policy && (key === result.key || key === ALL));
      byId('override-changes').replaceChildren(...own.slice(0, MAX_CHANGES).map((change) =>
        el('li', {},
          `${format.dateTime(change.at_ms)}: ${change.key === ALL ? 'all keys, ' : ''}`,
          `${stateText(change.before)} → ${stateText(change.after)}, by `,
          foreign(change.by), change.reason ? ': ' : '',
          change.reason !== '' && foreign(change.reason, 120, 'prose'))));
    } catch (error) {
      setText(this.message, errorText(error));
    }
  }

  private async send(call: () => Promise<string>): Promise<void> {
    try {
      const note = await call();
      this.dialog.close();
      this.onChange(note);
    } catch (error) {
      setText(this.message, `The limit was not changed: ${errorText(error)}`);
    }
  }

  private async set(): Promise<string> {
    const mode = this.mode.value;
    const limits = mode === 'limit' ? {limit: Number(this.limit.value)} : {mode};
    const policy = this.result?.policy;
    const key = this.keys.value === ALL ? ALL : this.key;
    const body = {policy, key, ...limits, expires_in: this.time.value, reason: this.reason.value};
    await request('/v1/overrides', {method: 'PUT', headers: JSON_TYPE, body: JSON.stringify(body)});
    return 'Limit changed.';
  }

  private async takeBack(): Promise<string> {
    const {policy = '', key = ''} = this.result?.run_time ?? {};
    const query = new URLSearchParams({policy, key, reason: this.reason.value});
    await request(`/v1/overrides?${query}`, {method: 'DELETE', headers: JSON_TYPE});
    return 'Override removed.';
  }
}

function modeText(mode: string): string {
  return mode === 'block' ? 'blocked' : 'unlimited';
}

function stateText(state: OverrideState | null): string {
  if (!state) return 'none';
  if (state.mode) return modeText(state.mode);
  const {limit, window: per, burst} = state;
  const parts = [limit === undefined ? '' : format.count(limit), per ? `per ${per}` : '',
    burst === undefined ? '' : `burst ${format.count(burst)}`];
  return parts.filter((part) => part !== '').join(' ');
}
