// The four charts, the policies that they show, and the figures above them.

import {Chart, type Line} from './charts.js';
import {byId, setText} from './dom.js';
import * as format from './format.js';
import {HISTORY_MS, type History} from './history.js';
import type {PolicyRates, Sample} from './types.js';

const MAX_POLICY_LINES = 8;
const OUTCOMES = ['allowed', 'denied', 'shadow-denied'] as const;
const SOURCES: [string, string, string][] = [
  ['store', 'store', 'line-1'],
  ['deny-cache', 'deny cache', 'line-2'],
  ['local', 'local (fallback)', 'line-3'],
  ['allow', 'allowed without the store', 'line-4'],
  ['deny', 'denied without the store', 'line-5'],
  ['missing-key', 'denied without a key', 'line-6'],
  ['override', 'blocked by an override', 'line-7'],
];

export class Figures {
  private readonly requests = new Chart({
    figure: byId('chart-requests'),
    caption: 'Requests per second',
    format: format.rate,
    lines: [
      line('allowed', 'allowed', 'ok', (sample) => sample.allowed, {isFilled: true}),
      line('denied', 'denied', 'bad', (sample) => sample.denied, {isFilled: true}),
      line('shadow', 'shadow-denied', 'warn', (sample) => sample.shadow_denied, {dash: [5, 3]}),
      line('errors', 'errors', 'line-5', (sample) => sample.errors, {dash: [2, 2]}),
    ],
  });
  private readonly latency = new Chart({
    figure: byId('chart-latency'),
    caption: 'Time of a decision',
    format: format.latency,
    lines: [
      line('p50', 'p50', 'line-1', (sample) => sample.latency_ms?.p50 ?? null),
      line('p90', 'p90', 'line-2', (sample) => sample.latency_ms?.p90 ?? null),
      line('p99', 'p99', 'line-3', (sample) => sample.latency_ms?.p99 ?? null),
      line('store', 'store p99', 'line-5',
        (sample) => sample.store_latency_ms?.p99 ?? null, {dash: [5, 3]}),
    ],
  });
  private readonly policies = new Chart({
    figure: byId('chart-policies'),
    caption: 'Decisions per second by policy',
    format: format.rate,
    lines: [],
    empty: 'No such decisions in this time.',
  });
  private readonly sources = new Chart({
    figure: byId('chart-sources'),
    caption: 'Decisions per second by source',
    format: format.rate,
    lines: SOURCES.map(([id, label, color]) =>
      line(id, label, color, (sample) => sample.sources[id] ?? 0),
    ),
  });
  private outcome: 0 | 1 | 2 = 1;
  private lengthMs = HISTORY_MS;
  private colors = new Map<string, string>();

  constructor(private readonly history: History) {
    const outcome = byId<HTMLSelectElement>('outcome');
    outcome.addEventListener('change', () => {
      this.outcome = Number(outcome.value) as 0 | 1 | 2;
      this.update();
    });
    const range = byId<HTMLSelectElement>('range');
    range.addEventListener('change', () => {
      this.lengthMs = Number(range.value) * 60_000;
      this.update();
    });
  }

  update(): void {
    this.policies.setLines(this.linesOfPolicies());
    for (const chart of [this.requests, this.latency, this.policies, this.sources]) {
      chart.update(this.history, this.lengthMs);
    }
    const sample = this.history.last();
    setTile('allowed', sample, () => format.rate(sample?.allowed));
    setTile('denied', sample, () => format.rate(sample?.denied));
    setTile('shadow', sample, () => format.rate(sample?.shadow_denied));
    setTile('errors', sample, () => format.rate(sample?.errors));
    setTile('p50', sample, () => format.latency(sample?.latency_ms?.p50));
    setTile('p99', sample, () => format.latency(sample?.latency_ms?.p99));
    setTile('store-p99', sample, () => format.latency(sample?.store_latency_ms?.p99));
    byId('tile-denied').classList.toggle('bad', (sample?.denied ?? 0) > 0);
    byId('tile-shadow').classList.toggle('warn', (sample?.shadow_denied ?? 0) > 0);
    byId('tile-errors').classList.toggle('bad', (sample?.errors ?? 0) > 0);
  }

  /** The policies with the most decisions of the chosen outcome. Each keeps its colour. */
  private linesOfPolicies(): Line[] {
    const totals = [...this.history.policyTotals()]
      .filter(([, rates]) => rates[this.outcome] > 0)
      .sort((a, b) => b[1][this.outcome] - a[1][this.outcome] || (a[0] < b[0] ? -1 : 1))
      .slice(0, MAX_POLICY_LINES)
      .map(([name]) => name);
    for (const name of this.colors.keys()) {
      if (!totals.includes(name)) this.colors.delete(name);
    }
    const free = Array.from({length: MAX_POLICY_LINES}, (_, index) => `line-${index + 1}`)
      .filter((color) => ![...this.colors.values()].includes(color));
    return totals.map((name) => {
      const color = this.colors.get(name) ?? free.shift() ?? 'line-1';
      this.colors.set(name, color);
      const value = (sample: Sample) => policyRates(sample, name)[this.outcome];
      return line(`${OUTCOMES[this.outcome]} ${name}`, name, color, value);
    });
  }
}

/** Rates of a policy in a sample, which leaves out those without decisions. */
export function policyRates(sample: Sample | undefined, name: string): PolicyRates {
  return sample && Object.hasOwn(sample.policies, name)
    ? (sample.policies[name] as PolicyRates)
    : [0, 0, 0];
}

function line(
  id: string,
  label: string,
  color: string,
  value: (sample: Sample) => number | null,
  more: Partial<Line> = {},
): Line {
  return {id, label, color, value, ...more};
}

function setTile(name: string, sample: Sample | undefined, text: () => string): void {
  setText(byId(`value-${name}`), sample ? text() : '–');
}
