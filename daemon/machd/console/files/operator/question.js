// A question that has to be answered before anything else.

import { html, useEffect, useRef } from "/console/vendor/htm-preact.js";

export function Question({ question }) {
  const dialog = useRef(null);
  useEffect(() => {
    const shown = dialog.current;
    if (question !== null && !shown.open) shown.showModal();
    if (question === null && shown.open) shown.close();
  }, [question]);
  const answer = (value) => {
    dialog.current.close(); // at once: it gives the focus back before the answer moves it
    question?.answer(value);
  };
  const refuse = (event) => {
    event.preventDefault();
    answer(null);
  };
  return html`
    <dialog ref=${dialog} aria-labelledby="question" onCancel=${refuse}>
      ${question !== null &&
      html`
        <h2 id="question">${question.title}</h2>
        <p>${question.text}</p>
        <div class="choices">
          <button type="button" onClick=${refuse}>Keep as it is</button>
          ${question.choices.map(
            ({ label, value, isDanger }) => html`
              <button key=${value} type="button" class=${isDanger ? "danger" : ""} onClick=${() => answer(value)}>
                ${label}
              </button>
            `,
          )}
        </div>
      `}
    </dialog>
  `;
}
