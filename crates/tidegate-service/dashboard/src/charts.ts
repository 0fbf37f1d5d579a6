// Charts over time. Each has a table below it with the same values as text: the present ones, or
// those under the cursor, and the highest.

import uPlot from 'uplot';
import {el, foreign, setText} from './dom.js';
import * as format from './format.js';
import type {History} from './history.js';
import type {Sample} from './types.js';

export interface Line {
  id: string;
  label: string;
  /** Name of a colour in app.css. */
  color: string;
  value: (sample: Sample) => number | null;
  dash?: number[];
  isFilled?: boolean;
}

interface ChartOptions {
  /** Element with the picture and the table. */
  figure: HTMLElement;
  caption: string;
  format: (value: number | null) => string;
  lines: Line[];
  /** Text in place of the table if there are no lines. */
  empty?: string;
}

const HEIGHT = 180;
const MIN_WIDTH = 120;
/** Shortest time that fills a chart, so that the first seconds are not stretched. */
const MIN_SPAN_S = 60;

const probe = el('span', {hidden: true});

/** Present value of a colour, which depends on the theme. */
function color(name: string, alpha = 1): string {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  const value = getComputedStyle(probe).color;
  return alpha === 1 ? value : value.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
}

const charts = new Set<Chart>();

/** Draws all charts again, after a change of the theme. */
export function redrawCharts(): void {
  for (const chart of charts) chart.redraw();
}

export class Chart {
  private plot: uPlot | null = null;
  private lines: Line[];
  private lengthMs = 0;
  private readonly picture = el('div', {class: 'picture', role: 'img'});
  private readonly legend: HTMLTableElement;
  private readonly table = el('tbody');
  private readonly when = el('th', {scope: 'col', class: 'number'}, 'now');
  private readonly emptyText = el('p', {class: 'empty', hidden: true});
  private cells = new Map<string, {now: HTMLElement; max: HTMLElement}>();
  private data: uPlot.AlignedData = [[]];

  constructor(private readonly options: ChartOptions) {
    this.lines = options.lines;
    setText(this.emptyText, options.empty ?? '');
    this.legend = el(
      'table',
      {class: 'legend'},
      el('caption', {class: 'hidden-text'}, options.caption),
      el(
        'thead',
        {},
        el('tr', {}, el('th', {scope: 'col'}, 'series'), this.when,
          el('th', {scope: 'col', class: 'number'}, 'highest')),
      ),
      this.table,
    );
    options.figure.append(this.picture, this.legend, this.emptyText);
    this.build();
    new ResizeObserver(() => {
      const width = this.width();
      if (this.plot && this.plot.width !== width) this.plot.setSize({width, height: HEIGHT});
    }).observe(this.picture);
    charts.add(this);
  }

  /** Changes the lines, if they are others. */
  setLines(lines: Line[]): void {
    const ids = (all: Line[]) => JSON.stringify(all.map(({id, color}) => [id, color]));
    if (ids(lines) === ids(this.lines)) return;
    this.lines = lines;
    this.build();
  }

  update(history: History, lengthMs: number): void {
    this.lengthMs = lengthMs;
    this.data = history.series(lengthMs, this.lines.map(({value}) => value)) as uPlot.AlignedData;
    this.plot?.setData(this.data);
    this.updateTable();
  }

  redraw(): void {
    this.plot?.redraw(false);
  }

  private width(): number {
    return Math.max(MIN_WIDTH, Math.floor(this.picture.clientWidth));
  }

  private build(): void {
    this.plot?.destroy();
    this.cells.clear();
    this.table.replaceChildren();
    for (const line of this.lines) {
      const swatch = el('span', {class: `swatch ${line.color}${line.dash ? ' dashed' : ''}`});
      const now = el('td', {class: 'number'});
      const max = el('td', {class: 'number'});
      const name = el('th', {scope: 'row'}, swatch, foreign(line.label, 40, 'prose'));
      this.table.append(el('tr', {}, name, now, max));
      this.cells.set(line.id, {now, max});
    }
    this.emptyText.hidden = this.lines.length > 0;
    this.legend.hidden = this.lines.length === 0;
    const axis = {
      stroke: () => color('muted'),
      font: '11px system-ui, sans-serif',
      grid: {stroke: () => color('grid'), width: 1},
      ticks: {stroke: () => color('grid'), width: 1, size: 4},
    };
    this.plot = new uPlot(
      {
        width: this.width(),
        height: HEIGHT,
        padding: [8, 24, 0, 0],
        legend: {show: false},
        cursor: {
          sync: {key: 'tidegate'},
          drag: {x: false, y: false},
          points: {size: 6},
          y: false,
        },
        scales: {
          x: {time: true, range: (_, min, max) => this.range(min, max)},
          y: {range: (_, _min, max) => [0, max > 0 ? max * 1.1 : 1]},
        },
        axes: [
          {
            ...axis,
            size: 28,
            space: 70,
            values: (_, splits) => splits.map((seconds) => format.clock(seconds * 1000)),
          },
          {
            ...axis,
            size: 58,
            space: 28,
            values: (_, splits) => splits.map((value) => this.options.format(value)),
          },
        ],
        series: [
          {},
          ...this.lines.map(
            (line): uPlot.Series => ({
              label: line.id,
              scale: 'y',
              stroke: () => color(line.color),
              width: 1.5,
              points: {show: false},
              ...(line.dash ? {dash: line.dash} : {}),
              ...(line.isFilled ? {fill: () => color(line.color, 0.12)} : {}),
            }),
          ),
        ],
        hooks: {setCursor: [() => this.updateTable()]},
      },
      [[], ...this.lines.map(() => [])] as uPlot.AlignedData,
      this.picture,
    );
  }

  private range(min: number, max: number): [number, number] {
    const end = Number.isFinite(max) ? max : Date.now() / 1000;
    const start = Math.min(Number.isFinite(min) ? min : end, end - MIN_SPAN_S);
    return [Math.max(start, end - this.lengthMs / 1000), end];
  }

  private updateTable(): void {
    const times = this.data[0] ?? [];
    const index = this.plot?.cursor.idx ?? null;
    const at = index === null ? undefined : times[index];
    setText(this.when, at === undefined ? 'now' : format.clock(at * 1000));
    const shown = at === undefined ? times.length - 1 : (index as number);
    const summary: string[] = [];
    this.lines.forEach((line, position) => {
      const values = this.data[position + 1] ?? [];
      const cells = this.cells.get(line.id);
      if (!cells) return;
      let max: number | null = null;
      for (const value of values) {
        if (value !== null && value !== undefined && (max === null || value > max)) max = value;
      }
      const now = this.options.format(values[shown] ?? null);
      setText(cells.now, now);
      setText(cells.max, this.options.format(max));
      summary.push(`${format.visible(line.label)} ${now}`);
    });
    if (at === undefined) {
      const label = `${this.options.caption}. Now: ${summary.join(', ') || 'no data'}.`;
      this.picture.setAttribute('aria-label', label.slice(0, 500));
    }
  }
}
