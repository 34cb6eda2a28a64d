// The line that is always there: what the daemon does as a whole, and whether it can be reached.

import { html } from "/console/vendor/htm-preact.js";
import { count, moment, rate } from "./format.js";
import { memoryVerdict } from "./memory_verdict.js";

export function Head({ state }) {
  const { session, lostAt, overview, tokensPerS } = state;
  return html`
    <header class="head">
      <h1>machd</h1>
      <dl class=${session === "open" ? "facts" : "facts stale"}>
        ${overview !== null && facts(overview, tokensPerS)}
      </dl>
      <p class="connection" role="status">${connection(session, lostAt)}</p>
      <p class="trouble warning" role="status">${overview === null || session !== "open" ? "" : trouble(overview)}</p>
    </header>
  `;
}

function facts({ state, models, requests, memory }, tokensPerS) {
  const ready = models.filter((one) => one.state === "ready").length;
  const waiting = requests.filter((one) => one.phase === "waiting").length;
  const room = memoryVerdict(memory);
  const stateClass = state.state === "ready" ? "good" : "warning";
  return [
    fact("State", state.state, stateClass),
    fact("Models ready", `${ready} of ${models.length}`),
    fact("Running", count(requests.length - waiting)),
    fact("Waiting", count(waiting), waiting > 0 ? "warning" : ""),
    fact("Tokens/s", rate(requests.length === 0 ? 0 : tokensPerS)),
    fact("Machine's memory", room.text, room.className),
  ];
}

function fact(name, value, className = "") {
  return html`<div key=${name}><dt>${name}</dt><dd class=${className}>${value}</dd></div>`;
}

function connection(session, lostAt) {
  if (session === "lost") {
    return html`<span class="bad">${`machd cannot be reached since ${moment(lostAt)}; trying again`}</span>`;
  }
  return session === "open" ? html`<span class="good">connected</span>` : "connecting…";
}

/** What keeps the daemon, or one of its models, from its work. */
function trouble({ state, models }) {
  const said = [];
  if (state.state !== "ready" && state.state !== "restarting" && state.reason !== null) said.push(`${state.state}: ${state.reason}`);
  for (const { name, state: modelState, stage, failure } of models) {
    if (modelState === "ready" && stage !== null) said.push(`${name}: its engine process has ended and is being replaced; its requests go on then`);
    else if (failure !== null) said.push(`${name}: ${failure}`);
  }
  return said.join(" · ");
}
