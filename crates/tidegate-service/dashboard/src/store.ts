// Store: its nodes, the fallback, and the debits of the last outage.

import {Cards, el, foreign, setText, show, Rows} from './dom.js';
import {lostPart} from './findings.js';
import * as format from './format.js';
import type {Status, StoreNode, Upstream} from './types.js';

const MAX_ROWS = 200;
const CIRCUITS = {closed: 'closed', open: 'open: no calls', 'half-open': 'half-open: probing'};

export class Store {
  private readonly facts = el('dl', {class: 'facts'});
  private readonly nodes = new Cards('Nodes of Redis', [
    {name: 'node'},
    {name: 'connection'},
    {name: 'circuit'},
    {name: 'p50', class: 'number'},
    {name: 'p99', class: 'number'},
    {name: 'in flight', class: 'number'},
    {name: 'last error'},
  ]);
  private readonly upstreams = new Cards('Upstreams of the gateway', [
    {name: 'upstream'},
    {name: 'state'},
  ]);
  private readonly upstreamsHeading = el('h3', {hidden: true}, 'Upstreams of the gateway');
  private readonly nodeRows: Rows<StoreNode>;
  private readonly upstreamRows: Rows<Upstream>;
  private shownFacts = '';

  constructor(container: HTMLElement) {
    this.nodeRows = new Rows(this.nodes.body, ({address}) => address, (node) => this.row(node));
    this.upstreamRows = new Rows(
      this.upstreams.body,
      ({url}) => url,
      ({url, up, ejected}) => this.upstreams.row(
        foreign(url),
        up && !ejected ? 'up'
          : {child: ejected ? 'ejected: gets no requests for now' : 'failing', class: 'bad'},
      ),
    );
    container.append(
      this.facts, this.nodes.table, this.upstreamsHeading, this.upstreams.table);
  }

  update({store, upstreams}: Status, nowMs: number): void {
    const {fallback, memory} = store;
    const facts: [name: string, value: string, style?: string | undefined][] = [];
    facts.push(['kind', store.kind === 'redis' ? 'Redis' : 'memory of this process']);
    const part = lostPart(store);
    const down = part === null ? 'down' : `partly down: ${part} unavailable`;
    if (store.up && memory?.full) {
      facts.push(['state', 'full: no room for new keys', 'bad']);
    } else {
      facts.push(['state', store.up ? 'up' : down, store.up ? 'ok' : 'bad']);
    }
    if (fallback) {
      const since = fallback.since_ms === null
        ? '' : ` for ${format.age(nowMs - fallback.since_ms)}`;
      facts.push(['fallback', fallback.active ? `active${since}` : 'not active',
        fallback.active ? 'bad' : 'ok']);
      facts.push(['instances that share the limits', format.count(fallback.instances)]);
      const debits = `${format.plural(fallback.pending_debit_units, 'unit')} of `
        + format.plural(fallback.pending_debits, 'key');
      facts.push(['pending debits', fallback.pending_debit_units > 0 ? debits : 'none',
        fallback.pending_debit_units > 0 ? 'warn' : undefined]);
    }
    if (memory) {
      const max = memory.max_keys === null ? '' : ` of ${format.count(memory.max_keys)}`;
      const name = store.kind === 'redis' ? 'keys of the fallback' : 'keys in memory';
      facts.push([name, `${format.count(memory.keys)}${max}`]);
    }
    if (store.deny_cache_entries !== null && store.deny_cache_entries !== undefined) {
      facts.push(['denials in the cache', format.count(store.deny_cache_entries)]);
    }
    const state = JSON.stringify(facts);
    if (state !== this.shownFacts) {
      this.shownFacts = state;
      this.facts.replaceChildren(...facts.map(([name, value, style]) =>
        el('div', {}, el('dt', {}, name), el('dd', {class: style}, value))));
    }
    this.nodeRows.update(store.nodes.slice(0, MAX_ROWS));
    show(this.nodes.table, store.nodes.length > 0);
    this.upstreamRows.update((upstreams ?? []).slice(0, MAX_ROWS));
    show(this.upstreams.table, (upstreams ?? []).length > 0);
    show(this.upstreamsHeading, (upstreams ?? []).length > 0);
  }

  private row(node: StoreNode): HTMLTableRowElement {
    const isWell = node.connected && node.circuit === 'closed';
    return this.nodes.row(
      el('div', {}, foreign(node.address),
        node.primary === false && el('span', {class: 'detail'}, ' Sentinel')),
      {child: node.connected ? 'connected' : 'not connected', class: node.connected ? 'ok' : 'bad'},
      {
        child: CIRCUITS[node.circuit] ?? node.circuit,
        class: node.circuit === 'closed' ? '' : 'bad',
      },
      format.latency(node.latency_ms?.p50),
      format.latency(node.latency_ms?.p99),
      format.count(node.in_flight),
      node.last_error && !isWell ? foreign(node.last_error, 200, 'prose') : '–',
    );
  }
}

/** Shows the version and the uptime. */
export function showInstance(element: HTMLElement, status: Status, nowMs: number): void {
  const up = format.age(nowMs - status.started_at_ms);
  const name = status.instance ? `${format.visible(status.instance)}, ` : '';
  setText(element, `${name}version ${status.version}, up ${up}`);
  element.title = `started ${format.dateTime(status.started_at_ms)}`;
}
