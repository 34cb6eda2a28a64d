// A page on which to try the models, for a key of the public API.

import { html, render, useEffect, useReducer, useRef, useState } from "/console/vendor/htm-preact.js";
import { Chats } from "/console/playground/chat_list.js";
import { Compose } from "/console/playground/compose.js";
import { KeyForm } from "/console/playground/key_form.js";
import { ModelChoice } from "/console/playground/models.js";
import { Problem } from "/console/playground/problem.js";
import { Session } from "/console/playground/session.js";
import { Settings } from "/console/playground/settings.js";
import { Turn } from "/console/playground/turn.js";

const NEAR_END_PX = 80;

function Page() {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [session] = useState(() => new Session(redraw));
  const [shown, show] = useState(""); // of the panels beside the chat, which is on a narrow screen
  useEffect(() => lookAtModels(session.served), [session]);
  const toggle = (name) => show(shown === name ? "" : name);
  return html`
    <header class="bar">
      <h1>machd playground</h1>
      <nav aria-label="Panels">
        ${["Chats", "Settings"].map(
          (name) => html`<button type="button" aria-expanded=${shown === name} onClick=${() => toggle(name)}>${name}</button>`,
        )}
      </nav>
      <${Columns} session=${session} />
    </header>
    <main class=${`parts shows-${shown.toLowerCase()}`}>
      <${Chats} session=${session} onOpen=${() => show("")} />
      ${session.served.needsKey ? html`<div class="chat"><${KeyForm} session=${session} /></div>` : html`<${Chat} key=${session.chat.id} session=${session} />`}
      <${Settings} session=${session} />
    </main>
  `;
}

/** Ask for the models now, and when one comes back to this page: others may have been added. */
function lookAtModels(served) {
  const look = () => served.refresh();
  look();
  addEventListener("focus", look);
  return () => removeEventListener("focus", look);
}

function Columns({ session }) {
  const { models } = session.chat;
  const isPair = models.length > 1;
  const change = (edit) => session.change((chat) => (chat.models = edit([...chat.models])));
  const choose = (column, name) => change((names) => names.with(column, name));
  return html`<div class="columns">
    ${models.map(
      (name, column) => html`<${ModelChoice}
        models=${session.served.models}
        value=${name}
        label=${isPair ? `Model ${column + 1}` : "Model"}
        onChange=${(chosen) => choose(column, chosen)}
      />`,
    )}
    <button type="button" aria-pressed=${isPair} onClick=${() => change(([first]) => (isPair ? [first] : [first, first]))}>
      Compare
    </button>
  </div>`;
}

function Chat({ session }) {
  const { chat } = session;
  const list = useRef(null);
  useEffect(() => followEnd(list.current), []);
  return html`<div class="chat">
    <div class="conversation" ref=${list} tabindex="0" role="region" aria-label="Conversation">
      <label class="system">
        System message
        <textarea rows="1" value=${chat.system} onInput=${(event) => session.change((one) => (one.system = event.target.value))}></textarea>
      </label>
      ${chat.turns.map((turn, index) => html`<${Turn} key=${turn} session=${session} turn=${turn} isLast=${index === chat.turns.length - 1} />`)}
      ${chat.turns.length === 0 && html`<p class="muted">Ask something. Enter sends, Shift and Enter begin a new line, Escape stops.</p>`}
    </div>
    ${session.served.error && !session.served.needsKey && html`<${Problem} error=${session.served.error} onRetry=${() => session.served.refresh()} />`}
    ${session.problem !== "" && html`<p class="problem" role="alert">${session.problem}</p>`}
    <${Compose} session=${session} />
  </div>`;
}

/** Keep the end in sight while it grows, unless one has scrolled up to read. */
function followEnd(element) {
  let isAtEnd = true;
  const note = () => {
    isAtEnd = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_END_PX;
  };
  const follow = () => isAtEnd && element.scrollTo(0, element.scrollHeight);
  element.addEventListener("scroll", note, { passive: true });
  const observer = new MutationObserver(follow);
  observer.observe(element, { childList: true, characterData: true, subtree: true });
  follow();
  return () => observer.disconnect();
}

render(html`<${Page} />`, document.getElementById("page"));
