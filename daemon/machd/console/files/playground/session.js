// What the page shows: the models, the chats, and the answers that are being made.

import { newReply } from "/console/playground/answer.js";
import { Answers } from "/console/playground/answers.js";
import { exportChats, importChats, newChat, newTurn } from "/console/playground/chats.js";
import { readSettings } from "/console/playground/fields.js";
import { KeptChats } from "/console/playground/kept_chats.js";
import { messagesFor, requestBody } from "/console/playground/request.js";
import { Served } from "/console/playground/served.js";

const UNAUTHORIZED = 401;
const LOAD_LOOKS_MS = 1000;

export class Session {
  problem = ""; // of the browser's storage or of an import
  answers = new Answers();
  #kept;
  #onChange;

  /** @param {() => void} onChange Called when anything but a growing reply has changed. */
  constructor(onChange) {
    this.#onChange = onChange;
    this.served = new Served(() => {
      this.#fillModels();
      onChange();
    });
    this.#kept = new KeptChats((problem) => this.#tell(problem), () => this.#takeOthers());
    this.chats = this.#kept.load();
    if (this.chats.length === 0) this.chats.push(newChat([""]));
    this.chat = this.chats[0];
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
    if ((chat.turns.length > 0 || chat.system !== "") && this.chats.includes(chat)) this.#kept.save(chat);
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
    this.answers.stop(repliesOf(chat));
  }

  isBusy(chat) {
    return this.answers.isAnyOpen(repliesOf(chat));
  }

  async #run(chat, reply, body) {
    const ended = this.answers.run(this.served.access, body, reply);
    this.keep(chat);
    this.#onChange();
    const looks = setInterval(() => {
      if (this.answers.clockOf(reply)?.firstMs === null) this.served.lookAtLoading(reply);
    }, LOAD_LOOKS_MS);
    await ended;
    clearInterval(looks);
    if (reply.error?.status === UNAUTHORIZED) this.served.note(reply.error);
    chat.changedAt = Date.now();
    this.keep(chat);
    this.#onChange();
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
    const first = this.served.models[0]?.id ?? "";
    for (const chat of this.chats) chat.models = chat.models.map((name) => name || first);
  }
}

const repliesOf = (chat) => chat.turns.flatMap((turn) => turn.replies.flat());
