// Tabs of the views: arrow keys, Home and End move between them; the address names the view.

import { html } from "/console/vendor/htm-preact.js";

/** The view that the address names, or the first one. */
export function viewOfAddress(views) {
  const named = location.hash.slice(1);
  return Object.hasOwn(views, named) ? named : Object.keys(views)[0];
}

export function Tabs({ views, current }) {
  const names = Object.keys(views);
  const open = (name) => {
    location.hash = name;
    document.getElementById(`tab-${name}`).focus();
  };
  const onKeyDown = (event) => {
    const at = names.indexOf(current);
    const steps = { ArrowRight: at + 1, ArrowLeft: at - 1 + names.length, Home: 0, End: names.length - 1 };
    const to = steps[event.key];
    if (to === undefined) return;
    event.preventDefault();
    open(names[to % names.length]);
  };
  return html`
    <nav aria-label="Views">
      <div role="tablist" class="tabs" onKeyDown=${onKeyDown}>
        ${names.map(
          (name) => html`
            <button
              key=${name}
              id=${`tab-${name}`}
              type="button"
              role="tab"
              aria-selected=${name === current ? "true" : "false"}
              aria-controls="view"
              tabindex=${name === current ? 0 : -1}
              onClick=${() => open(name)}
            >
              ${views[name].label}
            </button>
          `,
        )}
      </div>
    </nav>
  `;
}
