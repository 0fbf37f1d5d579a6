// Active policies with their present rates, and the simulation of another limit.

import {errorText, getJson} from './api.js';
import {byId, Cards, el, foreign, Rows, setText} from './dom.js';
import {policyRates} from './figures.js';
import * as format from './format.js';
import type {Conditions, Override, Policy, PolicyRates, Sample} from './types.js';

const MAX_ROWS = 200;
const MAX_OVERRIDES = 100;
const MAX_COMMANDS = 20;

export class Policies {
  private policies: Policy[] = [];
  private sample: Sample | undefined;
  private configFile = 'tidegate.yaml';
  private loads = 0;
  private readonly cards = new Cards('Active policies', [
    {name: 'policy'},
    {name: 'allowed/s', class: 'number'},
    {name: 'denied/s', class: 'number'},
    {name: 'shadow/s', class: 'number'},
    {name: 'limit'},
    {name: 'applies to'},
    {name: 'counted by'},
    {name: 'overrides'},
  ]);
  private readonly rows = new Rows<Policy>(
    this.cards.body,
    ({name, rule}) => JSON.stringify([name, rule]),
    (policy) => this.row(policy),
  );
  private rates = new Map<string, HTMLTableCellElement[]>();
  /** Lines of the policies that no request has matched, by the name of the policy. */
  private unmatched = new Map<string, HTMLElement>();
  private readonly filter = byId<HTMLInputElement>('policy-filter');
  private readonly message = byId('policies-message');
  private readonly choice = byId<HTMLSelectElement>('what-if-policy');

  constructor(container: HTMLElement) {
    container.append(this.cards.table);
    this.filter.addEventListener('input', () => this.render());
    this.choice.addEventListener('change', () => this.showCommand());
    const copy = byId<HTMLButtonElement>('what-if-copy');
    copy.addEventListener('click', () => {
      const text = byId('what-if').textContent ?? '';
      void navigator.clipboard?.writeText(text).then(
        () => setText(copy, 'Copied'),
        () => setText(copy, 'Copy failed'),
      );
    });
    // The clipboard needs a secure context: loopback or HTTPS.
    copy.hidden = !navigator.clipboard;
    copy.addEventListener('blur', () => setText(copy, 'Copy'));
  }

  async load(): Promise<void> {
    this.loads += 1;
    const load = this.loads;
    try {
      const policies = await getJson<Policy[]>('/v1/policies');
      if (load !== this.loads) return;
      this.policies = policies;
      this.render();
      this.fillChoice();
    } catch (error) {
      if (load === this.loads) setText(this.message, errorText(error));
    }
  }

  setConfigFile(file: string | null): void {
    const name = file ?? 'tidegate.yaml';
    if (name === this.configFile) return;
    this.configFile = name;
    this.showCommand();
  }

  /** Shows the rates of a sample. */
  update(sample: Sample | undefined): void {
    this.sample = sample;
    for (const [name, cells] of this.rates) showRates(cells, policyRates(sample, name));
    for (const [name, line] of this.unmatched) {
      if (policyRates(sample, name).some((rate) => rate > 0)) {
        line.remove();
        this.unmatched.delete(name);
      }
    }
  }

  private render(): void {
    const wanted = this.filter.value.trim().toLowerCase();
    const found = this.policies.filter(({name, rule}) =>
      `${name} ${rule ?? ''}`.toLowerCase().includes(wanted));
    this.rows.update(found.slice(0, MAX_ROWS));
    const names = new Set(found.slice(0, MAX_ROWS).map(({name}) => name));
    for (const name of this.rates.keys()) if (!names.has(name)) this.rates.delete(name);
    this.cards.table.hidden = found.length === 0;
    setText(this.message, this.policies.length === 0
      ? 'No policies: every request is allowed.'
      : found.length === 0 ? 'No policy has such a name.'
        : found.length > MAX_ROWS ? `The first ${MAX_ROWS} of ${found.length}.` : '');
    this.update(this.sample);
  }

  private row(policy: Policy): HTMLTableRowElement {
    const name = el('div', {}, foreign(policy.name, 48));
    if (policy.mode !== 'enforce') name.append(' ', el('span', {class: 'badge'}, policy.mode));
    if (policy.rule) name.append(el('div', {class: 'detail'}, 'rule ', foreign(policy.rule, 48)));
    const match = matchCell(policy);
    this.unmatched.delete(policy.name);
    if (policy.matched === false) {
      const line = el('div', {class: 'warn'}, 'no request has matched it since the start');
      match.append(line);
      this.unmatched.set(policy.name, line);
    }
    const row = this.cards.row(
      name, '', '', '', limitCell(policy), match, keyCell(policy),
      overridesCell(policy),
    );
    const cells = Array.from(row.cells).slice(1, 4) as HTMLTableCellElement[];
    showRates(cells, policyRates(this.sample, policy.name));
    this.rates.set(policy.name, cells);
    return row;
  }

  private fillChoice(): void {
    const before = this.choice.value;
    const options = this.halvable().map(({name}, index) =>
      el('option', {value: index}, format.shortened(format.visible(name), 48)));
    this.choice.replaceChildren(el('option', {value: ''}, 'each of them'), ...options);
    this.choice.value = before;
    if (this.choice.selectedIndex < 0) this.choice.selectedIndex = 0;
    this.showCommand();
  }

