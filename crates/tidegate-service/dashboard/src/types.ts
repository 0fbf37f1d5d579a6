// Bodies of the admin API (docs/http-api.md). Times are Unix milliseconds, rates are per second.

export interface Percentiles {
  p50: number;
  p90?: number;
  p99: number;
}

export type Circuit = 'closed' | 'open' | 'half-open';

export interface StoreNode {
  address: string;
  /** False for Sentinels, which decide nothing. */
  primary?: boolean;
  connected: boolean;
  circuit: Circuit;
  last_error: string | null;
  latency_ms: Percentiles | null;
  in_flight: number | null;
}

export interface Fallback {
  active: boolean;
  since_ms: number | null;
  instances: number;
  pending_debits: number;
  pending_debit_units: number;
}

export interface StoreHealth {
  state: 'up' | 'partly-down' | 'down';
  primaries: number;
  primaries_unavailable: number;
  /** Part of the slots of a cluster whose keys Redis cannot decide. */
  slots_unavailable_ratio: number;
}

export interface StoreState {
  kind: 'memory' | 'redis';
  up: boolean;
  health?: StoreHealth | null;
  nodes: StoreNode[];
  fallback: Fallback | null;
  memory: {keys: number; max_keys: number | null; full?: boolean} | null;
  deny_cache_entries: number | null;
}

export interface ReloadError {
  message: string;
  file: string | null;
  line: number | null;
  column: number | null;
}

export interface Reload {
  at_ms: number | null;
  ok: boolean;
  error: ReloadError | null;
  config_loaded_at_ms: number;
  config_file: string | null;
  /** Sections of the file whose changes need a restart. */
  restart_pending?: string[];
}

export interface Upstream {
  url: string;
  up: boolean;
  ejected: boolean;
}

export interface Status {
  /** Name of the instance: host and admin port. */
  instance?: string;
  version: string;
  started_at_ms: number;
  uptime_ms: number;
  now_ms: number;
  store: StoreState;
  reload: Reload;
  upstreams: Upstream[] | null;
}

/** Decisions per second of a policy: allowed, denied, shadow-denied. */
export type PolicyRates = [number, number, number];

export interface Sample {
  at_ms: number;
  allowed: number;
  denied: number;
  shadow_denied: number;
  errors: number;
  policies: Record<string, PolicyRates>;
  sources: Record<string, number>;
  latency_ms: Percentiles | null;
  store_latency_ms: Percentiles | null;
  store_up: boolean;
  fallback: boolean;
  pending_debit_units: number;
  memory_keys: number | null;
}

export interface HistoryBody {
  interval_ms: number;
  samples: Sample[];
}

export interface HotKey {
  policy: string;
  key: string;
  count: number;
  error: number;
}

export interface HotKeysBody {
  allowed: HotKey[];
  denied: HotKey[];
  shadow_denied: HotKey[];
}

export interface Instance {
  /** Null for one that publishes nothing. */
  name: string | null;
  this: boolean;
  version: string;
  config_hash: string;
  started_at_ms: number;
  store_up: boolean;
  fallback: boolean;
  allowed: number;
  denied: number;
  /** What differs from most other instances. */
  differs: string[];
  changes: {text: string}[];
}

export interface FleetBody {
  now_ms: number;
  /** Why only this instance is known. */
  error: string | null;
  size: number;
  configurations: number;
  instances: Instance[];
  rates: {allowed: number; denied: number};
  hot_keys: HotKeysBody;
}

export interface JournalEvent {
  number: number;
  at_ms: number;
  instance: string;
  event: string;
  text: string;
}

export interface EventsBody {
  error: string | null;
  events: JournalEvent[];
}

export interface Override {
  key: string;
  limit: number;
  burst?: number | null;
  window_ms?: number | null;
  calendar?: string;
}

export interface CostByAttribute {
  attribute: string;
  default?: number | null;
  max?: number | null;
}

export type Conditions = Record<string, string | string[]>;

export interface Policy {
  name: string;
  rule?: string;
  algorithm: string;
  limit: number;
  /** Null for units in flight, which have no window. */
  window_ms: number | null;
  /** Calendar whose periods are the windows. */
  calendar?: string;
  burst: number;
  key: string[];
  mode: string;
  on_store_failure: string;
  show_keys: string;
  match?: Conditions | null;
  unless?: Conditions[] | null;
  limits?: {attribute: string; values: Record<string, number>} | null;
  missing_key?: string | null;
  cost?: number | CostByAttribute | null;
  overrides?: Override[] | number;
  override_count?: number;
  /** Whether a request has matched it since the start; absent for a rule of Envoy. */
  matched?: boolean;
  count_denied?: boolean | null;
  refund_on?: {status: string[]} | null;
  block_for_ms?: number[] | null;
}

export interface OverrideState {
  limit?: number;
  window?: string;
  burst?: number;
  mode?: string;
  until_ms: number | null;
}

export interface OverrideAudit {
  changes: {
    at_ms: number;
    policy: string;
    key: string;
    by: string;
    reason: string;
    before: OverrideState | null;
    after: OverrideState | null;
  }[];
}

export interface LookupResult {
  policy: string;
  key: string;
  mode?: string;
  algorithm?: string;
  limit?: number;
  burst?: number;
  window_ms?: number | null;
  calendar?: string;
  override?: boolean;
  /** Override that was set while the service runs. */
  run_time?: OverrideState & {policy: string; key: string; by: string; reason: string};
  /** Value of the attribute in `limits` that has this limit. */
  value?: string;
  allowed?: boolean;
  /** Units that it was decided by: the burst, or the share of an instance during an outage. */
  capacity?: number;
  remaining?: number;
  retry_after_ms?: number | null;
  reset_after_ms?: number | null;
  delay_ms?: number | null;
  /** Units in flight, and the time until the first of their holds ends. */
  in_flight?: {units: number; first_end_ms?: number | null} | null;
  source?: string;
  reason?: string | null;
  /** Instance that denied it last. */
  last_denial?: {instance: string; at_ms: number};
  error?: string | null;
}

export interface LookupBody {
  key: string;
  /** Whether an enforced policy denies the key; null if not all could be asked. */
  denied?: boolean | null;
  /** Those that deny first, then those in use. */
  results: LookupResult[];
  truncated?: boolean;
}
