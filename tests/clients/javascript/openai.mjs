// OpenAI's SDK: a chat with a tool in two turns, streamed; the same over responses.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather.", parameters } }];
const stream = client.chat.completions.stream({ model: "policy", messages, tools, stream_options: { include_usage: true } });
const first = (await stream.finalChatCompletion()).choices[0].message;
messages.push(first, { role: "tool", tool_call_id: first.tool_calls[0].id, content: "sunny in Paris" });
const second = await client.chat.completions.create({ model: "policy", messages, tools });

const input = [{ role: "user", content: "What is the weather in Paris?" }];
const flat = [{ type: "function", name: "get_weather", description: "The weather.", parameters, strict: true }];
const asked = await client.responses.create({ model: "policy", input, tools: flat, store: false });
input.push(...asked.output);
for (const item of asked.output) {
  if (item.type === "function_call") input.push({ type: "function_call_output", call_id: item.call_id, output: "sunny in Paris" });
}
let told = "";
for await (const event of await client.responses.create({ model: "policy", input, tools: flat, store: false, stream: true })) {
  if (event.type === "response.output_text.delta") told += event.delta;
}
console.log(JSON.stringify({ chat: second.choices[0].message.content, responses: told }));
