// A model's text: as it is, with fenced code set apart. Nothing of it is ever read as HTML.

import { html } from "/console/vendor/htm-preact.js";
import { CopyButton } from "/console/playground/copy_button.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;

/** Split a text into code between fences, which may still be open at the end, and what is around it. */
export function parts(text) {
  const found = [];
  let lines = [];
  let fence = null;
  const end = () => {
    const joined = fence === null ? lines.join("\n").replace(/^\n+|\n+$/g, "") : lines.join("\n");
    if (fence !== null || joined.trim() !== "") found.push({ isCode: fence !== null, text: joined, language: fence?.language ?? "" });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const match = FENCE.exec(line);
    if (fence === null && match !== null) {
      end();
      fence = { mark: match[1], language: match[2].trim().slice(0, 40) };
    } else if (fence !== null && match !== null && match[1].startsWith(fence.mark) && match[2].trim() === "") {
      end();
      fence = null;
    } else {
      lines.push(line);
    }
  }
  end();
  return found;
}

export function Text({ text }) {
  return html`<div class="text">
    ${parts(text).map((part) => (part.isCode ? html`<${Code} ...${part} />` : html`<p>${part.text}</p>`))}
  </div>`;
}

function Code({ text, language }) {
  return html`<figure class="code">
    <figcaption><span>${language || "code"}</span><${CopyButton} label="Copy" text=${() => text} /></figcaption>
    <pre tabindex="0" aria-label=${language || "code"}><code>${text}</code></pre>
  </figure>`;
}
