// Samples of the last 15 minutes, as the server sends them, and the series of the charts.

import type {HistoryBody, PolicyRates, Sample} from './types.js';

export const HISTORY_MS = 15 * 60 * 1000;
/** Samples that are further apart have a gap between them: the server was down, or the page. */
const MAX_INTERVALS_WITHOUT_GAP = 3.5;

export type Series = (number | null)[];

export class History {
  private samples: Sample[] = [];
  private intervalMs = 1000;

  /** Takes the history of the server. A restarted server has none of the time before. */
  replace(body: HistoryBody): void {
    this.intervalMs = body.interval_ms || 1000;
    const [first] = body.samples;
    const older = first ? this.samples.filter((sample) => sample.at_ms < first.at_ms) : [];
    this.samples = [...older, ...body.samples];
    this.trim();
  }

  push(sample: Sample): void {
    const last = this.last();
    if (last && sample.at_ms <= last.at_ms) {
      // The clock of the server was set back: only one order of times can be drawn.
      this.samples = this.samples.filter((other) => other.at_ms < sample.at_ms);
    }
    this.samples.push(sample);
    this.trim();
  }

  clear(): void {
    this.samples = [];
  }

  last(): Sample | undefined {
    return this.samples.at(-1);
  }

  /** Samples of the last milliseconds. */
  recent(lengthMs: number): Sample[] {
    const last = this.last();
    return last ? this.samples.filter((sample) => sample.at_ms > last.at_ms - lengthMs) : [];
  }

  /** Times in seconds, and one series for each function; `null` marks a gap. */
  series(lengthMs: number, values: ((sample: Sample) => number | null)[]): Series[] {
    const times: number[] = [];
    const series: Series[] = values.map(() => []);
    let previous: number | undefined;
    for (const sample of this.recent(lengthMs)) {
      if (previous !== undefined
        && sample.at_ms - previous > this.intervalMs * MAX_INTERVALS_WITHOUT_GAP) {
        times.push((previous + this.intervalMs) / 1000);
        for (const each of series) each.push(null);
      }
      previous = sample.at_ms;
      times.push(sample.at_ms / 1000);
      values.forEach((value, index) => series[index]?.push(value(sample)));
    }
    return [times, ...series];
  }

  /** Sum of the rates of each policy, in all samples. */
  policyTotals(): Map<string, PolicyRates> {
    const totals = new Map<string, PolicyRates>();
    for (const {policies} of this.samples) {
      for (const name in policies) {
        const rates = policies[name] as PolicyRates;
        const total = totals.get(name);
        if (total) {
          for (const outcome of [0, 1, 2] as const) total[outcome] += rates[outcome];
        } else {
          totals.set(name, [...rates]);
        }
      }
    }
    return totals;
  }

  private trim(): void {
    const last = this.last();
    if (!last) return;
    const keep = this.samples.findIndex((sample) => sample.at_ms > last.at_ms - HISTORY_MS);
    if (keep > 0) this.samples.splice(0, keep);
  }
}
