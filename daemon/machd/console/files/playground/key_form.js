// Asks for an API key, which is kept in memory until the page is left.

import { html, useState } from "/console/vendor/htm-preact.js";

export function KeyForm({ session }) {
  const [isRefused, refuse] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    refuse(false);
    await session.served.useKey(new FormData(event.target).get("key").trim());
    refuse(session.served.needsKey);
  };
  return html`<form class="key panel" onSubmit=${submit}>
    <h2>API key</h2>
    <p>This server asks for one. It is kept in memory alone, until this page is left or reloaded.</p>
    <label>Key <input name="key" type="password" autocomplete="off" required aria-describedby="refused" autofocus /></label>
    <button class="primary">Use this key</button>
    <p id="refused" class="bad" role="alert">${isRefused && (session.served.error?.message ?? "This key was refused.")}</p>
  </form>`;
}
