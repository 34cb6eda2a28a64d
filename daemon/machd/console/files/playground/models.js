// Models and adapters that can be asked, and the field that picks one.

import { html } from "/console/vendor/htm-preact.js";

const UNREADY = new Set(["downloading"]);

/** Models of `GET /v1/models` that answer in words. */
export function generative(listed) {
  return listed.filter((one) => one.kind === undefined && !UNREADY.has(one.state));
}

/** What a model's state and progress say; nothing where it is loaded, or where the API does not tell. */
export function loading(model) {
  if (model?.status === undefined || model.status.value === "loaded") return "";
  if (model.status.failed) return "the model could not be loaded";
  if (model.status.value === "unloaded") return "the model is not loaded yet";
  const share = model.progress === undefined ? "" : `, ${Math.round(100 * model.progress)} %`;
  return `the model is being loaded${share}`;
}

/** The model itself, or the one that an adapter changes. */
export function baseOf(models, name) {
  const found = models.find((one) => one.id === name);
  return found?.parent === undefined ? found : models.find((one) => one.id === found.parent);
}

export function ModelChoice({ models, value, label, onChange }) {
  const bases = models.filter((one) => one.parent === undefined);
  const parents = [...new Set(models.flatMap((one) => one.parent ?? []))];
  const isKnown = models.some((one) => one.id === value);
  return html`<select aria-label=${label} value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${!isKnown && html`<option value=${value}>${value === "" ? "No model" : `${value} (not served)`}</option>`}
    ${group("Models", bases)} ${parents.map((parent) => group(`Adapters of ${parent}`, ofParent(models, parent)))}
  </select>`;
}

const ofParent = (models, parent) => models.filter((one) => one.parent === parent);

function group(label, models) {
  if (models.length === 0) return null;
  return html`<optgroup label=${label}>
    ${models.map((one) => html`<option value=${one.id}>${one.id}</option>`)}
  </optgroup>`;
}
