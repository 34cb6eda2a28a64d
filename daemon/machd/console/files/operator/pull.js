// Fetches a model from the hub, and shows how far that is.

import { html, useEffect, useRef, useState } from "/console/vendor/htm-preact.js";
import { bytes } from "./format.js";

/** @param {{actions: object, started: {model: string} | null}} props `started` is a download that others began. */
export function Pull({ actions, started }) {
  const [download, setDownload] = useState(null); // {model, done, total, note, isBad}
  const leave = useRef(null);
  useEffect(() => () => leave.current?.abort(), []);

  const follow = async (order) => {
    leave.current?.abort();
    leave.current = new AbortController();
    const { signal } = leave.current;
    setDownload({ model: order.model, done: 0, total: 0, note: "asking the hub", isBad: false });
    try {
      const response = await actions.ask("/admin/models/pull", { method: "POST", body: order, signal });
      for await (const event of lines(response)) setDownload((before) => after(before, event));
    } catch (error) {
      if (!signal.aborted) setDownload((before) => ({ ...before, isEnded: true, note: error.message, isBad: true }));
    }
  };
  const onSubmit = (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    const revision = given.get("revision").trim();
    follow({ model: given.get("model").trim(), ...(revision === "" ? {} : { revision }) });
  };
  const stop = () => actions.read("/admin/models/pull", { method: "DELETE" }).catch((error) => actions.say(error.message, { isBad: true }));
  const isOpen = download !== null && !download.isEnded;
  return html`
    <section class="panel pull" aria-label="Pull a model">
      <h3>Pull a model from the hub</h3>
      <form onSubmit=${onSubmit}>
        <label>Model <input name="model" required placeholder="ORG/NAME" spellcheck="false" autocomplete="off" /></label>
        <label>Revision <input name="revision" placeholder="main" spellcheck="false" autocomplete="off" /></label>
        <button type="submit" disabled=${isOpen}>Pull</button>
        <button type="button" disabled=${!isOpen} onClick=${stop}>Stop</button>
      </form>
      <div role="status">
        ${download === null && started !== null && html`<p>Another operator pulls ${started.model}: ${bytes(started.completed_bytes)} of ${bytes(started.total_bytes)}.</p>`}
        ${download !== null && progress(download)}
      </div>
    </section>
  `;
}

function progress({ model, done, total, note, isBad }) {
  return html`
    <p class="bar">
      <span class="name">${model}</span>
      <progress max=${total || 1} value=${done} aria-label="Bytes fetched"></progress>
      <span class="number">${`${bytes(done)} of ${bytes(total)}`}</span>
      <span class=${isBad ? "bad" : "muted"}>${note}</span>
    </p>
  `;
}

function after(before, event) {
  switch (event.status) {
    case "planned":
      return { ...before, done: event.completed_bytes, total: event.total_bytes, note: `${event.files} files` };
    case "downloading":
      return { ...before, done: event.all_completed_bytes, note: event.file };
    case "waiting":
      return { ...before, note: "another process fetches it" };
    case "success":
      return { ...before, done: event.total_bytes, total: event.total_bytes, isEnded: true, note: event.note || `complete: ${event.path}` };
    case "error":
      return { ...before, isEnded: true, note: event.message, isBad: true };
    default:
      return before;
  }
}

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (unread + value).split("\n");
    unread = whole.pop();
    for (const line of whole) if (line.trim() !== "") yield JSON.parse(line);
  }
}
