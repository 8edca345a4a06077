/** What the API answers when it says no (RFC 9457), as an Error. */
export type FieldProblem = { pointer: string; detail: string };

export class Problem extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    readonly title: string,
    readonly detail: string,
    readonly requestId: string,
    readonly fields: FieldProblem[] = [],
  ) {
    super(detail || title);
  }

  /** What is wrong with this field of the body, when it is named. */
  of(field: string): string | undefined {
    const found = this.fields.find((item) => item.pointer === `/${field}` || item.pointer.startsWith(`/${field}/`));
    return found?.detail;
  }
}

export async function problemOf(response: Response): Promise<Problem> {
  const requestId = response.headers.get("x-request-id") ?? "";
  try {
    const body = await response.clone().json();
    return new Problem(response.status, body.code, body.title, body.detail, body.request_id ?? requestId, body.errors ?? []);
  } catch {
    return new Problem(response.status, "unreadable", response.statusText || "The API did not answer as expected", "", requestId);
  }
}

/** The API cannot be reached at all. */
export const AWAY = new Problem(0, "away", "The API does not answer", "Nothing was changed. The console tries again by itself.", "");
