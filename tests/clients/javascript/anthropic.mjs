// Anthropic's SDK: a message with a tool in two turns, the second one streamed.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "get_weather", description: "The weather.", input_schema }];
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const first = await client.messages.create({ model: "policy", max_tokens: 400, messages, tools });
messages.push({ role: "assistant", content: first.content });
const results = first.content.filter((block) => block.type === "tool_use");
messages.push({ role: "user", content: results.map((block) => ({ type: "tool_result", tool_use_id: block.id, content: "sunny in Paris" })) });
const second = await client.messages.stream({ model: "policy", max_tokens: 400, messages, tools }).finalMessage();
console.log(JSON.stringify({ messages: second.content[0].text }));
