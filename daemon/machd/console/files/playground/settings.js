// Settings of the open chat: what is sent beside its messages.

import { html } from "/console/vendor/htm-preact.js";
import { EFFORTS, EXAMPLE_SCHEMA, EXAMPLE_TOOLS, MAX_TOP_LOGPROBS, NUMBERS, newSettings, readSettings } from "/console/playground/fields.js";
import { baseOf } from "/console/playground/models.js";

export function Settings({ session }) {
  const { settings } = session.chat;
  const { problems } = readSettings(settings);
  const defaults = baseOf(session.served.models, session.chat.models[0])?.default_sampling ?? {};
  const set = (changes) => session.change((chat) => Object.assign(chat.settings, changes));
  const setNumber = (name, value) => set({ numbers: { ...settings.numbers, [name]: value } });
  return html`<section class="settings side" aria-label="Settings">
    <h2>Settings</h2>
    <p class="muted">Only what is changed is sent.</p>
    <div class="fields">
      ${NUMBERS.map(
        (one) => html`<${Field} label=${one.label} name=${one.name} problem=${problems[one.name]}>
          <input
            id=${one.name}
            type="text"
            inputmode="decimal"
            class="number"
            autocomplete="off"
            placeholder=${defaults[one.name] ?? ""}
            value=${settings.numbers[one.name] ?? ""}
            ...${described(one.name, problems[one.name])}
            onInput=${(event) => setNumber(one.name, event.target.value)}
          />
        <//>`,
      )}
      <${Field} label="Reasoning" name="effort">
        <select id="effort" value=${settings.effort} onChange=${(event) => set({ effort: event.target.value })}>
          <option value=""></option>
          ${EFFORTS.map((effort) => html`<option value=${effort}>${effort}</option>`)}
        </select>
      <//>
    </div>
    <label class="wide">
      Stop, one text a line
      <textarea rows="2" value=${settings.stop} onInput=${(event) => set({ stop: event.target.value })}></textarea>
    </label>
    <${Toggle} label="Log-probabilities" isOn=${settings.logprobs} onChange=${(logprobs) => set({ logprobs })} />
    ${settings.logprobs &&
    html`<label class="wide">
      Alternatives of a token: ${settings.topLogprobs}
      <input
        type="range"
        min="0"
        max=${MAX_TOP_LOGPROBS}
        value=${settings.topLogprobs}
        onInput=${(event) => set({ topLogprobs: Number(event.target.value) })}
      />
    </label>`}
    <${Json}
      label="JSON schema of the answer"
      name="schema"
      isOn=${settings.usesSchema}
      text=${settings.schema}
      problem=${problems.schema}
      onToggle=${(isOn) => set({ usesSchema: isOn, schema: settings.schema || EXAMPLE_SCHEMA })}
      onEdit=${(schema) => set({ schema })}
    />
    <${Json}
      label="Tools"
      name="tools"
      isOn=${settings.usesTools}
      text=${settings.tools}
      problem=${problems.tools}
      onToggle=${(isOn) => set({ usesTools: isOn, tools: settings.tools || EXAMPLE_TOOLS })}
      onEdit=${(tools) => set({ tools })}
    />
    <button type="button" onClick=${() => set(newSettings())}>Reset</button>
  </section>`;
}

function Field({ label, name, problem, children }) {
  return html`<div class="field">
    <label for=${name}>${label}</label>
    ${children} ${problem && html`<span id=${`${name}-problem`} class="bad">${problem}</span>`}
  </div>`;
}

function Toggle({ label, isOn, onChange }) {
  return html`<label class="toggle">
    <input type="checkbox" checked=${isOn} onChange=${(event) => onChange(event.target.checked)} /> ${label}
  </label>`;
}

function Json({ label, name, isOn, text, problem, onToggle, onEdit }) {
  return html`<${Toggle} label=${label} isOn=${isOn} onChange=${onToggle} />
    ${isOn &&
    html`<textarea
        aria-label=${label}
        class="mono"
        rows="9"
        spellcheck=${false}
        value=${text}
        ...${described(name, problem)}
        onInput=${(event) => onEdit(event.target.value)}
      ></textarea>
      ${problem && html`<span id=${`${name}-problem`} class="bad">${problem}</span>`}`}`;
}

function described(name, problem) {
  return problem ? { "aria-invalid": "true", "aria-describedby": `${name}-problem` } : {};
}
