/** The typed client. Paths and bodies are checked against the committed OpenAPI document when the console is built. */
import createClient, { type Middleware } from "openapi-fetch";
import { AWAY, type Problem, problemOf } from "./problem";
import type { paths } from "./schema";

export const SIGNED_OUT = "bedplate.signed-out";

/** The problem; that a session ended is told to whoever shows the sign-in. */
async function refusal(response: Response): Promise<Problem> {
  const problem = await problemOf(response);
  if (problem.code === "auth.session_ended" || problem.code === "auth.token_missing") window.dispatchEvent(new Event(SIGNED_OUT));
  return problem;
}

const onProblem: Middleware = {
  async onResponse({ response }) {
    if (!response.ok && response.status !== 304) throw await refusal(response);
    return response;
  },
  onError() {
    return AWAY;
  },
};

export const api = createClient<paths>({ baseUrl: "/", credentials: "same-origin" });
api.use(onProblem);

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
export type Row = { [key: string]: Json } & { id: string };
export type Answer = { body: Row; etag: string | null };

/** For what is chosen at run time from the registry of nouns: same rules, path as text. */
export async function call(method: string, path: string, body?: unknown, etag?: string | null): Promise<Answer> {
  const headers: Record<string, string> = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (etag) headers["if-match"] = etag;
  const request: RequestInit = { method, headers, credentials: "same-origin" };
  if (body !== undefined) request.body = JSON.stringify(body);
  const response = await fetch(path, request).catch(() => {
    throw AWAY;
  });
  if (!response.ok) throw await refusal(response);
  const text = await response.text();
  return { body: text ? JSON.parse(text) : {}, etag: response.headers.get("etag") };
}

/** Every page of a list, at most `most` items. */
export async function all(path: string, most = 10_000): Promise<Row[]> {
  const items: Row[] = [];
  let token: Json = null;
  do {
    const query = new URLSearchParams({ limit: "1000", ...(token ? { page_token: String(token) } : {}) });
    const { body } = await call("GET", `${path}?${query}`);
    items.push(...((body.items ?? []) as Row[]));
    token = body.next_page_token ?? null;
  } while (token && items.length < most);
  return items;
}
