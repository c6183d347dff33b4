// The official SDKs for Node as clients of the proxy; prints as JSON what they made of its answers.
//
//     node node_sdk.mjs FOLDER_WITH_SDKS URL KEY SCENARIO
import { createRequire } from "node:module";

const [folder, url, apiKey, scenario] = process.argv.slice(2);
const require = createRequire(folder + "/");
const { default: OpenAI } = require("openai");
const { default: Anthropic } = require("@anthropic-ai/sdk");

const openai = new OpenAI({ baseURL: url + "/v1", apiKey, maxRetries: 0, timeout: 20_000 });
const anthropic = new Anthropic({ baseURL: url, apiKey, maxRetries: 0, timeout: 20_000 });

const PIXEL =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==";
const DATA = "data:image/png;base64," + PIXEL;
const SCHEMA = { type: "object", properties: { cmd: { type: "string" } }, required: ["cmd"] };

async function chat() {
  const image = { type: "image_url", image_url: { url: DATA } };
  const messages = [{ role: "user", content: [{ type: "text", text: "see" }, image] }];
  const tools = [{ type: "function", function: { name: "shell", parameters: SCHEMA } }];
  const seen = [];
  for (const streaming of [false, true]) {
    let answer, deltas = "";
    if (streaming) {
      const stream = openai.chat.completions.stream({
        model: "m", messages, tools, stream_options: { include_usage: true },
      });
      stream.on("content", (delta) => (deltas += delta));
      answer = await stream.finalChatCompletion();
    } else {
      answer = await openai.chat.completions.create({ model: "m", messages, tools });
      deltas = answer.choices[0].message.content;
    }
    const { message, finish_reason: finish } = answer.choices[0];
    seen.push({
      text: message.content, deltas, finish, usage: answer.usage,
      calls: message.tool_calls.map(({ id, function: { name, arguments: args } }) => [id, name, args]),
    });
    messages.push(message);
    for (const call of message.tool_calls) messages.push({ role: "tool", tool_call_id: call.id, content: "ok" });
  }
  const several = await openai.chat.completions.create({ model: "m", messages, tools, n: 2 });
  return { seen, indexes: several.choices.map((choice) => choice.index) };
}

async function responses() {
  const image = { type: "input_image", image_url: DATA, detail: "auto" };
  const input = [{ role: "user", content: [{ type: "input_text", text: "see" }, image] }];
  const tools = [{ type: "function", name: "shell", parameters: SCHEMA, strict: false }];
  const seen = [];
  for (const streaming of [false, true]) {
    let answer, deltas = "";
    if (streaming) {
      const stream = openai.responses.stream({ model: "m", input, tools });
      stream.on("response.output_text.delta", (event) => (deltas += event.delta));
      answer = await stream.finalResponse();
    } else {
      answer = await openai.responses.create({ model: "m", input, tools });
      deltas = answer.output_text;
    }
    const calls = answer.output.filter((item) => item.type === "function_call");
    seen.push({
      text: answer.output_text, deltas, finish: answer.status, usage: answer.usage,
      reasoning: answer.output.filter((i) => i.type === "reasoning").map((i) => i.content[0].text),
      calls: calls.map((call) => [call.call_id, call.name, call.arguments]),
    });
    input.push(...answer.output);
    for (const call of calls) input.push({ type: "function_call_output", call_id: call.call_id, output: "ok" });
  }
  await openai.responses.create({ model: "m", input, tools });
  return { seen };
}

async function completions() {
  const whole = await openai.completions.create({ model: "m", prompt: "hi", n: 2 });
  let text = "";
  for await (const chunk of await openai.completions.create({ model: "m", prompt: "hi", stream: true }))
    text += chunk.choices.map((choice) => choice.text).join("");
  return { whole: whole.choices.map((choice) => choice.text), text, usage: whole.usage };
}

async function messages() {
  const image = { type: "image", source: { type: "base64", media_type: "image/png", data: PIXEL } };
  const history = [{ role: "user", content: [{ type: "text", text: "see" }, image] }];
  const ask = {
    model: "m", max_tokens: 2048, system: "be brief", thinking: { type: "enabled", budget_tokens: 1024 },
    tools: [{ name: "shell", description: "runs", input_schema: SCHEMA }],
  };
  const seen = [];
  for (const streaming of [false, true]) {
    let answer, deltas = "";
    if (streaming) {
      const stream = anthropic.messages.stream({ ...ask, messages: history });
      stream.on("text", (delta) => (deltas += delta));
      answer = await stream.finalMessage();
    } else {
      answer = await anthropic.messages.create({ ...ask, messages: history });
      deltas = answer.content.filter((b) => b.type === "text").map((b) => b.text).join("");
    }
    const calls = answer.content.filter((block) => block.type === "tool_use");
    seen.push({
      deltas, finish: answer.stop_reason, usage: answer.usage,
      text: answer.content.filter((b) => b.type === "text").map((b) => b.text).join(""),
      reasoning: answer.content.filter((b) => b.type === "thinking").map((b) => b.thinking),
      calls: calls.map((call) => [call.id, call.name, call.input]),
    });
    history.push({ role: "assistant", content: answer.content });
    const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "ok" }));
    history.push({ role: "user", content: results });
  }
  await anthropic.messages.create({ ...ask, messages: history });
  const counted = await anthropic.messages.countTokens({ model: "m", messages: history, system: "be brief" });
  return { seen, counted: counted.input_tokens };
}

async function models() {
  const listed = { openai: [], anthropic: [] };
  for await (const model of openai.models.list()) listed.openai.push(model.id);
  for await (const model of anthropic.models.list()) listed.anthropic.push(model.id);
  return { ...listed, named: [(await openai.models.retrieve("x")).id, (await anthropic.models.retrieve("y")).id] };
}

async function errors() {
  const hi = [{ role: "user", content: "hi" }];
  const failed = async (call) => {
    try {
      await call();
      return null;
    } catch (error) {
      return { status: error.status, kind: error.constructor.name, code: error.code ?? null, text: error.message };
    }
  };
  const late = new OpenAI({ baseURL: url + "/v1", apiKey: apiKey + "0", maxRetries: 0 });
  return [
    await failed(() => openai.chat.completions.create({ model: "m", messages: [{ role: "robot", content: "x" }] })),
    await failed(() => openai.responses.create({ model: "m", input: "hi", previous_response_id: "resp_1" })),
    await failed(() => anthropic.messages.create({ model: "m", max_tokens: 0, messages: hi })),
    await failed(() => late.chat.completions.create({ model: "m", messages: hi })),
    await failed(() => anthropic.messages.stream({ model: "m", max_tokens: 9, messages: [] }).finalMessage()),
  ];
}

const made = await { chat, responses, completions, messages, models, errors }[scenario]();
process.stdout.write(JSON.stringify(made));
