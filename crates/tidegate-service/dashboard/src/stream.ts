// The live stream: server-sent events, read with `fetch`, because `EventSource` can send no token.
// A stream that ends is opened again, after a backoff with jitter.

import {ApiError, errorText, request} from './api.js';

export type StreamState =
  | {kind: 'connecting'}
  | {kind: 'live'}
  | {kind: 'waiting'; untilMs: number; reason: string}
  | {kind: 'stopped'};

const MIN_BACKOFF_MS = 500;
const MAX_BACKOFF_MS = 15_000;
/** The server sends something at least every 15 seconds. */
const IDLE_TIMEOUT_MS = 20_000;
/** An event that is longer is not ours: the history has at most a few megabytes. */
const MAX_EVENT_CHARS = 32 * 1024 * 1024;

/** Splits a stream of text into events. */
export class EventParser {
  private rest = '';
  private type = '';
  private data: string[] = [];
  private length = 0;

  constructor(private readonly onEvent: (type: string, data: string) => void) {}

  push(text: string): void {
    this.rest += text;
    if (this.rest.length + this.length > MAX_EVENT_CHARS) throw new Error('an event is too long');
    let start = 0;
    for (;;) {
      const end = this.rest.indexOf('\n', start);
      if (end < 0) break;
      this.line(this.rest.slice(start, end).replace(/\r$/, ''));
      start = end + 1;
    }
    this.rest = this.rest.slice(start);
  }

  private line(line: string): void {
    if (line === '') {
      if (this.data.length > 0) this.onEvent(this.type || 'message', this.data.join('\n'));
      this.type = '';
      this.data = [];
      this.length = 0;
      return;
    }
    const colon = line.indexOf(':');
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
    if (field === 'event') this.type = value;
    if (field === 'data') {
      this.data.push(value);
      this.length += value.length;
    }
  }
}

export class LiveStream {
  private attempt = 0;
  private abort: AbortController | null = null;
  private retryTimer: number | undefined;
  private idleTimer: number | undefined;
  private isStopped = true;

  constructor(
    private readonly onEvent: (type: string, body: unknown) => void,
    private readonly onState: (state: StreamState) => void,
  ) {
    addEventListener('online', () => this.reconnect());
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden && this.retryTimer !== undefined) this.reconnect();
    });
  }

  start(): void {
    this.isStopped = false;
    this.attempt = 0;
    void this.open();
  }

  stop(): void {
    this.isStopped = true;
    this.close();
    this.onState({kind: 'stopped'});
  }

  /** Tries at once, without the rest of the backoff. */
  reconnect(): void {
    if (!this.isStopped) void this.open();
  }

  private close(): void {
    clearTimeout(this.retryTimer);
    clearTimeout(this.idleTimer);
    this.retryTimer = undefined;
    this.abort?.abort();
    this.abort = null;
  }

  private async open(): Promise<void> {
    this.close();
    const abort = new AbortController();
    this.abort = abort;
    this.onState({kind: 'connecting'});
    let reason = 'The stream ended.';
    try {
      this.expectBytes(abort);
      const response = await request('/v1/live', {
        signal: abort.signal,
        headers: {accept: 'text/event-stream'},
      });
      await this.read(response, abort);
    } catch (error) {
      if (this.abort !== abort) return;
      reason = errorText(error);
      // The login asks for a token, and starts the stream again.
      if (error instanceof ApiError && error.status === 401) return this.stop();
    }
    if (this.abort !== abort) return;
    this.close();
    if (this.isStopped) return;
    const backoff = Math.min(MAX_BACKOFF_MS, MIN_BACKOFF_MS * 2 ** this.attempt);
    const delay = backoff * (0.75 + Math.random() / 2);
    this.attempt += 1;
    this.onState({kind: 'waiting', untilMs: Date.now() + delay, reason});
    this.retryTimer = setTimeout(() => this.reconnect(), delay);
  }

  private async read(response: Response, abort: AbortController): Promise<void> {
    const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
    if (!reader) return;
    const parser = new EventParser((type, data) => {
      if (this.abort !== abort) return;
      this.attempt = 0;
      this.onState({kind: 'live'});
      this.onEvent(type, JSON.parse(data));
    });
    for (;;) {
      this.expectBytes(abort);
      const {value, done} = await reader.read();
      if (done) return;
      parser.push(value);
    }
  }

  private expectBytes(abort: AbortController): void {
    clearTimeout(this.idleTimer);
    this.idleTimer = setTimeout(() => {
      if (this.abort === abort) this.reconnect();
    }, IDLE_TIMEOUT_MS);
  }
}
