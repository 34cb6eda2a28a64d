// One model: how it is served and why so, as it was when the details were opened or its state changed.

import { html, useEffect, useState } from "/console/vendor/htm-preact.js";
import { bytes, count, moment, percent } from "./format.js";

const FEATURES = {
  continuous_batching: "Continuous batching",
  batched_specdec: "Speculation in a batch",
  kv_quantization: "KV quantization",
  prefix_cache: "Prefix cache",
  chunked_prefill: "Chunked prefill",
  expert_streaming: "Experts on disk",
  batched_adapters: "Adapters in a batch",
};

export function ModelDetails({ model, actions }) {
  const [known, setKnown] = useState({ status: null, capabilities: null });
  useEffect(() => {
    if (model.state !== "ready") {
      setKnown({ status: null, capabilities: null });
      return;
    }
    const query = `?model=${encodeURIComponent(model.name)}`;
    const read = (path) => actions.read(`${path}${query}`).catch(() => null);
    Promise.all([read("/admin/status"), read("/v1/capabilities")]).then(([status, capabilities]) =>
      setKnown({ status, capabilities }),
    );
  }, [model.name, model.state, actions]);
  const rows = [
    ["Path", model.path ?? "the embedded model"],
    ["Loaded", model.loaded_at === null ? "no" : `at ${moment(model.loaded_at)}`],
    ...(known.status === null ? [] : statusRows(known.status)),
  ];
  const judged = known.capabilities === null ? [] : capabilityRows(known.capabilities);
  return html`
    <section class="panel" aria-label=${`Details of ${model.name}`}>
      <h3>${model.name}</h3>
      <${Rows} rows=${rows} />
      ${judged.length > 0 && html`<h3>Capabilities</h3><${Rows} rows=${judged} />`}
    </section>
  `;
}

function Rows({ rows }) {
  return html`
    <dl class="details">${rows.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  `;
}

function statusRows({ decode_mode: mode, speculation, kv, cache, slots, faults }) {
  const rows = [["Slots", count(slots)]];
  if (mode !== null) rows.push(["Decode mode", `${mode.active}: ${mode.reason}`]);
  if (speculation !== null) {
    const accepted = speculation.acceptance === null ? "" : `; ${percent(speculation.acceptance)} of drafts accepted`;
    rows.push(["Draft tokens", `${speculation.mode}: ${speculation.reason}${accepted}`]);
  }
  if (kv !== null) {
    const promised = `${bytes(kv.reserved_bytes)} reserved of ${bytes(kv.budget_bytes)}`;
    rows.push(["KV cache", `${bytes(kv.used_bytes)} used, ${promised}; quantization ${kv.quantization}`]);
  }
  const prefix = cache?.prefix;
  if (prefix) {
    const size = `${bytes(prefix.bytes)} of ${bytes(prefix.limit_bytes)}`;
    const found = `${count(prefix.hits)} full hits, ${count(prefix.prefix_hits)} prefix hits, ${count(prefix.misses)} misses`;
    rows.push(["Prefix cache", `${size}; ${found}`]);
  }
  rows.push(["Faults", `${count(faults.row)} of rows, ${count(faults.engine)} of engines, ${count(faults.engine_restarts)} restarts`]);
  return rows;
}

/** What `machd check` says of the model, as far as it was judged. */
function capabilityRows(capabilities) {
  return Object.entries(FEATURES)
    .filter(([name]) => capabilities[name]?.verdict !== undefined)
    .map(([name, label]) => {
      const { verdict, reason } = capabilities[name];
      return [label, reason ? `${verdict}: ${reason}` : verdict];
    });
}
