// One reply of a model: thoughts, text, calls, figures.

import { html, useEffect, useReducer, useState } from "/console/vendor/htm-preact.js";
import { Calls } from "/console/playground/calls.js";
import { asCurl, asPython } from "/console/playground/code.js";
import { CopyButton } from "/console/playground/copy_button.js";
import { Editor } from "/console/playground/editor.js";
import { Problem } from "/console/playground/problem.js";
import { Text } from "/console/playground/text.js";
import { Tokens } from "/console/playground/tokens.js";

const CLOCK_MS = 100;

export function Reply({ session, turn, column, index, reply, isLast }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [isEdited, edit] = useState(false);
  const [showsTokens, showTokens] = useState(true);
  const clock = session.answers.clockOf(reply);
  const isRunning = clock !== undefined;
  useEffect(() => {
    if (!isRunning) return undefined;
    session.answers.watch(reply, redraw);
    const timer = setInterval(redraw, CLOCK_MS);
    return () => clearInterval(timer);
  }, [isRunning]);
  const hasTokens = !isRunning && reply.logprobs.length > 0;
  const change = (text) => {
    edit(false);
    session.change(() => Object.assign(reply, { text, logprobs: [] }));
  };
  return html`<div class="message model" role="group" aria-label=${`Answer of ${reply.model}`}>
    <h2 class="muted">${reply.model}</h2>
    ${reply.thoughts !== "" && html`<${Thoughts} reply=${reply} isThinking=${isRunning && reply.text === "" && reply.calls.length === 0} />`}
    ${isEdited
      ? html`<${Editor} text=${reply.text} label="Answer" onSave=${change} onCancel=${() => edit(false)} />`
      : hasTokens && showsTokens
        ? html`<${Tokens} tokens=${reply.logprobs} />`
        : html`<${Text} text=${reply.text} />`}
    ${reply.calls.length > 0 &&
    html`<${Calls} reply=${reply} isOpen=${isLast && !isRunning} onChange=${() => session.keep()} onSend=${() => session.goOn(turn, column)} />`}
    ${reply.error && html`<${Problem} error=${reply.error} onRetry=${() => session.retry(turn, column, index)} />`}
    <${Figures} figures=${isRunning ? running(session, reply, clock) : ended(reply)} />
    ${!isRunning &&
    html`<div class="buttons">
      <${CopyButton} label="Copy" text=${() => reply.text} />
      <button type="button" class="quiet" onClick=${() => edit(!isEdited)}>Edit</button>
      ${hasTokens &&
      html`<button type="button" class="quiet" aria-pressed=${showsTokens} onClick=${() => showTokens(!showsTokens)}>Tokens</button>`}
      <${CopyButton} label="Copy as curl" text=${() => code(asCurl)} />
      <${CopyButton} label="Copy as Python" text=${() => code(asPython)} />
    </div>`}
  </div>`;

  function code(spell) {
    return spell(location.origin, session.bodyOf(session.chat, turn, column, index), session.served.hasKey);
  }
}

function Thoughts({ reply, isThinking }) {
  return html`<details class="thoughts">
    <summary>${isThinking ? "Thinking" : "Thoughts"}</summary>
    <p>${reply.thoughts}</p>
  </details>`;
}

/** Figures in one line, which is broken between them alone. */
function Figures({ figures }) {
  return html`<p class="figures muted">
    ${figures.map((one, index) => html`${index > 0 && " · "}<span>${one}</span>`)}
  </p>`;
}

function running(session, reply, clock) {
  if (clock.firstMs === null && clock.prompt !== null) return prefill(clock);
  if (clock.firstMs === null) return [`Waiting ${clock.elapsedS.toFixed(1)} s`, session.served.waitsFor(reply)];
  const firstS = (clock.firstMs - clock.startedMs) / 1000;
  return ["generating", `first token ${seconds(firstS)}`, rate(clock.rate())].filter(Boolean);
}

/** How far the prompt is; what is cached took no time. */
function prefill({ elapsedS, prompt: { total, cache, processed, time_ms: timeMs } }) {
  const perS = (1000 * (processed - cache)) / timeMs;
  const figures = [`Waiting ${elapsedS.toFixed(1)} s`, `prompt ${processed} of ${total} tokens`];
  if (perS > 0 && processed < total) figures.push(rate(perS), `${Math.ceil((total - processed) / perS)} s left`);
  return figures;
}

const FINISHES = {
  stop: "finished",
  length: "cut off at max tokens",
  tool_calls: "waits for tool results",
  stopped: "stopped",
};

function ended({ finish, usage, timing, error }) {
  if (timing === null) return ["interrupted", "the page was left before its end"];
  const figures = [error ? "failed" : (FINISHES[finish] ?? finish)];
  if (timing.firstTokenS !== null) figures.push(`first token ${seconds(timing.firstTokenS)}`);
  if (timing.tokensPerS !== null) figures.push(rate(timing.tokensPerS));
  if (usage !== null) {
    figures.push(`${usage.completion_tokens} tokens`);
    if (usage.reasoning_tokens > 0) figures.push(`${usage.reasoning_tokens} tokens of thoughts`);
    figures.push(`prompt ${usage.prompt_tokens} tokens (${usage.cached_tokens} cached)`);
  }
  figures.push(`total ${seconds(timing.totalS)}`);
  return figures;
}

const seconds = (value) => `${(value ?? 0).toFixed(value < 10 ? 2 : 1)} s`;
const rate = (value) => value !== null && `${value.toFixed(1)} tokens/s`;
