// Models: what each does and takes, and loading, unloading, pinning and pulling.

import { html, useEffect, useState } from "/console/vendor/htm-preact.js";
import { bytes, count, duration, percent } from "./format.js";
import { ModelDetails } from "./model_details.js";
import { Pull } from "./pull.js";
import { Table } from "./table.js";

const HELD = new Set(["ready", "loading", "suspending"]);

export function ModelsView({ state }) {
  const { overview, actions } = state;
  const [shown, setShown] = useState(null);
  const [budget, setBudget] = useState(null);
  const loaded = overview.models.filter((one) => one.state === "ready").length;
  useEffect(() => {
    actions.read("/admin/models").then(setBudget, () => {});
  }, [loaded, actions]);
  const columns = [
    { name: "model", label: "Model", show: (one) => nameOf(one) },
    { name: "state", label: "State", show: (one) => stateOf(one) },
    { name: "reserved", label: "Reserved", isNumber: true, show: (one) => bytes(one.reserved?.total_bytes) },
    { name: "measured", label: "Measured", isNumber: true, show: (one) => bytes(one.measured_bytes) },
    { name: "weights", label: "Weights", isNumber: true, show: (one) => bytes(one.needed?.weights_bytes) },
    { name: "kv", label: "KV budget", isNumber: true, show: (one) => bytes(one.needed?.kv_budget_bytes) },
    { name: "files", label: "Files", isNumber: true, show: (one) => bytes(one.size_bytes) },
    { name: "leases", label: "Requests", isNumber: true, show: (one) => count(one.leases) },
    { name: "idle", label: "Idle", isNumber: true, show: (one) => (one.idle_s === null ? "–" : duration(one.idle_s)) },
    { name: "steer", label: "", show: (one) => buttons(one, actions, shown, setShown) },
  ];
  const details = overview.models.find((one) => one.name === shown);
  return html`
    <h2>Models <span class="muted">${count(overview.models.length)}</span></h2>
    <p class="muted">${budgetLine(budget, overview.models)}</p>
    <${Table} label="Models" columns=${columns} rows=${overview.models} keyOf=${(one) => one.name} empty="No model is served." />
    ${details !== undefined && html`<${ModelDetails} key=${details.name} model=${details} actions=${actions} />`}
    <${Pull} actions=${actions} started=${budget?.download ?? null} />
  `;
}

function budgetLine(budget, models) {
  if (budget === null || budget.budget_bytes === null) return "The memory for models is known once one is loaded.";
  const reserved = models.reduce((sum, one) => sum + (one.reserved?.total_bytes ?? 0), 0);
  const free = Math.max(0, budget.budget_bytes - reserved);
  return `Memory for models: ${bytes(budget.budget_bytes)}, reserved ${bytes(reserved)}, left ${bytes(free)}`;
}

function nameOf({ name, aliases, pinned }) {
  return html`
    <span class="name">${name}</span>
    ${pinned && html` <span class="tag">pinned</span>`}
    ${aliases.length > 0 && html`<br /><span class="muted">also ${aliases.join(", ")}</span>`}
  `;
}

function stateOf({ state, stage, progress, failure }) {
  if (stage !== null) {
    return html`
      <span class="bar">
        ${progress !== null &&
        html`<progress max="1" value=${progress} aria-label="Load"></progress><span class="number">${percent(progress)}</span>`}
        <span class="muted note">${stage}</span>
      </span>
    `;
  }
  const className = state === "ready" ? "good" : failure === null ? "" : "bad";
  return html`
    <span class=${className}>${state}</span>
    ${failure !== null && html`<br /><span class="bad">${failure}</span>`}
  `;
}

function buttons(model, actions, shown, setShown) {
  const { name, state, pinned } = model;
  const verbs = [HELD.has(state) ? "unload" : "load", pinned ? "unpin" : "pin"];
  const isShown = shown === name;
  return html`
    <span class="buttons">
      ${verbs.map(
        (verb) => html`
          <button key=${verb} type="button" aria-label=${`${LABELS[verb]} ${name}`} onClick=${() => actions.steer(model, verb)}>
            ${LABELS[verb]}
          </button>
        `,
      )}
      <button
        type="button"
        aria-expanded=${isShown ? "true" : "false"}
        aria-label=${`Details of ${name}`}
        onClick=${() => setShown(isShown ? null : name)}
      >
        Details
      </button>
    </span>
  `;
}

const LABELS = { load: "Load", unload: "Unload", pin: "Pin", unpin: "Unpin" };
