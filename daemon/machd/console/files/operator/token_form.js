// Asks for the admin token, and says where it lies.

import { html, useEffect, useRef } from "/console/vendor/htm-preact.js";

export function TokenForm({ isRefused, connect }) {
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const onSubmit = (event) => {
    event.preventDefault();
    connect(field.current.value.trim());
  };
  const problem = "This is not the token of the daemon. It makes a new one at each start.";
  return html`
    <main class="sign-in">
      <h1>machd</h1>
      <form class="panel" onSubmit=${onSubmit}>
        <label for="token">Admin token</label>
        <input
          id="token"
          ref=${field}
          type="password"
          autocomplete="off"
          spellcheck="false"
          required
          aria-describedby="token-place token-problem"
          aria-invalid=${isRefused ? "true" : "false"}
        />
        <button class="primary" type="submit">Open</button>
        <p id="token-problem" class="bad" role="alert">${isRefused ? problem : ""}</p>
      </form>
      <p id="token-place" class="muted">
        ${"On the daemon's machine "}<code>machd ctl page</code>${" prints a link that has it. The token is in the file that "}
        <code>auth.admin_token_file</code>${" names, or in "}<code>admin-${location.port}.token</code>
        ${" below "}<code>$XDG_RUNTIME_DIR/machd</code>${", "}<code>~/.cache/machd/run</code>${" or "}<code>/run/machd</code>${"."}
      </p>
      <p class="muted">This page keeps it in memory only: after a reload it is asked for again.</p>
    </main>
  `;
}
