import { html, useState } from "/console/vendor/htm-preact.js";

/** A field for a text that is there already. */
export function Editor({ text, label, onSave, onCancel }) {
  const [edited, edit] = useState(text);
  const onKeyDown = (event) => event.key === "Escape" && onCancel();
  return html`<div class="editor">
    <textarea aria-label=${label} rows="4" autofocus value=${edited} onInput=${(event) => edit(event.target.value)} onKeyDown=${onKeyDown}></textarea>
    <div class="buttons">
      <button type="button" class="primary" onClick=${() => onSave(edited)}>Save</button>
      <button type="button" onClick=${onCancel}>Cancel</button>
    </div>
  </div>`;
}
