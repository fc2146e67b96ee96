// The AI SDK with OpenAI's provider as it is by default, which sends references to stored items in the second turn; then over chats.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: process.argv[3] });
const get_weather = tool({
  description: "The weather.",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const asked = { tools: { get_weather }, prompt: "What is the weather in Paris?", stopWhen: stepCountIs(4) };
const said = await generateText({ model: openai("policy"), ...asked });
const streamed = streamText({ model: openai("policy"), ...asked });
const chat = await generateText({ model: openai.chat("policy"), ...asked });
console.log(JSON.stringify({ responses: said.text, streamed: await streamed.text, chat: chat.text }));
