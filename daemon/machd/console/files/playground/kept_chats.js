// Chats in this browser's storage, one entry each.

import { readChat } from "/console/playground/chats.js";

const PREFIX = "machd.chat.";
const DELAY_MS = 500; // so that a text that is being typed is not written at each key

/** This browser's storage; it may be switched off or full, which is told and does not throw. */
export class KeptChats {
  #storage = null;
  #unsaved = new Set();
  #timer = 0;
  #onProblem;

  /**
   * @param {(problem: string) => void} onProblem Called after each attempt to write; with nothing if that went well.
   * @param {() => void} onOthers Called after another tab has changed what is kept.
   */
  constructor(onProblem, onOthers) {
    this.#onProblem = onProblem;
    try {
      this.#storage = localStorage;
    } catch {
      // Switched off for this page.
    }
    addEventListener("pagehide", () => this.flush());
    addEventListener("storage", ({ key }) => (key === null || key.startsWith(PREFIX)) && onOthers());
  }

  /** All chats, the last changed first. */
  load() {
    const chats = [];
    for (const key of Object.keys(this.#storage ?? {}).filter((one) => one.startsWith(PREFIX))) {
      try {
        chats.push(readChat(JSON.parse(this.#storage.getItem(key))));
      } catch {
        // Not a chat: left alone.
      }
    }
    return chats.sort((one, other) => other.changedAt - one.changedAt);
  }

  /** Keep a chat as it will be in a moment. */
  save(chat) {
    this.#unsaved.add(chat);
    this.#timer ||= setTimeout(() => this.flush(), DELAY_MS);
  }

  remove(chat) {
    this.#unsaved.delete(chat);
    this.#storage?.removeItem(PREFIX + chat.id);
  }

  /** Write now what is to be kept. */
  flush() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (this.#unsaved.size === 0) return;
    this.#onProblem([...this.#unsaved].map((chat) => this.#write(chat)).find(Boolean) ?? "");
    this.#unsaved.clear();
  }

  #write(chat) {
    if (this.#storage === null) return "This browser keeps nothing for this page: export what you want to keep.";
    try {
      this.#storage.setItem(PREFIX + chat.id, JSON.stringify(chat));
      return "";
    } catch {
      return "This browser's storage is full: the last messages are not kept. Export this chat, or delete others.";
    }
  }
}
