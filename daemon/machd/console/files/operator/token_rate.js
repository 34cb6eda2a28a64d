// Tokens a second of all requests, from their counts in successive overviews.

const WINDOW_S = 5;

export class TokenRate {
  #counts = new Map(); // completion tokens of open requests, by id
  #total = 0;
  #seen = []; // {at, total} within the window, and one before it

  /** @returns {number} Tokens a second over the last seconds, with those of this overview. */
  see(overview) {
    const open = new Map();
    for (const { id, completion_tokens: tokens } of overview.requests) {
      this.#add(id, tokens);
      open.set(id, tokens);
    }
    this.#counts = open;
    this.#seen.push({ at: overview.at, total: this.#total });
    while (this.#seen.length > 2 && overview.at - this.#seen[1].at > WINDOW_S) this.#seen.shift();
    const first = this.#seen[0];
    const seconds = overview.at - first.at;
    return seconds > 0 ? (this.#total - first.total) / seconds : 0;
  }

  /** Count the last tokens of a request that has finished. */
  end({ id, completion_tokens: tokens }) {
    if (this.#counts.has(id) || this.#seen.length > 0) this.#add(id, tokens);
    this.#counts.delete(id);
  }

  #add(id, tokens) {
    const before = this.#counts.get(id) ?? (this.#seen.length > 0 ? 0 : tokens);
    this.#total += Math.max(0, tokens - before);
    this.#counts.set(id, tokens);
  }
}
