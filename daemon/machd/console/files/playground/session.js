// What the page shows: the models, the chats, and the answers that are being made.

import { answer, Clock, newReply } from "/console/playground/answer.js";
import { exportChats, importChats, newChat, newTurn } from "/console/playground/chats.js";
import { readSettings } from "/console/playground/fields.js";
import { KeptChats } from "/console/playground/kept_chats.js";
import { baseOf, generative, loading } from "/console/playground/models.js";
import { messagesFor, requestBody } from "/console/playground/request.js";
import { Access } from "/console/shared/access.js";

const UNAUTHORIZED = 401;
const LOAD_LOOKS_MS = 1000;

export class Session {
  models = [];
  problem = ""; // of the browser's storage or of an import
  modelsError = null;
  needsKey = false;
  hasKey = false;
  #access;
  #kept;
  #running = new Map(); // reply -> {clock, controller, redraw}
  #onChange;

  /** @param {() => void} onChange Called when anything but a growing reply has changed. */
  constructor(onChange) {
    this.#onChange = onChange;
    this.#kept = new KeptChats((problem) => this.#tell(problem), () => this.#takeOthers());
    this.chats = this.#kept.load();
    const key = Access.fromAddress();
    this.hasKey = key !== "";
    this.#access = new Access(key);
    if (this.chats.length === 0) this.chats.push(newChat([""]));
    this.chat = this.chats[0];
  }

  /** Ask for the models; a key is wanted if that is refused. */
  async refresh() {
    try {
      const { data } = await this.#access.json("/v1/models");
      this.models = generative(data);
      this.modelsError = null;
      this.needsKey = false;
      this.#fillModels();
    } catch (error) {
      this.modelsError = error;
      this.needsKey = error.status === UNAUTHORIZED;
    }
    this.#onChange();
  }

  /** Use a key, which is in memory only. */
  async useKey(key) {
    this.#access = new Access(key);
    this.hasKey = true;
    await this.refresh();
  }

  open(chat) {
    this.chat = chat;
    this.#onChange();
  }

  /** Begin a chat with the models and settings of the open one. */
  begin() {
    if (this.chat.turns.length > 0) {
      const chat = newChat([...this.chat.models]);
      chat.settings = structuredClone(this.chat.settings);
      this.chats.unshift(chat);
      this.chat = chat;
    }
    this.#onChange();
  }

  /** Change the open chat, keep it and show it. */
  change(edit) {
    edit(this.chat);
    this.chat.changedAt = Date.now();
    this.keep();
    this.#onChange();
  }

  keep(chat = this.chat) {
    if (chat.turns.length > 0 && this.chats.includes(chat)) this.#kept.save(chat);
    else this.#kept.remove(chat);
  }

  remove(chat) {
    this.stop(chat);
    this.#kept.remove(chat);
    this.chats = this.chats.filter((one) => one !== chat);
    if (this.chats.length === 0) this.chats.push(newChat([...chat.models]));
    if (this.chat === chat) this.chat = this.chats[0];
    this.problem = "";
    this.#onChange();
  }

  removeAll() {
    for (const chat of [...this.chats]) this.remove(chat);
  }

  exported() {
    return exportChats(this.chats.filter((chat) => chat.turns.length > 0));
  }

  import(text) {
    try {
      const chats = importChats(text);
      this.chats = [...chats, ...this.chats];
      this.chat = this.chats[0];
      this.#fillModels();
      for (const chat of chats) this.keep(chat);
    } catch (error) {
      this.problem = `Import: ${error.message}`;
    }
    this.#onChange();
  }

  /** Ask all models of the open chat; returns whether the settings could be read. */
  send(text, images) {
    const turn = newTurn(text, images);
    if (Object.keys(readSettings(this.chat.settings).problems).length > 0) return false;
    this.change((chat) => chat.turns.push(turn));
    this.again(turn);
    return true;
  }

  /** Ask for a turn's replies anew; the turns behind it are dropped. */
  again(turn) {
    const { chat } = this;
    this.stop(chat);
    this.change(() => {
      chat.turns.splice(chat.turns.indexOf(turn) + 1);
      turn.replies = chat.models.map(() => []);
    });
    for (const column of chat.models.keys()) this.goOn(turn, column);
  }

  /** Ask one model for its next reply in a turn: the first one, or the one after its calls. */
  goOn(turn, column) {
    const { chat } = this;
    const { fields } = readSettings(chat.settings);
    turn.replies[column] ??= [];
    const replies = turn.replies[column];
    const reply = newReply(chat.models[column] ?? replies.at(-1).model, fields);
    replies.push(reply);
    this.#run(chat, reply, this.bodyOf(chat, turn, column, replies.length - 1));
  }

  /** Ask one model anew for a reply and drop those behind it. */
  retry(turn, column, index) {
    turn.replies[column].splice(index);
    this.goOn(turn, column);
  }

  /** The request that asked for a reply, with the messages as they are now. */
  bodyOf(chat, turn, column, index) {
    const { model, fields } = turn.replies[column][index];
    return requestBody(model, messagesFor(chat, turn, column, index), fields);
  }

  /** End the answers of a chat that are being made. */
  stop(chat) {
    for (const reply of chat.turns.flatMap((turn) => turn.replies.flat())) this.#running.get(reply)?.controller.abort();
  }

  /** The clock of a reply that is being made; undefined where it has ended. */
  clockOf(reply) {
    return this.#running.get(reply)?.clock;
  }

  isBusy(chat) {
    return chat.turns.some((turn) => turn.replies.flat().some((reply) => this.#running.has(reply)));
  }

  /** Call `redraw` as a reply grows, at most once a frame. */
  watch(reply, redraw) {
    const running = this.#running.get(reply);
    if (running !== undefined) running.redraw = redraw;
  }

  /** What is known of why a reply's first token is not there yet. */
  waitsFor(reply) {
    return loading(baseOf(this.models, reply.model)) || "the prompt is being computed";
  }

  async #run(chat, reply, body) {
    const running = { clock: new Clock(), controller: new AbortController(), redraw: () => {} };
    this.#running.set(reply, running);
    this.keep(chat);
    this.#onChange();
    let isDrawn = true;
    const onChange = () => {
      if (isDrawn) requestAnimationFrame(() => ((isDrawn = true), running.redraw()));
      isDrawn = false;
    };
    const looks = setInterval(() => running.clock.firstMs === null && this.#lookAtLoading(reply), LOAD_LOOKS_MS);
    await answer(this.#access, body, reply, { clock: running.clock, signal: running.controller.signal, onChange });
    clearInterval(looks);
    this.#running.delete(reply);
    if (reply.error?.status === UNAUTHORIZED) this.needsKey = true;
    chat.changedAt = Date.now();
    this.keep(chat);
    this.#onChange();
  }

  async #lookAtLoading(reply) {
    if (baseOf(this.models, reply.model)?.status !== undefined) await this.refresh();
  }

  #tell(problem) {
    if (problem === this.problem) return;
    this.problem = problem;
    this.#onChange();
  }

  /** Take what another tab keeps, but for the open chat and those that are being answered. */
  #takeOthers() {
    const own = this.chats.filter((chat) => chat === this.chat || this.isBusy(chat));
    const others = this.#kept.load().filter((chat) => own.every((one) => one.id !== chat.id));
    this.chats = [...own, ...others].sort((one, other) => other.changedAt - one.changedAt);
    this.#fillModels();
    this.#onChange();
  }

  #fillModels() {
    const first = this.models[0]?.id ?? "";
    for (const chat of this.chats) chat.models = chat.models.map((name) => name || first);
  }
}