  private showCommand(): void {
    const all = this.halvable();
    const chosen = this.choice.value === ''
      ? all.slice(0, MAX_COMMANDS) : all.slice(Number(this.choice.value)).slice(0, 1);
    const file = quoted(this.configFile);
    const commands = chosen.map(({name, limit}) =>
      `tidegate simulate --access-log access.log --config ${file} `
      + `--policy ${quoted(name)} --limit ${Math.floor(limit / 2)}`);
    setText(byId('what-if'), commands.join('\n') || '# no policy has a limit above 1');
  }

  /** Policies that can be simulated with half their limit. Envoy's rules cannot. */
  private halvable(): Policy[] {
    return this.policies.slice(0, MAX_ROWS).filter(({limit, rule}) => limit > 1 && !rule);
  }
}

function showRates(cells: HTMLTableCellElement[], rates: PolicyRates): void {
  cells.forEach((cell, outcome) => {
    const value = rates[outcome as 0 | 1 | 2];
    setText(cell, format.rate(value));
    cell.classList.toggle('bad', outcome === 1 && value > 0);
    cell.classList.toggle('warn', outcome === 2 && value > 0);
  });
}

/** Text as one word of a shell. */
function quoted(text: string): string {
  const shown = format.visible(text);
  return /^[\w./:@%+-]+$/.test(shown) ? shown : `'${shown.replaceAll("'", `'\\''`)}'`;
}

/** Limits by the value of an attribute. */
function limitLines({limits}: Policy): HTMLElement[] {
  if (!limits) return [];
  const lines = Object.entries(limits.values).slice(0, 20).map(([value, limit]) =>
    el('div', {class: 'detail'}, foreign(value, 40), `: ${format.count(limit)}`));
  return [el('div', {class: 'detail'}, `by ${format.visible(limits.attribute)}:`), ...lines];
}

function limitCell(policy: Policy): HTMLElement {
  const details = [policy.algorithm];
  if (policy.algorithm.endsWith('bucket') && policy.burst !== policy.limit) {
    details.push(`burst ${format.count(policy.burst)}`);
  }
  if (policy.count_denied) details.push('counts denied requests');
  if (policy.refund_on) details.push(`refunds ${format.visible(policy.refund_on.status.join(', '))}`);
  if (policy.block_for_ms?.length) {
    details.push(`blocks for ${policy.block_for_ms.map(format.windowText).join(', ')}`);
  }
  if (typeof policy.cost === 'number' && policy.cost !== 1) details.push(`cost ${policy.cost}`);
  if (typeof policy.cost === 'object' && policy.cost !== null) {
    details.push(`cost by ${format.visible(policy.cost.attribute)}`);
  }
  return el('div', {},
    format.limitText(policy.limit, policy.window_ms, policy.calendar),
    ...limitLines(policy),
    el('div', {class: 'detail'}, details.join(', ')),
    el('div', {class: 'detail'}, `without the store: ${policy.on_store_failure}`));
}

function matchCell({match, unless}: Policy): HTMLElement {
  const conditions = conditionLines(match ?? {});
  const cell = conditions.length === 0
    ? el('div', {}, el('div', {class: 'muted'}, 'all requests')) : el('div', {}, ...conditions);
  for (const entry of (unless ?? []).slice(0, 20)) {
    cell.append(el('div', {class: 'detail'}, 'unless'), ...conditionLines(entry));
  }
  return cell;
}

function conditionLines(conditions: Conditions): HTMLElement[] {
  const entries = Object.entries(conditions).filter(([, values]) => values.length > 0);
  return entries.slice(0, 20).map(([name, values]) => {
    const all = Array.isArray(values) ? values : [values];
    const rest = all.length > 5 ? ` and ${all.length - 5} more` : '';
    return el('div', {}, el('span', {class: 'detail'}, `${format.visible(name)} `),
      foreign(all.slice(0, 5).join(', '), 80), rest);
  });
}

function keyCell({key, missing_key: missing, show_keys: shown}: Policy): HTMLElement {
  const cell = el('div', {});
  if (key.length === 0) cell.append(el('span', {class: 'muted'}, 'one count for all'));
  else cell.append(foreign(key.join(', '), 80));
  if (key.length > 0 && missing) {
    cell.append(el('div', {class: 'detail'}, `if absent: ${missing}`));
  }
  if (shown !== 'plain') cell.append(el('div', {class: 'detail'}, `keys shown ${shown}`));
  return cell;
}

function overridesCell({overrides, override_count: total}: Policy): HTMLElement | string {
  const list = Array.isArray(overrides) ? overrides.slice(0, MAX_OVERRIDES) : [];
  const number = total ?? (Array.isArray(overrides) ? overrides.length : (overrides ?? 0));
  if (number === 0) return '–';
  if (list.length === 0) return format.count(number);
  const items = list.map((override: Override) => el('li', {}, foreign(override.key, 40),
    `: ${override.window_ms
      ? format.limitText(override.limit, override.window_ms, override.calendar)
      : format.count(override.limit)}`));
  if (number > list.length) items.push(el('li', {}, `and ${number - list.length} more`));
  return el('details', {}, el('summary', {}, format.plural(number, 'key')), el('ul', {}, ...items));
}
