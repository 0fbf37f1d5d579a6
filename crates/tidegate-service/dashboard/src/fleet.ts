// All instances that share the store, what differs between them, and what happened to them.

import {errorText, getJson, hasToken} from './api.js';
import {byId, Cards, el, foreign, Rows, setText, show} from './dom.js';
import * as format from './format.js';
import type {EventsBody, FleetBody, Instance, JournalEvent} from './types.js';

const INTERVAL_MS = 5_000;
const MAX_INSTANCES = 200;
const MAX_EVENTS = 50;
/** Events that need attention, and those that end a problem. */
const EVENT_STYLES: Record<string, string> = {
  'reload-failed': 'bad', 'outage-started': 'bad', 'restart-pending': 'warn', failover: 'warn',
  'outage-ended': 'ok',
};

export class Fleet {
  body: FleetBody | null = null;
  private timer: number | undefined;
  private readonly sums = el('p', {class: 'muted'});
  private readonly cards = new Cards('Instances', [
    {name: 'instance'},
    {name: 'version'},
    {name: 'configuration'},
    {name: 'store'},
    {name: 'up', class: 'number'},
    {name: 'allowed/s', class: 'number'},
    {name: 'denied/s', class: 'number'},
  ]);
  private readonly rows = new Rows<Instance & {up: string}>(
    this.cards.body, ({name, started_at_ms: at}) => `${name} ${at}`, (it) => this.row(it));
  private readonly events = new Rows<JournalEvent>(
    byId<HTMLTableSectionElement>('events-rows'),
    ({instance, number, at_ms: at}) => `${instance} ${number} ${at}`, eventRow);

  constructor(private readonly onChange: () => void) {
    byId('fleet').append(this.sums, this.cards.table);
  }

  start(): void {
    this.stop();
    void this.load();
  }

  stop(): void {
    clearTimeout(this.timer);
    this.body = null;
  }

  private async load(): Promise<void> {
    const had = hasToken();
    try {
      if (!document.hidden) {
        this.show(await getJson<FleetBody>('/v1/fleet'),
          await getJson<EventsBody>(`/v1/events?limit=${MAX_EVENTS}`));
      }
    } catch (error) {
      setText(byId('events-message'), errorText(error));
      // The login starts it again.
      if (had && !hasToken()) return;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => void this.load(), INTERVAL_MS);
  }

  private show(fleet: FleetBody, {events, error}: EventsBody): void {
    this.body = fleet;
    const {size, rates} = fleet;
    setText(this.sums, fleet.error !== null
      ? `Only this instance is known: ${format.visible(fleet.error)}`
      : `${format.plural(size, 'instance')}, ${format.plural(fleet.configurations, 'configuration')}: `
        + `${format.rate(rates.allowed)} allowed/s, ${format.rate(rates.denied)} denied/s.`);
    this.rows.update(fleet.instances.slice(0, MAX_INSTANCES).map((instance) => ({
      ...instance, up: instance.started_at_ms > 0
        ? format.age(fleet.now_ms - instance.started_at_ms) : '–',
    })));
    this.events.update(events);
    show(byId('events'), events.length > 0);
    setText(byId('events-message'),
      error === null ? '' : `Only events of this instance: ${format.visible(error)}`);
    this.onChange();
  }

  private row(instance: Instance & {up: string}): HTMLTableRowElement {
    const {name, differs} = instance;
    const style = (field: string) => (differs.includes(field) ? 'warn' : '');
    const heading = el('div', {}, name === null ? 'not known' : foreign(name));
    if (instance.this) heading.append(' ', el('span', {class: 'detail'}, 'this one'));
    if (differs.length > 0) {
      heading.append(' ', el('span', {class: 'badge'}, `differs in ${differs.join(', ')}`));
    }
    const configuration = el('div', {}, foreign(instance.config_hash));
    for (const {text} of instance.changes) {
      configuration.append(el('div', {class: 'detail'}, foreign(text, 200, 'prose')));
    }
    const isDown = name !== null && (instance.fallback || !instance.store_up);
    return this.cards.row(
      heading,
      {child: instance.version || '–', class: style('version')},
      {child: configuration, class: style('configuration')},
      {child: isDown ? 'down' : name === null ? '–' : 'up', class: isDown ? 'bad' : ''},
      instance.up,
      format.rate(instance.allowed),
      format.rate(instance.denied),
    );
  }
}

function eventRow({at_ms: at, instance, event, text}: JournalEvent): HTMLTableRowElement {
  return el('tr', {},
    el('td', {class: 'when'}, format.dateTime(at)),
    el('th', {scope: 'row'}, foreign(instance, 48)),
    el('td', {class: EVENT_STYLES[event]}, foreign(text, 400, 'prose')));
}
