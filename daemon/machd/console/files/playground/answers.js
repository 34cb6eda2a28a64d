// The answers that are being made.

import { answer, Clock } from "/console/playground/answer.js";

export class Answers {
  #open = new Map(); // reply -> {clock, controller, redraw}

  /** Ask for a reply; resolves at its end, whichever it is. */
  async run(access, body, reply) {
    const open = { clock: new Clock(), controller: new AbortController(), redraw: () => {} };
    this.#open.set(reply, open);
    let isDrawn = true;
    const onChange = () => {
      if (isDrawn) requestAnimationFrame(() => ((isDrawn = true), open.redraw()));
      isDrawn = false;
    };
    await answer(access, body, reply, { clock: open.clock, signal: open.controller.signal, onChange });
    this.#open.delete(reply);
  }

  /** End those of some replies that are being made. */
  stop(replies) {
    for (const reply of replies) this.#open.get(reply)?.controller.abort();
  }

  isAnyOpen(replies) {
    return replies.some((reply) => this.#open.has(reply));
  }

  /** The clock of a reply that is being made; undefined where it has ended. */
  clockOf(reply) {
    return this.#open.get(reply)?.clock;
  }

  /** Call `redraw` as a reply grows, at most once a frame. */
  watch(reply, redraw) {
    const open = this.#open.get(reply);
    if (open !== undefined) open.redraw = redraw;
  }
}
