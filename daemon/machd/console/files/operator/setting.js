// One row of the settings: shown, or being changed.

import { html, useEffect, useRef, useState } from "/console/vendor/htm-preact.js";
import { textOf, valueOf } from "./setting_values.js";

export function Setting({ setting, isEdited, problem, edit, save }) {
  const { key, value, origin, isLive } = setting;
  const button = useRef(null);
  const wasEdited = useRef(false);
  useEffect(() => {
    if (wasEdited.current && !isEdited) button.current?.focus();
    wasEdited.current = isEdited;
  }, [isEdited]);
  const isOwnChange = origin.kind === "admin";
  return html`
    <tr class=${origin.kind === "default" ? "" : "given"}>
      <th scope="row"><code>${key}</code><p class="about">${setting.description}</p></th>
      <td>
        ${isEdited
          ? html`<${Form} setting=${setting} problem=${problem} save=${save} leave=${() => edit(null)} />`
          : html`<code class="value">${value === null ? html`<span class="muted">unset</span>` : textOf(value)}</code>`}
      </td>
      <td class="muted origin">${originOf(origin)}</td>
      <td>
        ${isLive
          ? html`
              <span class="buttons">
                <button ref=${button} type="button" disabled=${isEdited} aria-label=${`Change ${key}`} onClick=${() => edit(key)}>Change</button>
                ${isOwnChange && html`<button type="button" aria-label=${`Take back ${key}`} onClick=${() => save(setting, null)}>Take back</button>`}
              </span>
            `
          : html`<span class="muted">restart</span>`}
      </td>
    </tr>
  `;
}

function originOf({ kind, detail }) {
  if (kind === "admin") return detail;
  return detail === "" ? kind : `${kind}: ${detail}`;
}

function Form({ setting: { key, value, path }, problem, save, leave }) {
  const [text, setText] = useState(textOf(value));
  const field = useRef(null);
  useEffect(() => {
    field.current.focus();
    field.current.select?.();
  }, []);
  const onSubmit = (event) => {
    event.preventDefault();
    save({ path }, valueOf(text));
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape") leave();
  };
  const shared = { ref: field, "aria-label": `New value of ${key}`, "aria-describedby": "setting-problem", value: text };
  const take = (event) => setText(event.target.value);
  return html`
    <form class="edit" onSubmit=${onSubmit} onKeyDown=${onKeyDown}>
      ${typeof value === "boolean"
        ? html`<select ...${shared} onChange=${take}><option value="true">true</option><option value="false">false</option></select>`
        : html`<input ...${shared} onInput=${take} autocomplete="off" spellcheck="false" />`}
      <button class="primary" type="submit">Save</button>
      <button type="button" onClick=${leave}>Discard</button>
      <p id="setting-problem" class="bad" role="alert">${problem ?? ""}</p>
    </form>
  `;
}
