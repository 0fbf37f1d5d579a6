// Elements. Texts only ever become text nodes and attributes, never HTML: names and keys are chosen
// by clients.

import {shortened, visible} from './format.js';

type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | null | undefined | EventListener>;

/** Creates an element. Attributes that start with `on` are listeners. */
export function el<Name extends keyof HTMLElementTagNameMap>(
  name: Name,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[Name] {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === 'function') {
      element.addEventListener(key.slice(2), value);
    } else if (value === true) {
      element.setAttribute(key, '');
    } else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(key, String(value));
    }
  }
  for (const child of children) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** Returns an element of the page by its id. */
export function byId<Type extends HTMLElement = HTMLElement>(id: string): Type {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no #${id}`);
  return element as Type;
}

/** Sets a text only if it changes, so that selections and screen readers are not disturbed. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Shows or hides an element. */
export function show(element: HTMLElement, isShown: boolean): void {
  if (element.hidden === isShown) element.hidden = !isShown;
}

const MAX_SHOWN_CHARS = 64;

/** Text of a client: every character visible, long ones shortened with the rest in the title. */
export function foreign(text: string, maxLength = MAX_SHOWN_CHARS, style = 'foreign'): HTMLElement {
  const whole = visible(text);
  const short = shortened(whole, maxLength);
  // An empty text would be nothing to see.
  return el(
    'bdi',
    {class: style, dir: 'ltr', title: short === whole ? null : whole.slice(0, 1000)},
    short === '' ? '(empty)' : short,
  );
}

type Cell = Child | {child: Child; class: string};

/**
 * Table whose rows become cards on narrow screens. The roles are explicit, because browsers drop
 * them together with the layout of a table.
 */
export class Cards {
  readonly body = el('tbody', {role: 'rowgroup'});
  readonly table: HTMLTableElement;

  constructor(
    caption: string,
    private readonly columns: {name: string; class?: string}[],
  ) {
    const headings = columns.map((column) =>
      el('th', {scope: 'col', role: 'columnheader', class: column.class}, column.name),
    );
    this.table = el(
      'table',
      {class: 'cards', role: 'table'},
      el('caption', {class: 'hidden-text'}, caption),
      el('thead', {role: 'rowgroup'}, el('tr', {role: 'row'}, ...headings)),
      this.body,
    );
  }

  /** Creates a row; its first cell is its heading. */
  row(heading: Child, ...cells: Cell[]): HTMLTableRowElement {
    return el(
      'tr',
      {role: 'row'},
      el('th', {scope: 'row', role: 'rowheader'}, heading),
      ...cells.map((cell, index) => {
        const column = this.columns[index + 1];
        const isStyled = typeof cell === 'object' && cell !== null && 'child' in cell;
        return el(
          'td',
          {
            role: 'cell',
            'data-label': column?.name,
            class: `${column?.class ?? ''} ${isStyled ? cell.class : ''}`.trim() || null,
          },
          isStyled ? cell.child : cell,
        );
      }),
    );
  }
}

/** Rows that stay in the document and change in place, each with a key. */
export class Rows<Item> {
  private readonly rows = new Map<string, {row: HTMLTableRowElement; state: string}>();

  /** `create` makes the row of an item; a row with an equal state is kept as it is. */
  constructor(
    private readonly body: HTMLTableSectionElement,
    private readonly key: (item: Item) => string,
    private readonly create: (item: Item) => HTMLTableRowElement,
  ) {}

  update(items: Item[]): void {
    const wanted = new Set<string>();
    let position: Element | null = this.body.firstElementChild;
    for (const item of items) {
      const key = this.key(item);
      if (wanted.has(key)) continue;
      wanted.add(key);
      const state = JSON.stringify(item);
      let entry = this.rows.get(key);
      if (!entry || entry.state !== state) {
        const row = this.create(item);
        if (entry) {
          // A focused button keeps its focus, because the new row has the same buttons.
          const focused = Array.from(entry.row.querySelectorAll('button'))
            .findIndex((button) => button === document.activeElement);
          if (position === entry.row) position = row;
          entry.row.replaceWith(row);
          if (focused >= 0) row.querySelectorAll('button')[focused]?.focus();
        }
        entry = {row, state};
        this.rows.set(key, entry);
      }
      if (entry.row === position) {
        position = position.nextElementSibling;
      } else {
        this.body.insertBefore(entry.row, position);
      }
    }
    for (const [key, {row}] of this.rows) {
      if (!wanted.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
  }
}
