// A request as text to run: in a shell, and with OpenAI's client for Python.

const KEY_VARIABLE = "MACHD_API_KEY";

/** Fields that OpenAI's client names; others go into its extra_body. */
const OPENAI_FIELDS = new Set([
  "model",
  "messages",
  "stream",
  "stream_options",
  "temperature",
  "top_p",
  "max_completion_tokens",
  "seed",
  "presence_penalty",
  "frequency_penalty",
  "stop",
  "reasoning_effort",
  "logprobs",
  "top_logprobs",
  "response_format",
  "tools",
]);

/**
 * A command for a POSIX shell.
 *
 * The body is a here-document, which a shell does not look into, and which may be longer than an argument. No line of
 * JSON is `JSON` alone, as a line break inside its strings is written as an escape.
 */
export function asCurl(origin, body, hasKey) {
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $${KEY_VARIABLE}"` : "";
  const command = `curl -N ${origin}/v1/chat/completions${key} \\\n  -H "Content-Type: application/json"`;
  return `${command} \\\n  --data-binary @- <<'JSON'\n${JSON.stringify(body, null, 2)}\nJSON\n`;
}

/** A program that prints the answer as it comes. */
export function asPython(origin, body, hasKey) {
  const known = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const extra = Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name));
  if (extra.length > 0) known.push(["extra_body", Object.fromEntries(extra)]);
  const fields = known.map(([name, value]) => `    ${name}=${pythonLiteral(value, "    ")},\n`).join("");
  const key = hasKey ? `os.environ["${KEY_VARIABLE}"]` : '"unused"';
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=${key})
stream = client.chat.completions.create(
${fields})
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
`;
}

/** JSON's escapes inside strings are Python's, too. */
function pythonLiteral(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((one) => `${inner}${pythonLiteral(one, inner)},\n`)
    : Object.entries(value).map(([name, one]) => `${inner}${JSON.stringify(name)}: ${pythonLiteral(one, inner)},\n`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return items.length === 0 ? open + close : `${open}\n${items.join("")}${indent}${close}`;
}
