// The next message: its text and its images.

import { html, useReducer, useRef, useState } from "/console/vendor/htm-preact.js";
import { readSettings } from "/console/playground/fields.js";
import { Images } from "/console/playground/images.js";

const drafts = new WeakMap(); // chat -> {text, images}: kept while another chat is open

export function Compose({ session }) {
  const { chat } = session;
  if (!drafts.has(chat)) drafts.set(chat, { text: "", images: [] });
  const draft = drafts.get(chat);
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [told, tell] = useState("");
  const file = useRef(null);
  const field = useRef(null);
  const isBusy = session.isBusy(chat);
  const isEmpty = draft.text.trim() === "" && draft.images.length === 0;
  const edit = (changes) => (Object.assign(draft, changes), redraw());

  const send = (event) => {
    event?.preventDefault();
    if (isBusy || isEmpty) return;
    const isSent = session.send(draft.text, draft.images);
    tell(isSent ? "" : `Not sent. Settings: ${problemsOf(chat)}`);
    if (isSent) edit({ text: "", images: [] });
    field.current.focus(); // the button that was pressed is gone
  };
  const stop = () => (session.stop(chat), field.current.focus());
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape") stop();
  };
  const add = async (files) => {
    const images = [...files].filter((one) => one.type.startsWith("image/"));
    const urls = await Promise.all(images.map(dataUrl));
    edit({ images: [...draft.images, ...urls] });
  };
  const onPaste = (event) => {
    if (event.clipboardData.files.length === 0) return;
    event.preventDefault();
    add(event.clipboardData.files);
  };
  const onDrop = (event) => (event.preventDefault(), add(event.dataTransfer.files));

  return html`<form class="compose" onSubmit=${send} onDragOver=${(event) => event.preventDefault()} onDrop=${onDrop}>
    <${Images} urls=${draft.images} onRemove=${(index) => edit({ images: draft.images.toSpliced(index, 1) })} />
    <textarea
      ref=${field}
      aria-label="Message"
      rows="3"
      placeholder="Message"
      autofocus
      value=${draft.text}
      onInput=${(event) => edit({ text: event.target.value })}
      onKeyDown=${onKeyDown}
      onPaste=${onPaste}
    ></textarea>
    <div class="buttons">
      <button type="button" onClick=${() => file.current.click()}>Add images</button>
      <input
        ref=${file}
        type="file"
        accept="image/*"
        multiple
        hidden
        aria-label="Images"
        onChange=${({ target }) => (add([...target.files]), (target.value = ""))}
      />
      <span class="muted told" role="status">${isBusy ? "Answering" : told}</span>
      ${isBusy
        ? html`<button key="stop" type="button" onClick=${stop}>Stop</button>`
        : html`<button key="send" class="primary" disabled=${isEmpty}>Send</button>`}
    </div>
  </form>`;
}

function problemsOf(chat) {
  const { problems } = readSettings(chat.settings);
  return Object.entries(problems)
    .map(([name, problem]) => `${name}: ${problem}`)
    .join("; ");
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
