// One line at the bottom of the page, until it is closed or another one comes.

import { html } from "/console/vendor/htm-preact.js";

export function Notice({ notice, close }) {
  return html`
    <div class="notice" role="status">
      ${notice !== null &&
      html`
        <div class="panel">
          <span class=${notice.isBad ? "bad" : ""}>${notice.text}</span>
          <button type="button" onClick=${close}>Close</button>
        </div>
      `}
    </div>
  `;
}
