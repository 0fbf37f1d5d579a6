// Texts of numbers, times and names.

const numberFormats = [0, 1, 2, 3].map(
  (digits) => new Intl.NumberFormat('en', {maximumFractionDigits: digits}),
);

function round(value: number, digits: 0 | 1 | 2 | 3): string {
  return (numberFormats[digits] as Intl.NumberFormat).format(value);
}

/** Text of a count, with separators. */
export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? '–' : round(value, 0);
}

/** Text of a rate with about three digits. */
export function rate(value: number | null | undefined): string {
  if (value === null || value === undefined) return '–';
  if (value >= 100 || Number.isInteger(value)) return round(value, 0);
  return value >= 10 ? round(value, 1) : round(value, 2);
}

/** Text of a short duration: of microseconds to seconds. */
export function latency(ms: number | null | undefined): string {
  if (ms === null || ms === undefined) return '–';
  if (ms === 0) return '0 ms';
  if (ms < 1) return `${round(ms * 1000, ms < 0.01 ? 1 : 0)} µs`;
  if (ms < 1000) return `${round(ms, ms < 10 ? 2 : 1)} ms`;
  return `${round(ms / 1000, 2)} s`;
}

const UNITS: [string, number][] = [
  ['d', 86_400_000],
  ['h', 3_600_000],
  ['min', 60_000],
  ['s', 1_000],
];

/** Text of a duration with at most two units, such as `2 h 5 min`. */
export function duration(ms: number): string {
  if (ms < 1000) return ms <= 0 ? '0 s' : `${round(Math.ceil(ms), 0)} ms`;
  if (ms < 10_000) return `${round(ms / 1000, 1)} s`;
  let rest = Math.round(ms / 1000) * 1000;
  const parts: string[] = [];
  for (const [unit, length] of UNITS) {
    const whole = Math.floor(rest / length);
    rest -= whole * length;
    if (whole > 0) parts.push(`${round(whole, 0)} ${unit}`);
    if (parts.length === 2 || (parts.length === 1 && whole === 0)) break;
  }
  return parts.join(' ');
}

/** Text of the time since an event, in whole seconds. */
export function age(ms: number): string {
  return duration(Math.max(0, Math.floor(ms / 1000) * 1000));
}

/** Text of the length of a window, such as `60 s` or `1 h`. */
export function windowText(ms: number): string {
  const unit = UNITS.find(([, length]) => ms >= length * (length === 60_000 ? 2 : 1)
    && ms % length === 0);
  return unit ? `${round(ms / unit[1], 0)} ${unit[0]}` : `${round(ms, 0)} ms`;
}

/** Text of a limit: units per window or period of a calendar, or units in flight. */
export function limitText(limit: number, windowMs: number | null, calendar?: string): string {
  if (windowMs === null) return `${count(limit)} in flight`;
  return `${count(limit)} per ${calendar ? visible(calendar) : windowText(windowMs)}`;
}

const clockFormat = new Intl.DateTimeFormat('en-GB', {
  hour: '2-digit', minute: '2-digit', second: '2-digit',
});
const dateFormat = new Intl.DateTimeFormat('en-GB', {dateStyle: 'medium', timeStyle: 'medium'});

/** Time of day. */
export function clock(ms: number): string {
  return clockFormat.format(ms);
}

/** Date and time. */
export function dateTime(ms: number): string {
  return dateFormat.format(ms);
}

export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

// Characters that change or hide the text around them: controls, marks of direction, spaces of no
// width, and others that are not shown.
const INVISIBLE = new RegExp(
  '[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e'
  + '\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]',
  'gu',
);

/** Text of a client, such as a key, in which every character is visible. */
export function visible(text: string): string {
  return text.replace(INVISIBLE, (char) => {
    const code = char.codePointAt(0) as number;
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, '0')}⟩`;
  });
}

/** Start of a text, with an ellipsis if it is longer. */
export function shortened(text: string, maxLength: number): string {
  const chars = Array.from(text.slice(0, maxLength * 2 + 2));
  return chars.length <= maxLength && text.length <= maxLength * 2
    ? text
    : `${chars.slice(0, maxLength - 1).join('')}…`;
}
