// Now: the requests that run, and those that wait with what they wait for.

import { html } from "/console/vendor/htm-preact.js";
import { age, count, counted, duration, estimate, percent, rate } from "./format.js";
import { Table } from "./table.js";

const REASONS = {
  slot: "a free slot: all are in use",
  memory: "memory: the KV budget has no room for it yet",
  adapter: "its adapter: it loads, or those in memory are all in use",
  turn: "its turn: one before it waits, or a batch is being gathered",
};

export function NowView({ state }) {
  const { overview, actions, ending } = state;
  const models = new Map(overview.models.map((one) => [one.name, one]));
  const running = overview.requests.filter((one) => one.phase !== "waiting");
  const waiting = overview.requests.filter((one) => one.phase === "waiting");
  const model = { name: "model", label: "Model", show: (one) => modelOf(one, overview) };
  const common = [
    { name: "client", label: "Client", show: (one) => one.client },
    { name: "endpoint", label: "Endpoint", show: (one) => one.endpoint },
    { name: "id", label: "Id", show: (one) => idOf(one) },
    { name: "cancel", label: "", show: (one) => cancelButton(one, actions, ending) },
  ];
  return html`
    <h2>Running <span class="muted">${count(running.length)}</span></h2>
    <${Table}
      label="Running requests"
      columns=${[model, ...progressColumns, ...common]}
      rows=${running}
      keyOf=${(one) => one.id}
      empty="Nothing runs."
    />
    <h2>Waiting <span class="muted">${count(waiting.length)}</span></h2>
    <${Table}
      label="Waiting requests"
      columns=${[model, ...waitColumns(models), ...common]}
      rows=${waiting}
      keyOf=${(one) => one.id}
      empty="Nothing waits."
    />
  `;
}

const AGE_COLUMN = { name: "age", label: "Age", isNumber: true, show: (one) => age(one.age_s) };

const progressColumns = [
  { name: "phase", label: "Phase", show: (one) => one.phase },
  { name: "prompt", label: "Prompt", show: (one) => prompt(one) },
  AGE_COLUMN,
  { name: "first", label: "First token", isNumber: true, show: (one) => duration(one.ttft_s) },
  { name: "tokens", label: "Tokens", isNumber: true, show: (one) => count(one.completion_tokens) },
  { name: "rate", label: "Tokens/s", isNumber: true, show: (one) => rate(one.tokens_per_s) },
];

function waitColumns(models) {
  return [
    { name: "reason", label: "Waits for", show: (one) => reason(one, models.get(one.model) ?? onlyOne(models)) },
    AGE_COLUMN,
    { name: "length", label: "Prompt tokens", isNumber: true, show: (one) => count(one.prompt_tokens || null) },
  ];
}

function onlyOne(models) {
  return models.size === 1 ? [...models.values()][0] : undefined;
}

function modelOf({ model, adapter }, { models }) {
  const name = model ?? models[0]?.name ?? "";
  if (!adapter) return html`<span class="name">${name}</span>`;
  return html`<span class="name">${name}</span> <span class="muted">with ${adapter}</span>`;
}

/** How far the prompt is: a bar with numbers, and the time that is left. */
function prompt({ phase, prompt_tokens: total, prefilled_tokens: done, prefill_left_s: left, prefill_tokens_per_s: speed, decode_mode: mode }) {
  if (mode === null) return `${count(total)} tokens`; // an encoder says no progress
  const numbers = `${count(done)} of ${count(total)}`;
  const note = phase !== "prefill" ? "" : left === null ? "time left unknown" : `${estimate(left)} left, ${rate(speed)}/s`;
  return html`
    <span class="bar">
      <progress max=${total} value=${done} aria-label="Prompt tokens computed"></progress>
      <span class="number">${numbers}</span>
      <span class="muted note">${note}</span>
    </span>
  `;
}

function reason({ waits_for: waitsFor, completion_tokens: tokens }, model) {
  const why = waitsFor === "model" ? modelReason(model) : (REASONS[waitsFor] ?? waitsFor);
  return tokens > 0 ? `${why} (suspended after ${counted(tokens, "token")})` : why;
}

function modelReason(model) {
  if (model === undefined) return "its model";
  const { state, stage, progress } = model;
  if (state === "ready") return "its model, whose engine process is being replaced";
  const how = [stage, progress === null ? null : percent(progress)].filter((one) => one !== null).join(", ");
  return how === "" ? `its model, which is ${state}` : `its model, which is ${state}: ${how}`;
}

function idOf({ id, request_id: requestId }) {
  return html`<code title=${`${id}, X-Request-Id ${requestId}`}>…${id.slice(-8)}</code>`;
}

function cancelButton(request, actions, ending) {
  const isEnding = ending.has(request.id);
  return html`
    <button type="button" disabled=${isEnding} aria-label=${`Cancel ${request.id}`} onClick=${() => actions.cancel(request)}>
      ${isEnding ? "Ending" : "Cancel"}
    </button>
  `;
}
