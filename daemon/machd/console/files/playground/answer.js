// One streamed answer: from its request to its end, whichever it is.

import { ApiError } from "/console/shared/access.js";
import { events } from "/console/shared/sse.js";

/** A reply before its first token; `fields` are those of its request beside model and messages. */
export function newReply(model, fields) {
  return {
    model,
    fields,
    text: "",
    thoughts: "",
    calls: [],
    logprobs: [],
    finish: "",
    usage: null,
    timing: null,
    error: null,
  };
}

/** Times of an answer that is being made, in milliseconds of performance.now(). */
export class Clock {
  startedMs = performance.now();
  firstMs = null;
  lastMs = null;
  tokens = 0;
  prompt = null; // how far it is, as the newest chunk told

  /** Note that tokens came. */
  tick(tokens) {
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.tokens += tokens;
  }

  /** Seconds since the request was sent. */
  get elapsedS() {
    return (performance.now() - this.startedMs) / 1000;
  }

  /** Tokens a second since the first one; null while there is one only. `tokens` counts them all. */
  rate(tokens = this.tokens) {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    return this.firstMs === null || seconds <= 0 || tokens < 2 ? null : (tokens - 1) / seconds;
  }
}

/**
 * Ask, and grow the reply until its end. Nothing is thrown: an error and a stop are part of the reply.
 *
 * @param {import("/console/shared/access.js").Access} access
 * @param {object} body The request.
 * @param {object} reply Of {@link newReply}.
 * @param {{clock: Clock, signal: AbortSignal, onChange: () => void}} watched
 */
export async function answer(access, body, reply, { clock, signal, onChange }) {
  try {
    const asked = { ...body, return_progress: true };
    const response = await access.ask("/v1/chat/completions", { method: "POST", body: asked, signal });
    let isWhole = false;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") {
        isWhole = true;
        break;
      }
      take(JSON.parse(data), reply, clock);
      onChange();
    }
    if (!isWhole) throw new ApiError(0, "cut_off", "The connection ended before the answer did.");
  } catch (error) {
    if (signal.aborted) reply.finish = "stopped";
    else reply.error = toldError(error);
  }
  const tokens = reply.usage?.completion_tokens ?? clock.tokens;
  reply.timing = {
    firstTokenS: clock.firstMs === null ? null : (clock.firstMs - clock.startedMs) / 1000,
    tokensPerS: clock.rate(tokens),
    totalS: clock.elapsedS,
  };
}

function toldError(error) {
  if (!(error instanceof ApiError)) return { status: 0, code: "", message: String(error), retryAfterS: null };
  const { status, code, message, retryAfterS } = error;
  return { status, code, message, retryAfterS };
}

function take(chunk, reply, clock) {
  if (chunk.error !== undefined) {
    throw new ApiError(0, chunk.error.code ?? "", chunk.error.message ?? "The answer failed.");
  }
  if (chunk.prompt_progress) clock.prompt = chunk.prompt_progress;
  if (chunk.usage) reply.usage = toldUsage(chunk.usage);
  for (const { delta, logprobs, finish_reason: finish } of chunk.choices) {
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    const calls = delta.tool_calls ?? [];
    const entries = logprobs?.content ?? [];
    const text = delta.content ?? "";
    if (thought !== "" || text !== "" || calls.length > 0 || entries.length > 0) clock.tick(entries.length || 1);
    reply.thoughts += thought;
    reply.text += text;
    for (const call of calls) takeCall(call, reply.calls);
    reply.logprobs.push(...entries.map(toldToken));
    if (finish) reply.finish = finish;
  }
}

function takeCall({ index, id, function: called }, calls) {
  calls[index] ??= { id: "", name: "", arguments: "", result: "" };
  const call = calls[index];
  call.id ||= id ?? "";
  call.name ||= called.name ?? "";
  call.arguments += called.arguments ?? "";
}

function toldUsage(usage) {
  return {
    prompt_tokens: usage.prompt_tokens,
    completion_tokens: usage.completion_tokens,
    cached_tokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
    reasoning_tokens: usage.completion_tokens_details?.reasoning_tokens ?? 0,
  };
}

function toldToken({ token, bytes, logprob, top_logprobs: top }) {
  const others = (top ?? []).map((one) => [tokenText(one), one.logprob]);
  return { text: tokenText({ token, bytes }), logprob, top: others };
}

/** A token's text; its bytes in hexadecimal where they are no whole character. */
function tokenText({ token, bytes }) {
  if (!token.includes("\ufffd") || !bytes) return token;
  return `‹${bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}›`;
}
