// Calls of tools, with a field for the result of each: this page runs none.

import { html, useReducer } from "/console/vendor/htm-preact.js";

/** `isOpen`: results can still be given; `onChange` is called after one has been edited, `onSend` to go on with them. */
export function Calls({ reply, isOpen, onChange, onSend }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const set = (call, result) => ((call.result = result), redraw(), onChange());
  const send = (event) => (event.preventDefault(), onSend());
  return html`<form class="calls" onSubmit=${send}>
    ${reply.calls.map(
      (call, index) => html`<fieldset>
        <legend>Call of <code>${call.name}</code></legend>
        <pre tabindex="0" aria-label=${`Arguments of ${call.name}`}>${indented(call.arguments)}</pre>
        ${isOpen
          ? html`<label>
              Result${reply.calls.length > 1 && ` of call ${index + 1}`}
              <textarea rows="2" value=${call.result} onInput=${(event) => set(call, event.target.value)}></textarea>
            </label>`
          : html`<p class="muted">Result</p>
              <pre tabindex="0" aria-label=${`Result of ${call.name}`}>${call.result}</pre>`}
      </fieldset>`,
    )}
    ${isOpen && html`<button class="primary">Go on with ${reply.calls.length > 1 ? "these results" : "this result"}</button>`}
  </form>`;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // cut short
  }
}
