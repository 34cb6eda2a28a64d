// Settings of `GET /admin/config` as a list, and changes as `PATCH /admin/config` takes them.

const MASK = "********";
const TABLES = ["models", "adapters"];
const DEFAULT = { kind: "default", detail: "" };

/**
 * Every setting, with those of models' and adapters' tables.
 *
 * @returns {{key: string, path: string[], value: unknown, origin: {kind: string, detail: string}, isLive: boolean, description: string}[]}
 */
export function settingsOf({ settings, origins, live_keys: liveKeys, descriptions }) {
  const live = new Set(liveKeys);
  const found = [];
  const add = (path, value, isInTable) => {
    const key = path.join(".");
    const isLive = (isInTable || live.has(key)) && value !== MASK;
    found.push({ key, path, value, origin: origins[key] ?? DEFAULT, isLive, description: descriptions[key] ?? "" });
  };
  const addTable = (path, table) => {
    for (const [name, value] of Object.entries(table)) {
      if (isTable(value)) addTable([...path, name], value);
      else add([...path, name], value, true);
    }
  };
  for (const [section, values] of Object.entries(settings)) {
    for (const [name, value] of Object.entries(values)) {
      if (TABLES.includes(section) && isTable(value)) addTable([section, name], value);
      else add([section, name], value, false);
    }
  }
  return found;
}

/** The body of a change; null takes an earlier change back. */
export function changeOf({ path }, value) {
  return path.reduceRight((inner, name) => ({ [name]: inner }), value);
}

/** A value as it is shown and typed. */
export function textOf(value) {
  if (value === null) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** A typed text as a value: what reads as JSON is that, all else is text. */
export function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function isTable(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
