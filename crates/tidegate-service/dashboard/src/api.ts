// Requests to the admin API. The token is kept for the time of the tab, and sent as a header.

const TOKEN = 'tidegate-token';

let token: string | null = sessionStorage.getItem(TOKEN);

/** Error of a request, with the words of the server. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** Called on a 401: with whether a token was sent. */
let onUnauthorized: (hadToken: boolean) => void = () => {};

export function setUnauthorizedHandler(handler: (hadToken: boolean) => void): void {
  onUnauthorized = handler;
}

export function hasToken(): boolean {
  return token !== null;
}

export function setToken(value: string): void {
  token = value;
  sessionStorage.setItem(TOKEN, value);
}

export function forgetToken(): void {
  token = null;
  sessionStorage.removeItem(TOKEN);
}

/** Text for an error of any kind. */
export function errorText(error: unknown): string {
  if (error instanceof ApiError) return error.message;
  return 'The server cannot be reached.';
}

const MAX_MESSAGE_CHARS = 2000;

async function problemOf(response: Response): Promise<ApiError> {
  let message = `The server answered ${response.status} ${response.statusText}`.trim();
  try {
    const text = (await response.text()).slice(0, MAX_MESSAGE_CHARS);
    if (response.headers.get('content-type')?.includes('json')) {
      const {detail, title} = JSON.parse(text) as {detail?: unknown; title?: unknown};
      if (typeof detail === 'string') message = detail;
      else if (typeof title === 'string') message = title;
    }
  } catch {
    // The status has to do.
  }
  return new ApiError(response.status, message);
}

/** Sends a request. A response other than 2xx is an error. */
export async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  const sent = token;
  if (sent !== null) headers.set('authorization', `Bearer ${sent}`);
  const response = await fetch(path, {
    ...options,
    headers,
    cache: 'no-store',
    credentials: 'omit',
    redirect: 'error',
    referrerPolicy: 'no-referrer',
  });
  if (response.ok) return response;
  const problem = await problemOf(response);
  // A response to an older token says nothing about the present one.
  if (response.status === 401 && sent === token) onUnauthorized(sent !== null);
  throw problem;
}

export async function getJson<Body>(path: string, signal?: AbortSignal): Promise<Body> {
  const response = await request(path, signal ? {signal} : {});
  return (await response.json()) as Body;
}

export async function postJson(path: string, body: unknown): Promise<void> {
  await request(path, {
    method: 'POST',
    headers: {'content-type': 'application/json'},
    body: JSON.stringify(body),
  });
}
