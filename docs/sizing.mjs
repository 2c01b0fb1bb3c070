// The sizes of docs/sizing.md. `sizes` is compared with the server's own forecast by tests/worker/startup/test_forecast.py.

export const MODELS = {
  "SmolLM2 135M": { hidden_size: 576, num_hidden_layers: 30, num_attention_heads: 9, num_key_value_heads: 3, intermediate_size: 1536, vocab_size: 49152, tie_word_embeddings: true },
  "Qwen3 0.6B": { hidden_size: 1024, num_hidden_layers: 28, num_attention_heads: 16, num_key_value_heads: 8, head_dim: 128, intermediate_size: 3072, vocab_size: 151936, tie_word_embeddings: true },
  "Qwen3 4B": { hidden_size: 2560, num_hidden_layers: 36, num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128, intermediate_size: 9728, vocab_size: 151936, tie_word_embeddings: true },
  "Qwen3 8B": { hidden_size: 4096, num_hidden_layers: 36, num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128, intermediate_size: 12288, vocab_size: 151936, tie_word_embeddings: false },
  "Llama 3.1 8B": { hidden_size: 4096, num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8, intermediate_size: 14336, vocab_size: 128256, tie_word_embeddings: false },
};
const PROCESS_BYTES = 4e8;
// Bytes of a number in a layer; embedding and output layer keep 2, or 4.
const LAYER_BYTES = { float32: 4, bfloat16: 2, int8: 1, int4: 4.5 / 8 };

export class Unknown extends Error {}

// Bytes of weights, of the KV cache, and of both with the processes. `config` is a config.json of a dense decoder.
export function sizes(config, { format = "bfloat16", sequences = 1, tokens = 1 } = {}) {
  const model = config.text_config || config;
  if (model.num_experts || model.num_local_experts || model.kv_lora_rank) throw new Unknown("Experts and compressed keys are not counted here: ask `tokenyard doctor`.");
  const { hidden_size: hidden, num_hidden_layers: layers, num_attention_heads: heads, intermediate_size: inner, vocab_size: vocabulary } = model;
  if (![hidden, layers, heads, inner, vocabulary].every((each) => each > 0)) throw new Unknown("This is not the config.json of a decoder of the usual kind: ask `tokenyard doctor`.");
  const keyHeads = model.num_key_value_heads || heads;
  const size = model.head_dim || hidden / heads;
  const inLayers = layers * (hidden * size * (2 * heads + 2 * keyHeads) + 3 * hidden * inner);
  const isTied = config.tie_word_embeddings ?? model.tie_word_embeddings ?? false;
  const outside = vocabulary * hidden * (isTied ? 1 : 2);
  const numberBytes = format === "float32" ? 4 : 2;
  const weights = inLayers * LAYER_BYTES[format] + outside * numberBytes;
  const perToken = 2 * layers * keyHeads * size * numberBytes;
  const cache = perToken * sequences * tokens;
  return { parameters: inLayers + outside, weights, perToken, cache, total: weights + cache + PROCESS_BYTES };
}

const inWords = (bytes) => (bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : bytes >= 1e6 ? `${(bytes / 1e6).toFixed(0)} MB` : `${bytes.toLocaleString("en")} bytes`);

function start(form) {
  const choice = form.elements.model;
  choice.append(...Object.keys(MODELS).map((name) => new Option(name)), new Option("the config.json below", ""));
  const draw = () => {
    form.elements.config.hidden = choice.value !== "";
    const rows = [];
    try {
      const config = choice.value ? MODELS[choice.value] : JSON.parse(form.elements.config.value || "{}");
      const [sequences, tokens] = [form.elements.sequences.valueAsNumber || 1, form.elements.tokens.valueAsNumber || 1];
      const found = sizes(config, { format: form.elements.format.value, sequences, tokens });
      const flag = { int8: " --quantization int8", int4: " --quantization int4", float32: " --dtype float32", bfloat16: "" }[form.elements.format.value];
      const cacheMiB = Math.ceil(found.cache / 2 ** 20);
      rows.push(["parameters", `${(found.parameters / 1e9).toFixed(2)} billion`], ["weights", inWords(found.weights)], ["KV cache for one token", inWords(found.perToken)],
        ["KV cache for all", inWords(found.cache)], ["together, with 0.4 GB for the processes", inWords(found.total)],
        ["options", `--max-model-len ${tokens} --max-num-seqs ${sequences} --kv-cache-memory ${cacheMiB}MiB${flag}`]);
    } catch (error) {
      rows.push(["", error instanceof Unknown ? error.message : "This is not JSON."]);
    }
    const table = document.getElementById("sizing-result");
    table.replaceChildren(...rows.map(([name, value]) => {
      const row = document.createElement("tr");
      for (const text of [name, value]) row.insertCell().textContent = text;
      return row;
    }));
  };
  form.addEventListener("input", draw);
  choice.value = "Qwen3 4B";
  draw();
}

if (globalThis.document && document.getElementById("sizing")) start(document.getElementById("sizing"));
