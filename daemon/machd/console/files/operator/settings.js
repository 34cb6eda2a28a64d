// Settings: those in force with their origins; live ones are changed here until the next reload.

import { html, useEffect, useState } from "/console/vendor/htm-preact.js";
import { Setting } from "./setting.js";
import { changeOf, settingsOf, textOf } from "./setting_values.js";

export function SettingsView({ state }) {
  const { actions } = state;
  const [config, setConfig] = useState(null); // {etag, body}
  const [filter, setFilter] = useState("");
  const [onlyGiven, setOnlyGiven] = useState(false);
  const [edited, setEdited] = useState(null); // dotted key
  const [problem, setProblem] = useState(null);

  const read = async () => {
    const response = await actions.ask("/admin/config");
    setConfig({ etag: response.headers.get("etag"), body: await response.json() });
  };
  const complain = (error) => actions.say(error.message, { isBad: true });
  useEffect(() => {
    read().catch(complain);
  }, [actions]);

  const save = async (setting, value) => {
    setProblem(null);
    try {
      const headers = { "If-Match": config.etag };
      const { changed } = await actions.read("/admin/config", { method: "PATCH", headers, body: changeOf(setting, value) });
      setEdited(null);
      const what = value === null ? "taken back" : `is ${textOf(value)} until the next reload`;
      actions.say(changed.length === 0 ? "Nothing changed: the value was in force already." : `${changed.join(", ")} ${what}.`);
    } catch (error) {
      const isStale = error.status === 412;
      setProblem(isStale ? "The settings were changed since this page read them. Here they are as they are now: save again." : error.message);
    }
    await read().catch(complain);
  };
  const reload = async () => {
    try {
      const { changed } = await actions.read("/admin/reload", { method: "POST" });
      actions.say(changed.length === 0 ? "Read again; nothing has changed." : `Changed: ${changed.join(", ")}`);
    } catch (error) {
      complain(error);
    }
    await read().catch(complain);
  };
  if (config === null) return html`<h2>Settings</h2><p class="muted">Reading…</p>`;
  const wanted = filter.trim().toLowerCase();
  const settings = settingsOf(config.body).filter(
    (one) => `${one.key} ${one.description.toLowerCase()}`.includes(wanted) && !(onlyGiven && one.origin.kind === "default"),
  );
  const edit = (key) => {
    setEdited(key);
    setProblem(null);
  };
  return html`
    <h2>Settings</h2>
    <div class="filters">
      <label>Filter <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></label>
      <label><input type="checkbox" checked=${onlyGiven} onChange=${(event) => setOnlyGiven(event.target.checked)} /> Only what is not a default</label>
      <button type="button" onClick=${reload}>Reload the sources</button>
      <span class="muted">${config.body.config_file ?? "no settings file"}</span>
    </div>
    <div class="scrolled" role="region" aria-label="Settings" tabindex="0">
      <table class="settings">
        <caption class="only-read">Settings in force</caption>
        <thead>
          <tr><th scope="col">Key</th><th scope="col">Value</th><th scope="col">Origin</th><th scope="col">Changed by</th></tr>
        </thead>
        <tbody>
          ${settings.map(
            (one) => html`
              <${Setting}
                key=${one.key}
                setting=${one}
                isEdited=${edited === one.key}
                problem=${edited === one.key ? problem : null}
                edit=${edit}
                save=${save}
              />
            `,
          )}
        </tbody>
      </table>
      ${settings.length === 0 && html`<p class="muted">No setting matches.</p>`}
    </div>
  `;
}
