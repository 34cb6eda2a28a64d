// An answer token by token, with the log-probabilities of the one under the pointer or reached by keys.

import { html, useMemo, useState } from "/console/vendor/htm-preact.js";

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
const LIKELY = 0.9;
const UNLIKELY = 0.5;
let lists = 0;

export function Tokens({ tokens }) {
  const [active, activate] = useState(0);
  const [id] = useState(() => `tokens-${(lists += 1)}`);
  const onKeyDown = (event) => {
    const next = { Home: 0, End: tokens.length - 1 }[event.key] ?? active + (STEPS[event.key] ?? NaN);
    if (Number.isNaN(next)) return;
    event.preventDefault();
    activate(Math.min(Math.max(next, 0), tokens.length - 1));
  };
  const spans = useMemo(
    () =>
      tokens.map(
        (token, index) => html`<span
          role="option"
          id=${`${id}-${index}`}
          class=${`token ${likelihood(token.logprob)}`}
          aria-selected=${index === active}
          aria-label=${`${spoken(token.text)}, ${percent(token.logprob)}`}
          onMouseEnter=${() => activate(index)}
          >${token.text}</span
        >`,
      ),
    [tokens, tokens.length, active],
  );
  const shown = tokens[active];
  return html`<div class="with-tokens">
    <div
      class="tokens"
      role="listbox"
      tabindex="0"
      aria-label="Tokens of the answer"
      aria-activedescendant=${`${id}-${active}`}
      onKeyDown=${onKeyDown}
    >
      ${spans}
    </div>
    <table class="alternatives">
      <caption class="muted">
        Token ${active + 1} of ${tokens.length}
      </caption>
      <thead>
        <tr><th scope="col">Token</th><th scope="col" class="number">Probability</th><th scope="col" class="number">Log</th></tr>
      </thead>
      <tbody>
        ${rows(shown).map(
          ([text, logprob, isOwn]) => html`<tr class=${isOwn ? "own" : ""}>
            <td class="mono">${spoken(text)}</td>
            <td class="number">${percent(logprob)}</td>
            <td class="number">${logprob.toFixed(3)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** The token itself and the likeliest ones, best first. */
function rows({ text, logprob, top }) {
  const found = top.map(([other, value]) => [other, value, other === text && value === logprob]);
  if (!found.some(([, , isOwn]) => isOwn)) found.push([text, logprob, true]);
  return found.sort((one, other) => other[1] - one[1]);
}

function likelihood(logprob) {
  const probability = Math.exp(logprob);
  if (probability >= LIKELY) return "likely";
  return probability < UNLIKELY ? "unlikely" : "open";
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(2)} %`;

/** White space made visible. */
const spoken = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(empty)";
