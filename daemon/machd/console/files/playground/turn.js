// A message of the user's, with the replies of each model.

import { html, useState } from "/console/vendor/htm-preact.js";
import { Editor } from "/console/playground/editor.js";
import { Images } from "/console/playground/images.js";
import { Reply } from "/console/playground/reply.js";

export function Turn({ session, turn, isLast }) {
  const [isEdited, edit] = useState(false);
  const columns = turn.replies;
  const change = (text) => (edit(false), session.change(() => (turn.text = text)));
  const remove = () => {
    session.stop(session.chat);
    session.change((chat) => chat.turns.splice(chat.turns.indexOf(turn), 1));
  };
  const again = () => (isLast || confirm("Ask again from here? The messages below are deleted.")) && session.again(turn);
  return html`<article class="turn">
    <div class="message user" role="group" aria-label="You">
      <${Images} urls=${turn.images} />
      ${isEdited ? html`<${Editor} text=${turn.text} label="Your message" onSave=${change} onCancel=${() => edit(false)} />` : html`<p>${turn.text}</p>`}
      <div class="buttons">
        <button type="button" class="quiet" onClick=${() => edit(!isEdited)}>Edit</button>
        <button type="button" class="quiet" onClick=${again}>${isLast ? "Ask again" : "Ask again from here"}</button>
        <button type="button" class="quiet" onClick=${remove}>Delete</button>
      </div>
    </div>
    <div class=${`replies of-${columns.length}`}>
      ${columns.map(
        (replies, column) => html`<div class="column">
          ${replies.map(
            (reply, index) => html`<${Reply}
              key=${reply}
              session=${session}
              turn=${turn}
              column=${column}
              index=${index}
              reply=${reply}
              isLast=${index === replies.length - 1}
            />`,
          )}
        </div>`,
      )}
    </div>
  </article>`;
}
