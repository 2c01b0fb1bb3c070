// Streamed and whole, failing and aborted, by the OpenAI SDK for Node.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const call = {
  model: "tokenyard-demo",
  messages: [{ role: "user", content: "Count from 3 to 8." }],
  temperature: 0,
  max_tokens: 30,
};

const whole = await client.chat.completions.create(call);
let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...call,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const helper = await client.chat.completions.stream(call).finalChatCompletion();
const completion = await client.completions.create({
  model: call.model,
  prompt: "The capital of France is",
  temperature: 0,
  ignore_eos: true,
  max_tokens: 4,
  logprobs: 1,
});

const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { unit: { enum: ["C", "F"] } },
      required: ["unit"],
      additionalProperties: false,
    },
  },
};
const called = await client.chat.completions
  .stream({ ...call, tools: [weather], tool_choice: "required", parallel_tool_calls: false })
  .finalChatCompletion();
const tool = called.choices[0].message.tool_calls[0];

const response = await client.responses
  .stream({ model: call.model, input: "Count from 3 to 8.", temperature: 0, max_output_tokens: 30 })
  .finalResponse();
const stored = await client.responses.retrieve(response.id);

async function errorOf(body) {
  try {
    await client.chat.completions.create({ ...call, ...body });
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, param: error.param, id: Boolean(error.requestID) };
  }
}

const aborted = client.chat.completions.stream({ ...call, max_tokens: 400, ignore_eos: true });
let chunksBeforeAbort = 0;
try {
  for await (const _ of aborted) {
    chunksBeforeAbort += 1;
    if (chunksBeforeAbort === 3) aborted.abort();
  }
} catch (error) {
  if (!(error instanceof OpenAI.APIUserAbortError)) throw error;
}

const models = [];
for await (const model of client.models.list()) models.push(model.id);
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    helper: helper.choices[0].message.content,
    usage: usage.completion_tokens === whole.usage.completion_tokens,
    completion_tokens: completion.choices[0].logprobs.tokens.length,
    tool: { name: tool.function.name, unit: JSON.parse(tool.function.arguments).unit, id: Boolean(tool.id) },
    response: [response.output_text, stored.output_text, response.status],
    bad_value: await errorOf({ temperature: 99 }),
    no_model: await errorOf({ model: "nobody" }),
    chunks_before_abort: chunksBeforeAbort,
    models,
  }),
);
