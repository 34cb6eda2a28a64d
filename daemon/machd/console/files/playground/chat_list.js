// The chats that this browser keeps.

import { html, useRef } from "/console/vendor/htm-preact.js";
import { titleOf } from "/console/playground/chats.js";

export function Chats({ session, onOpen }) {
  const file = useRef(null);
  const kept = session.chats.filter((chat) => chat.turns.length > 0);
  const begin = () => (session.begin(), onOpen());
  const open = (chat) => (session.open(chat), onOpen());
  const removeAll = () => confirm(`Delete all ${kept.length} chats of this browser?`) && session.removeAll();
  const onFile = async ({ target }) => {
    if (target.files.length === 1) session.import(await target.files[0].text());
    target.value = "";
  };
  return html`<section class="chats side" aria-label="Chats">
    <button type="button" class="primary" onClick=${begin}>New chat</button>
    <ul>
      ${session.chats.map(
        (chat) => html`<li key=${chat.id}>
          <button type="button" class="title" aria-current=${chat === session.chat ? "true" : "false"} onClick=${() => open(chat)}>
            ${titleOf(chat)}${session.isBusy(chat) && html`<span class="muted"> · answering</span>`}
          </button>
          ${chat.turns.length > 0 &&
          html`<button
            type="button"
            class="quiet"
            aria-label=${`Delete chat: ${titleOf(chat)}`}
            onClick=${() => confirm("Delete this chat?") && session.remove(chat)}
          >
            ✕
          </button>`}
        </li>`,
      )}
    </ul>
    <p class="muted">Chats are kept in this browser alone, readable by all who use it. machd keeps none.</p>
    <div class="buttons">
      <button type="button" disabled=${kept.length === 0} onClick=${() => download(session.exported())}>Export</button>
      <button type="button" onClick=${() => file.current.click()}>Import</button>
      <button type="button" disabled=${kept.length === 0} onClick=${removeAll}>Delete all</button>
      <input ref=${file} type="file" accept=".json,application/json" hidden aria-label="File of exported chats" onChange=${onFile} />
    </div>
  </section>`;
}

function download(text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = "machd-chats.json";
  link.click();
  URL.revokeObjectURL(url);
}
