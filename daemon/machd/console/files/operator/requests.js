// Requests: the last finished ones with their times, sorted and filtered; never a text.

import { html, useMemo, useState } from "/console/vendor/htm-preact.js";
import { count, counted, milliseconds, moment, rate } from "./format.js";
import { sorted, Table } from "./table.js";

const CACHE_REASONS = {
  whole: () => "all of it was found",
  continued: (tokens) => `goes on behind a kept text of ${tokens}`,
  first_seen: () => "no kept text begins like it",
  diverged: (tokens) => `differs from every kept text after ${tokens}`,
  image_changed: (tokens) => `has another image or video after ${tokens}`,
  evicted: (tokens) => `more than ${tokens} were kept once, and are not any more`,
  adapter: (tokens) => `more than ${tokens} are kept for another adapter`,
  other_namespace: (tokens) => `more than ${tokens} are kept for another client`,
  kind_cannot: () => "this model's cache cannot begin there",
  off: () => "the prefix cache is off",
  prompt_logprobs: () => "prompt log-probabilities need it all computed",
};

const COLUMNS = [
  { name: "finished", label: "Finished", value: (one) => one.finished_at, show: (one) => moment(one.finished_at) },
  { name: "model", label: "Model", value: (one) => one.model, show: (one) => modelOf(one) },
  { name: "client", label: "Client", value: (one) => one.client, show: (one) => one.client },
  { name: "endpoint", label: "Endpoint", value: (one) => one.endpoint, show: (one) => one.endpoint },
  { name: "result", label: "Result", value: (one) => one.error ?? one.finish_reason, show: (one) => result(one) },
  timeColumn("queue", "Queue", "queue_ms"),
  timeColumn("first", "First token", "ttft_ms"),
  timeColumn("total", "Total", "latency_ms"),
  countColumn("length", "Prompt", "prompt_tokens"),
  countColumn("cached", "Cached", "cached_tokens"),
  countColumn("completion", "Tokens", "completion_tokens"),
  rateColumn("prefill", "Prefill tokens/s", "prompt_tps"),
  rateColumn("rate", "Tokens/s", "generation_tps"),
  { name: "mode", label: "Mode", value: (one) => one.decode_mode, show: (one) => one.decode_mode ?? "–" },
  { name: "id", label: "Id", show: (one) => html`<code title=${`${one.id}, X-Request-Id ${one.request_id}`}>…${one.id.slice(-8)}</code>` },
];

const WHY_COLUMN = { name: "why", label: "Why not more cached", value: (one) => one.cache_reason, show: (one) => whyNotMore(one) };

export function RequestsView({ state }) {
  const { finished } = state;
  const [filter, setFilter] = useState("");
  const [kind, setKind] = useState("all");
  const [sort, setSort] = useState({ name: "finished", isDown: true });
  const table = useMemo(() => {
    const hasReasons = finished.some((one) => one.cache_reason !== undefined);
    const at = COLUMNS.findIndex((one) => one.name === "cached") + 1;
    const columns = hasReasons ? [...COLUMNS.slice(0, at), WHY_COLUMN, ...COLUMNS.slice(at)] : COLUMNS;
    const rows = finished.filter((one) => matches(one, filter.toLowerCase(), kind));
    const onSort = (name) => setSort((now) => ({ name, isDown: now.name === name ? !now.isDown : true }));
    return html`
      <p class="muted" role="status">${`${count(rows.length)} of ${count(finished.length)} requests`}</p>
      <${Table}
        label="Finished requests"
        columns=${columns}
        rows=${sorted(rows, columns, sort)}
        keyOf=${(one) => one.id}
        empty=${finished.length === 0 ? "No request has finished since the daemon started." : "No request matches."}
        sort=${sort}
        onSort=${onSort}
      />
    `;
  }, [finished, filter, kind, sort]);
  return html`
    <h2>Requests</h2>
    <div class="filters">
      <label>Filter <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></label>
      <label>
        Show
        <select value=${kind} onChange=${(event) => setKind(event.target.value)}>
          <option value="all">all</option>
          <option value="errors">errors and aborts</option>
        </select>
      </label>
    </div>
    ${table}
  `;
}

function matches(one, filter, kind) {
  const isBad = one.error !== null || ["abort", "reject", "error"].includes(one.finish_reason);
  if (kind === "errors" && !isBad) return false;
  const words = [one.id, one.request_id, one.model, one.adapter, one.client, one.endpoint, one.finish_reason, one.error, one.cache_reason];
  return filter === "" || words.some((word) => word?.toLowerCase().includes(filter));
}

function modelOf({ model, adapter }) {
  if (!adapter) return model;
  return html`${model} <span class="muted">with ${adapter}</span>`;
}

function result({ error, finish_reason: reason }) {
  return error === null ? reason : html`<span class="bad">${error}</span>`;
}

function whyNotMore({ cache_reason: reason, cache_parted_at_tokens: partedAt }) {
  if (!reason) return "";
  return CACHE_REASONS[reason]?.(counted(partedAt ?? 0, "token")) ?? reason.replaceAll("_", " ");
}

function timeColumn(name, label, field) {
  return { name, label, isNumber: true, value: (one) => one[field], show: (one) => milliseconds(one[field]) };
}

function countColumn(name, label, field) {
  return { name, label, isNumber: true, value: (one) => one[field], show: (one) => count(one[field]) };
}

function rateColumn(name, label, field) {
  return { name, label, isNumber: true, value: (one) => one[field], show: (one) => rate(one[field]) };
}
