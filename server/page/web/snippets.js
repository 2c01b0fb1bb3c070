// A request as a program: curl, Python, JavaScript.

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const KEY_NAME = "TOKENYARD_API_KEY";

// A value as Python writes it. Texts keep JSON's escapes, which Python reads alike.
function python(value, indent = 4) {
  const pad = " ".repeat(indent);
  const end = " ".repeat(indent - 4);
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((item) => pad + python(item, indent + 4)).join(",\n")},\n${end}]` : "[]";
  if (typeof value === "object") {
    const rows = Object.entries(value).map(([name, item]) => `${pad}${JSON.stringify(name)}: ${python(item, indent + 4)}`);
    return rows.length ? `{\n${rows.join(",\n")},\n${end}}` : "{}";
  }
  return JSON.stringify(value);
}

const STANDARD = new Set(["model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed", "tools", "response_format"]);

export function snippet(language, body, { needsKey }) {
  const origin = new URL(".", document.baseURI).href.replace(/\/$/, "");
  const pure = { ...body };
  delete pure.stream_options;
  if (language === "curl") {
    const key = needsKey ? ` \\\n  -H "Authorization: Bearer $${KEY_NAME}"` : "";
    return `curl -N ${origin}/v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify(pure, null, 2))}\n`;
  }
  if (language === "python") {
    const known = Object.entries(pure).filter(([name]) => STANDARD.has(name));
    const extra = Object.fromEntries(Object.entries(pure).filter(([name]) => !STANDARD.has(name)));
    const rows = known.map(([name, value]) => `    ${name}=${python(value, 8)},`);
    if (Object.keys(extra).length) rows.push(`    extra_body=${python(extra, 8)},`);
    const key = needsKey ? `os.environ["${KEY_NAME}"]` : '"none"';
    return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${origin}/v1", api_key=${key})\nchunks = client.chat.completions.create(\n${rows.join("\n")}\n)\nfor chunk in chunks:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)\n`;
  }
  const key = needsKey ? `process.env.${KEY_NAME}` : '"none"';
  return `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${origin}/v1", apiKey: ${key} });\nconst chunks = await client.chat.completions.create(${JSON.stringify(pure, null, 2)});\nfor await (const chunk of chunks) {\n  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");\n}\n`;
}
