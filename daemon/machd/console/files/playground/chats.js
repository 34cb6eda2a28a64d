// Chats, and their form in files.

import { newSettings } from "/console/playground/fields.js";

const FORMAT = "machd-chats";
const VERSION = 1;

export function newChat(models) {
  const id = crypto.getRandomValues(new Uint32Array(3)).join("-");
  return { id, changedAt: Date.now(), models, system: "", turns: [], settings: newSettings() };
}

export function newTurn(text, images) {
  return { text, images, replies: [] };
}

/** The beginning of what was asked first. */
export function titleOf(chat) {
  const text = chat.turns[0]?.text.trim() ?? "";
  return text === "" ? (chat.turns.length > 0 ? "Images" : "Untitled") : text.slice(0, 80);
}

/** Chats as the text of a file. */
export function exportChats(chats) {
  return JSON.stringify({ format: FORMAT, version: VERSION, chats }, null, 1);
}

/**
 * Read the text of an exported file. The chats are new ones: none that is kept is replaced.
 *
 * @throws {Error} The text is no such file.
 */
export function importChats(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("Not a JSON file");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.chats)) throw new Error("Not a file of exported chats");
  if (file.version !== VERSION) throw new Error(`Version ${String(file.version)} of this format is not known here`);
  return file.chats.map((one) => ({ ...readChat(one), id: newChat([]).id }));
}

/** Take what is known of a chat, each part of the type that it has to have; anything else is left out. */
export function readChat(value) {
  const from = record(value);
  const given = record(from.settings);
  const models = list(from.models).slice(0, 2).map(text);
  const chat = newChat(models.length > 0 ? models : [""]);
  const settings = { ...chat.settings };
  for (const [name, value] of Object.entries(settings)) {
    if (name !== "numbers" && typeof given[name] === typeof value) settings[name] = given[name];
  }
  for (const [name, value] of Object.entries(record(given.numbers))) settings.numbers[name] = text(value);
  return {
    id: text(from.id) || chat.id,
    changedAt: number(from.changedAt) ?? chat.changedAt,
    models: chat.models,
    system: text(from.system),
    turns: list(from.turns).map(readTurn),
    settings,
  };
}

function readTurn(value) {
  const from = record(value);
  const images = list(from.images).map(text).filter((url) => url.startsWith("data:image/"));
  return { text: text(from.text), images, replies: list(from.replies).map((column) => list(column).map(readReply)) };
}

function readReply(value) {
  const from = record(value);
  return {
    model: text(from.model),
    fields: record(from.fields),
    text: text(from.text),
    thoughts: text(from.thoughts),
    calls: list(from.calls).map((one) => ({
      id: text(one?.id),
      name: text(one?.name),
      arguments: text(one?.arguments),
      result: text(one?.result),
    })),
    logprobs: list(from.logprobs).map((one) => ({
      text: text(one?.text),
      logprob: number(one?.logprob) ?? 0,
      top: list(one?.top).map((entry) => [text(entry?.[0]), number(entry?.[1]) ?? 0]),
    })),
    finish: text(from.finish),
    usage: numbersOf(from.usage, ["prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"]),
    timing: numbersOf(from.timing, ["firstTokenS", "tokensPerS", "totalS"]),
    error: from.error ? { status: 0, code: text(from.error.code), message: text(from.error.message), retryAfterS: null } : null,
  };
}

const record = (value) => (typeof value === "object" && value !== null ? value : {});
const list = (value) => (Array.isArray(value) ? value : []);
const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : null);
const numbersOf = (value, names) => (value ? Object.fromEntries(names.map((name) => [name, number(value[name])])) : null);
