// The operators' page: asks for the token if there has to be one, then shows the daemon.

import { html, render } from "/console/vendor/htm-preact.js";
import { Access } from "/console/shared/access.js";
import { Actions } from "./actions.js";
import { Feed } from "./feed.js";
import { Head } from "./head.js";
import { Notice } from "./notice.js";
import { Question } from "./question.js";
import { Store } from "./store.js";
import { Tabs, viewOfAddress } from "./tabs.js";
import { TokenForm } from "./token_form.js";
import { VIEWS } from "./views.js";

const store = new Store({ view: "now" });
let feed;

function connect(token) {
  feed?.stop();
  const access = new Access(token);
  feed = new Feed(access, store, token !== "");
  store.set({ session: "connecting", actions: new Actions(access, store) });
  feed.start();
}

function show(state) {
  const { session } = state;
  if (session === "asked" || session === "refused") {
    return html`<${TokenForm} isRefused=${session === "refused"} connect=${connect} />`;
  }
  const View = VIEWS[state.view].show;
  return html`
    <${Head} state=${state} />
    <${Tabs} views=${VIEWS} current=${state.view} />
    <main>
      <div id="view" role="tabpanel" tabindex="0" aria-labelledby=${`tab-${state.view}`}>
        ${state.overview === null ? html`<p class="muted">Connecting…</p>` : html`<${View} state=${state} />`}
      </div>
    </main>
    <${Notice} notice=${state.notice} close=${() => store.set({ notice: null })} />
    <${Question} question=${state.question} />
  `;
}

const token = Access.fromAddress();
const page = document.getElementById("page");
const followAddress = () => store.set({ view: viewOfAddress(VIEWS) });

addEventListener("hashchange", followAddress);
store.watch((state) => render(show(state), page));
followAddress();
connect(token);
