// What an operator has the daemon do. Each asks first where it ends something, and says what was refused.

import { age, counted } from "./format.js";

const GOOD_NEWS_MS = 8000;

export class Actions {
  #access;
  #store;

  constructor(access, store) {
    this.#access = access;
    this.#store = store;
  }

  /** Ask the admin API for something that no stream tells; see {@link Access.json}. */
  read(path, options) {
    return this.#access.json(path, options);
  }

  /** The response itself, such as one with an ETag or of lines. */
  ask(path, options) {
    return this.#access.ask(path, options);
  }

  /** Show a line at the bottom of the page. */
  say(text, { isBad = false } = {}) {
    const notice = { text, isBad };
    this.#store.set({ notice });
    const close = () => {
      if (this.#store.state.notice === notice) this.#store.set({ notice: null });
    };
    if (!isBad) setTimeout(close, GOOD_NEWS_MS); // what was refused stays until it is closed
  }

  /**
   * Ask the operator, and wait for the answer.
   *
   * @param {{title: string, text: string, choices: {label: string, value: string, isDanger?: boolean}[]}} question
   * @returns {Promise<string | null>} The choice's value; null for none of them.
   */
  choose(question) {
    return new Promise((resolve) => {
      const answer = (value) => {
        this.#store.set({ question: null });
        resolve(value);
      };
      this.#store.set({ question: { ...question, answer } });
    });
  }

  /** End an open request, once the operator has confirmed it. */
  async cancel(request) {
    const sure = await this.choose({
      title: "Cancel this request?",
      text: `${described(request)} ends now; its client, ${request.client}, gets an error.`,
      choices: [{ label: "Cancel the request", value: "yes", isDanger: true }],
    });
    if (sure === null) return;
    this.#mark(request.id, true);
    try {
      await this.#access.json(`/admin/requests/${encodeURIComponent(request.id)}`, { method: "DELETE" });
      document.getElementById("view")?.focus({ preventScroll: true }); // the row with the button goes
      this.say(`Cancelled ${described(request).replace(/,$/, "")}.`);
    } catch (error) {
      this.#mark(request.id, false);
      const isGone = error.status === 404;
      this.say(isGone ? "The request had ended already." : `Not cancelled: ${error.message}`, { isBad: !isGone });
    }
  }

  /**
   * Load, unload, pin or unpin a model.
   *
   * @param {{name: string, state: string, leases: number}} model
   * @param {"load" | "unload" | "pin" | "unpin"} verb
   */
  async steer(model, verb) {
    let body;
    const isLoading = model.state === "loading"; // a load goes on to its end, whatever is asked for
    if (verb === "unload" && model.leases > 0 && !isLoading) {
      const when = await this.choose({
        title: `Unload ${model.name}?`,
        text: `Requests that hold it: ${model.leases}. Suspended answers go on once it is loaded again.`,
        choices: [
          { label: "Unload when it is idle", value: "idle" },
          { label: "Suspend and unload now", value: "now", isDanger: true },
        ],
      });
      if (when === null) return;
      body = { now: when === "now" };
    }
    const path = model.name.split("/").map(encodeURIComponent).join("/");
    try {
      await this.#access.json(`/admin/models/${path}/${verb}`, { method: "POST", body });
      if (verb === "unload" && isLoading) this.say(`${model.name} is unloaded once it is loaded and no request holds it.`);
    } catch (error) {
      this.say(`${model.name}: ${error.message}`, { isBad: true });
    }
  }

  #mark(id, isEnding) {
    const ending = new Set(this.#store.state.ending);
    if (isEnding) ending.add(id);
    else ending.delete(id);
    this.#store.set({ ending });
  }
}

/** A request as its row shows it. */
function described({ id, prompt_tokens: promptTokens, age_s: ageS }) {
  const prompt = promptTokens > 0 ? ` with a prompt of ${counted(promptTokens, "token")}` : "";
  return `…${id.slice(-8)}${prompt}, open for ${age(ageS)},`;
}
