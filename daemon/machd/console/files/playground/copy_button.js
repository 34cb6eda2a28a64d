import { html, useEffect, useState } from "/console/vendor/htm-preact.js";
import { copy } from "/console/playground/clipboard.js";

const SHOWN_MS = 2000;

/** A button that copies what `text()` returns, and says so. */
export function CopyButton({ label, text }) {
  const [told, tell] = useState("");
  useEffect(() => {
    if (told === "") return undefined;
    const timer = setTimeout(() => tell(""), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [told]);
  const onClick = async () => tell((await copy(text())) ? "Copied" : "Not allowed by this browser");
  return html`<button type="button" class="quiet" onClick=${onClick}>
    ${label}<span role="status" class="told">${told === "" ? "" : ` · ${told}`}</span>
  </button>`;
}
