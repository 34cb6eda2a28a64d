// Requests to the API that served this page, with the token or key that was typed in.
//
// The credential stays in memory: it is in no cookie and no storage, so that no other page and no other program can use it.

/** The API refused or could not be reached. */
export class ApiError extends Error {
  /**
   * @param {number} status HTTP status; 0 where there was no answer.
   * @param {string} code The error's stable code.
   * @param {string} message What to do.
   * @param {number | null} retryAfterS Seconds after which to ask again; null where the answer did not say.
   */
  constructor(status, code, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

export class Access {
  #credential;

  /** @param {string} credential The token or key; empty where none is needed. */
  constructor(credential = "") {
    this.#credential = credential;
  }

  /**
   * Take a credential from the address, as `machd ctl page` prints it, and take it out of there.
   *
   * @returns {string} It, or nothing.
   */
  static fromAddress() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
    if (given !== "") history.replaceState(null, "", location.pathname);
    return given;
  }

  /**
   * Ask, and return the response of a success.
   *
   * @param {string} path Path with query.
   * @param {{method?: string, body?: unknown, headers?: Record<string, string>, signal?: AbortSignal}} options
   * @throws {ApiError} The API refused, or could not be reached.
   */
  async ask(path, { method = "GET", body, headers = {}, signal } = {}) {
    const sent = { ...headers };
    if (this.#credential !== "") sent.Authorization = `Bearer ${this.#credential}`;
    if (body !== undefined) sent["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method,
        headers: sent,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        credentials: "omit",
        cache: "no-store",
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError(0, "unreachable", "machd cannot be reached");
    }
    if (response.ok) return response;
    const text = await response.text();
    let error = {};
    try {
      error = JSON.parse(text).error ?? {};
    } catch {
      // Not from machd, as of a proxy in between.
    }
    const message = error.message ?? `HTTP ${response.status} ${response.statusText}`;
    const wait = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
    throw new ApiError(response.status, error.code ?? "", message, Number.isNaN(wait) ? null : wait);
  }

  /** Ask, and decode the answer's JSON; see {@link Access.ask}. */
  async json(path, options) {
    return (await this.ask(path, options)).json();
  }
}
