// Keeps the store as the daemon says: one stream, opened again whenever it ends.

import { events } from "/console/shared/sse.js";
import { TokenRate } from "./token_rate.js";

const RETRY_MS = [500, 1000, 2000, 5000];
const SILENCE_MS = 12000; // the daemon says something every five seconds
const MAX_FINISHED = 200;
const MAX_LOG_EVENTS = 500;
const SAMPLE_S = 10;
const MAX_SAMPLES = 360;

export class Feed {
  #access;
  #store;
  #hasToken;
  #stop = new AbortController();
  #rate = new TokenRate();

  /** @param {boolean} hasToken Whether the operator has given one. */
  constructor(access, store, hasToken) {
    this.#access = access;
    this.#store = store;
    this.#hasToken = hasToken;
  }

  /** Follow the daemon until stopped, or until it refuses the token. */
  async start() {
    let failures = 0;
    while (!this.#stop.signal.aborted) {
      try {
        await this.#follow(() => {
          failures = 0;
        });
      } catch (error) {
        if (this.#stop.signal.aborted) return;
        if (error.status === 401 || error.status === 403) {
          this.#store.set({ session: this.#hasToken ? "refused" : "asked", overview: null });
          return;
        }
      }
      if (this.#stop.signal.aborted) return;
      const { session, lostAt } = this.#store.state;
      this.#store.set({ session: "lost", lostAt: session === "lost" ? lostAt : Date.now() });
      await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
      failures += 1;
    }
  }

  stop() {
    this.#stop.abort();
  }

  async #follow(onOpen) {
    const silence = new AbortController();
    const signal = AbortSignal.any([this.#stop.signal, silence.signal]);
    let timer = setTimeout(() => silence.abort(), SILENCE_MS);
    try {
      const response = await this.#access.ask("/admin/overview/events", { signal });
      await this.#readPast();
      onOpen();
      for await (const { event, data } of events(response)) {
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE_MS);
        this.#take(event, JSON.parse(data));
      }
    } finally {
      clearTimeout(timer);
      silence.abort();
    }
  }

  /** Read what was before the stream; events of the stream that are in it as well are left out by their ids. */
  async #readPast() {
    const [finished, log, memory] = await Promise.all([
      this.#access.json("/admin/requests/finished"),
      this.#access.json("/admin/log?level=info"),
      this.#access.json("/admin/memory"),
    ]);
    const since = memory.history[0]?.at ?? Infinity;
    const older = this.#store.state.memory.filter((one) => one.at < since); // of an earlier run of the daemon
    const samples = [...older, ...memory.history].slice(-MAX_SAMPLES);
    this.#store.set({ finished: finished.requests, log: log.events, memory: samples });
  }

  #take(event, body) {
    if (event === "overview") this.#takeOverview(body);
    else if (event === "finished") this.#takeFinished(body);
    else if (event === "log") this.#takeLog(body);
  }

  #takeOverview(overview) {
    const { memory, ending } = this.#store.state;
    const last = memory.at(-1);
    const change = { session: "open", overview, tokensPerS: this.#rate.see(overview) };
    if (last === undefined || overview.memory.at - last.at >= SAMPLE_S) {
      change.memory = [...memory, overview.memory].slice(-MAX_SAMPLES);
    }
    if (ending.size > 0) {
      const open = new Set(overview.requests.map((one) => one.id));
      change.ending = new Set([...ending].filter((id) => open.has(id)));
    }
    this.#store.set(change);
  }

  #takeFinished(request) {
    this.#rate.end(request);
    const { finished } = this.#store.state;
    if (finished.some((one) => one.id === request.id)) return;
    this.#store.set({ finished: [request, ...finished].slice(0, MAX_FINISHED) });
  }

  #takeLog(added) {
    const { log } = this.#store.state;
    const recent = new Set(log.slice(-added.length - 100).map(lineKey));
    const fresh = added.filter((one) => !recent.has(lineKey(one)));
    if (fresh.length > 0) this.#store.set({ log: [...log, ...fresh].slice(-MAX_LOG_EVENTS) });
  }
}

function lineKey(event) {
  return JSON.stringify([event.timestamp, event.event, event.fields]);
}

function pause(ms) {
  return new Promise((resolve) => {
    setTimeout(resolve, ms);
  });
}
