import { html } from "/console/vendor/htm-preact.js";

/** Images of a message, given as data URLs; each can be removed where `onRemove(index)` is given. */
export function Images({ urls, onRemove }) {
  if (urls.length === 0) return null;
  return html`<ul class="images">
    ${urls.map(
      (url, index) => html`<li>
        <img src=${url} alt=${`Image ${index + 1}`} />
        ${onRemove && html`<button type="button" aria-label=${`Remove image ${index + 1}`} onClick=${() => onRemove(index)}>✕</button>`}
      </li>`,
    )}
  </ul>`;
}
