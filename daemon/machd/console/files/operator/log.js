// Log: the last events, the newest last; a line is text, whatever is in it.

import { html, useLayoutEffect, useMemo, useRef, useState } from "/console/vendor/htm-preact.js";
import { count, moment } from "./format.js";

const LEVELS = ["debug", "info", "warning", "error", "critical"];
const SLACK_PX = 24;

export function LogView({ state }) {
  const { log, actions } = state;
  const [level, setLevel] = useState("info");
  const [older, setOlder] = useState(null); // with debug, as it was read last
  const [isFollowed, setFollowed] = useState(true);
  const box = useRef(null);

  const readDebug = () =>
    actions.read("/admin/log?level=debug").then(
      ({ events }) => setOlder(events),
      (error) => actions.say(error.message, { isBad: true }),
    );
  const choose = (event) => {
    setLevel(event.target.value);
    setOlder(null);
    if (event.target.value === "debug") readDebug();
  };
  const shown = useMemo(() => {
    const lowest = LEVELS.indexOf(level);
    return (older ?? log).filter((one) => !LEVELS.includes(one.level) || LEVELS.indexOf(one.level) >= lowest);
  }, [log, older, level]);
  useLayoutEffect(() => {
    if (isFollowed) box.current.scrollTop = box.current.scrollHeight;
  }, [shown, isFollowed]);
  const onScroll = ({ target }) => {
    const isAtEnd = target.scrollHeight - target.scrollTop - target.clientHeight < SLACK_PX;
    if (isAtEnd !== isFollowed) setFollowed(isAtEnd);
  };
  const lines = useMemo(() => shown.map((one, at) => html`<${Line} key=${`${one.timestamp} ${at}`} event=${one} />`), [shown]);
  return html`
    <h2>Log</h2>
    <div class="filters">
      <label>
        From level
        <select value=${level} onChange=${choose}>
          ${LEVELS.slice(0, 4).map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
        </select>
      </label>
      <label><input type="checkbox" checked=${isFollowed} onChange=${(event) => setFollowed(event.target.checked)} /> Follow</label>
      ${level === "debug" && html`<button type="button" onClick=${readDebug}>Read again</button>`}
      <span class="muted">${`${count(shown.length)} events`}</span>
    </div>
    <ol class="log" ref=${box} onScroll=${onScroll} tabindex="0" aria-label="Log events, the newest last">
      ${lines}
      ${shown.length === 0 && html`<li class="muted">No event of this level.</li>`}
    </ol>
  `;
}

function Line({ event: { timestamp, level, event, model, fields } }) {
  const { exception, ...others } = fields;
  const className = { warning: "warning", error: "bad", critical: "bad" }[level] ?? "muted";
  return html`
    <li>
      <time datetime=${timestamp}>${moment(timestamp)}</time>${" "}
      <span class=${`level ${className}`}>${level}</span>${" "}
      <strong>${event}</strong>${" "}
      ${model !== null && html`<span class="model">${model}</span>${" "}`}
      ${Object.entries(others).map(([name, value]) => html`<span class="field" key=${name}><span class="muted">${name}=</span>${value}</span>${" "}`)}
      ${exception !== undefined && html`<pre>${exception}</pre>`}
    </li>
  `;
}
