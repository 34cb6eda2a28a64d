// Fields of a request beside its model and messages, as they were typed in.

/** Numbers of sampling. An empty field is not sent: the model's own default holds. */
export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: -1, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "max_completion_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 2, step: 0.05 },
];

export const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

export const MAX_TOP_LOGPROBS = 20;

export const EXAMPLE_SCHEMA = `{
  "type": "object",
  "properties": {
    "name": { "type": "string" },
    "country": { "type": "string" }
  },
  "required": ["name", "country"],
  "additionalProperties": false
}`;

export const EXAMPLE_TOOLS = `[
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "Weather of a city, now.",
      "parameters": {
        "type": "object",
        "properties": { "city": { "type": "string" } },
        "required": ["city"],
        "additionalProperties": false
      }
    }
  }
]`;

/** Settings of a new chat: none is changed, so that none is sent. */
export function newSettings() {
  return {
    numbers: {},
    stop: "",
    effort: "",
    logprobs: false,
    topLogprobs: 5,
    usesSchema: false,
    schema: "",
    usesTools: false,
    tools: "",
  };
}

/**
 * Read settings into fields of a request.
 *
 * @returns {{fields: Record<string, unknown>, problems: Record<string, string>}} Problems by the setting's name;
 *     the fields are to be sent only where there are none.
 */
export function readSettings(settings) {
  const fields = {};
  const problems = {};
  for (const one of NUMBERS) {
    const text = (settings.numbers[one.name] ?? "").trim();
    if (text === "") continue;
    const value = Number(text);
    const problem = numberProblem(one, value);
    if (problem === "") fields[one.name] = value;
    else problems[one.name] = problem;
  }
  const stops = settings.stop.split("\n").filter((line) => line !== "");
  if (stops.length > 0) fields.stop = stops;
  if (settings.effort !== "") fields.reasoning_effort = settings.effort;
  if (settings.logprobs) {
    fields.logprobs = true;
    fields.top_logprobs = settings.topLogprobs;
  }
  if (settings.usesSchema) {
    const schema = parsed(settings.schema);
    if (typeof schema === "object" && schema !== null && !Array.isArray(schema)) {
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    } else {
      problems.schema = "Not a JSON object";
    }
  }
  if (settings.usesTools) {
    const tools = parsed(settings.tools);
    if (Array.isArray(tools)) fields.tools = tools;
    else problems.tools = "Not a JSON list of tools";
  }
  return { fields, problems };
}

function numberProblem({ min = -Infinity, max = Infinity, step }, value) {
  if (!Number.isFinite(value)) return "Not a number";
  if (step === 1 && !Number.isSafeInteger(value)) return "Not a whole number";
  if (value < min) return `At least ${min}`;
  return value > max ? `At most ${max}` : "";
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
