// Memory: of machd and of its machine, now and over the last hour.

import { html, useState } from "/console/vendor/htm-preact.js";
import { Chart } from "./chart.js";
import { bytes, count, moment } from "./format.js";
import { memoryVerdict } from "./memory_verdict.js";
import { Table } from "./table.js";

const MACHD = [
  { name: "weights", label: "Weights", field: "weights_bytes", colour: "--chart-1" },
  { name: "prefix", label: "Prefix cache", field: "prefix_bytes", colour: "--chart-2" },
  { name: "kv", label: "KV cache in use", field: "kv_used_bytes", colour: "--chart-3" },
  { name: "buffers", label: "Freed buffers", field: "buffers_bytes", colour: "--chart-4" },
];

const KV = [
  { name: "reserved", label: "KV reserved", field: "kv_reserved_bytes" },
  { name: "budget", label: "KV budget", field: "kv_budget_bytes" },
];

const MACHINE = [
  { name: "available", label: "Available to programs", field: "available_bytes", colour: "--chart-1" },
  { name: "process", label: "machd's processes", field: "process_bytes", colour: "--chart-3", dash: [8, 4] },
  { name: "swap", label: "Swap in use", field: "swap_used_bytes", colour: "--chart-4", dash: [2, 3] },
];

const PRESSURE = [{ name: "pressure", label: "Time waiting for memory", field: "pressure", colour: "--chart-4" }];

export function MemoryView({ state }) {
  const { memory: samples, overview } = state;
  const now = overview.memory;
  const { text, className } = memoryVerdict(now);
  return html`
    <h2>Memory</h2>
    <p class="muted">
      The machine: <strong class=${className}>${text}</strong>${`, ${bytes(now.swap_used_bytes)} of swap in use; machd's processes take ${bytes(now.process_bytes)}.`}
    </p>
    <${Group} label="machd" samples=${samples} now=${now} series=${MACHD} others=${KV} unit=${bytes} isStacked=${true} />
    <${Group} label="Machine" samples=${samples} now=${now} series=${MACHINE} others=${[]} unit=${bytes}
      note=${`of ${bytes(now.total_bytes)}`} />
    ${now.pressure === null
      ? html`<p class="muted">This system does not tell its memory pressure.</p>`
      : html`<${Group} label="Memory pressure" samples=${samples} now=${now} series=${PRESSURE} others=${[]} unit=${percents} />`}
  `;
}

/** A chart of an hour, and its numbers: now, at the pointer, and the least and the most of the hour. */
function Group({ label, samples, now, series, others, unit, isStacked = false, note = "" }) {
  const [pointed, setPointed] = useState(null); // index of a sample
  const at = pointed === null ? undefined : samples[pointed];
  const columns = [
    { name: "series", label: "Part", show: (one) => html`${one.colour && html`<span class=${`swatch ${one.colour.slice(2)}`}></span>`}${one.label}` },
    { name: "now", label: "Now", isNumber: true, show: (one) => unit(now[one.field]) },
    { name: "pointed", label: at === undefined ? "Pointed at" : moment(at.at * 1000), isNumber: true, show: (one) => (at === undefined ? "–" : unit(at[one.field])) },
    { name: "range", label: "In the last hour", isNumber: true, show: (one) => range(samples, now, one.field, unit) },
  ];
  return html`
    <section class="panel memory" aria-label=${label}>
      <h3>${label} <span class="muted">${note}</span></h3>
      <div class="beside">
        <${Chart} label=${`${label} over the last hour`} samples=${samples} series=${series} unit=${unit} isStacked=${isStacked} onPoint=${setPointed} />
        <${Table} label=${`${label}: numbers`} columns=${columns} rows=${[...series, ...others]} keyOf=${(one) => one.name} empty="" />
      </div>
    </section>
  `;
}

function range(samples, now, field, unit) {
  const values = [...samples, now].map((one) => one[field]).filter((one) => one !== null);
  return `${unit(Math.min(...values))} to ${unit(Math.max(...values))}`;
}

function percents(number) {
  return number === null || number === undefined ? "–" : number < 10 ? `${number.toFixed(1)} %` : `${count(number)} %`;
}
