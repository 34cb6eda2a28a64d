// An error of the API, with its words and the time after which to ask again.

import { html, useEffect, useState } from "/console/vendor/htm-preact.js";

const SECOND_MS = 1000;

export function Problem({ error, onRetry }) {
  const [left, setLeft] = useState(error.retryAfterS ?? 0);
  useEffect(() => {
    const end = performance.now() + SECOND_MS * (error.retryAfterS ?? 0);
    const show = () => setLeft(Math.max(0, Math.ceil((end - performance.now()) / SECOND_MS)));
    show();
    const timer = error.retryAfterS ? setInterval(show, SECOND_MS / 4) : 0;
    return () => clearInterval(timer);
  }, [error]);
  const label = [error.status || "", error.code].filter(Boolean).join(" ");
  return html`<div class="problem">
    <p role="alert">${error.message} ${label !== "" && html`<span class="muted mono">${label}</span>`}</p>
    ${onRetry &&
    html`<button type="button" disabled=${left > 0} onClick=${onRetry}>
      Ask again${left > 0 && html`<span class="number"> in ${left} s</span>`}
    </button>`}
  </div>`;
}
