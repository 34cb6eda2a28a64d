// The API that serves this page, and the models that it has.

import { baseOf, generative, loading } from "/console/playground/models.js";
import { Access } from "/console/shared/access.js";

const UNAUTHORIZED = 401;

export class Served {
  models = [];
  error = null; // of the last look at the models
  needsKey = false;
  hasKey = false;
  access;
  #onChange;

  /** @param {() => void} onChange Called when the models, or whether a key is needed, have been looked at. */
  constructor(onChange) {
    this.#onChange = onChange;
    const key = Access.fromAddress();
    this.hasKey = key !== "";
    this.access = new Access(key);
  }

  /** Ask for the models; a key is wanted if that is refused. */
  async refresh() {
    try {
      this.models = generative((await this.access.json("/v1/models")).data);
      this.error = null;
      this.needsKey = false;
    } catch (error) {
      this.note(error);
    }
    this.#onChange();
  }

  /** Note an error, which may say that a key is needed. */
  note(error) {
    this.error = error;
    this.needsKey = error.status === UNAUTHORIZED;
  }

  /** Use a key, which is in memory only. */
  async useKey(key) {
    this.access = new Access(key);
    this.hasKey = true;
    await this.refresh();
  }

  /** What is known of why a reply's first token is not there yet. */
  waitsFor(reply) {
    return loading(baseOf(this.models, reply.model)) || "in the queue, or its prompt is being computed";
  }

  /** Look at the models again if one of them is told to load. */
  async lookAtLoading(reply) {
    if (baseOf(this.models, reply.model)?.status !== undefined) await this.refresh();
  }
}
