// Agents of libraries for Node.js, each in a few lines: `node clients.mjs AGENT`, where the packages are. Lines as in clients.py.

import { createInterface } from "node:readline";

const parameters = { type: "object", properties: { place: { type: "string" } }, required: ["place"] };
const question = (tools) => ({ role: "user", content: tools ? "Where is it?" : "Say hello." });

const agents = {
  async openai_chat(url, key, streamed, tools) {
    const { default: OpenAI } = await import("openai");
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
    const offered = tools ? { tools: [{ type: "function", function: { name: "look", parameters } }] } : {};
    for (const messages = [question(tools)]; ; ) {
      const given = { model: "m", messages, ...offered };
      const reply = streamed
        ? await client.chat.completions.stream(given).finalChatCompletion()
        : await client.chat.completions.create(given);
      const message = reply.choices[0].message;
      messages.push(message);
      if (!message.tool_calls?.length) return message.content;
      for (const call of message.tool_calls) messages.push({ role: "tool", tool_call_id: call.id, content: "a cat" });
    }
  },

  async openai_responses(url, key, streamed, tools) {
    const { default: OpenAI } = await import("openai");
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
    const offered = tools ? { tools: [{ type: "function", name: "look", parameters, strict: false }] } : {};
    for (const input = [question(tools)]; ; ) {
      const given = { model: "m", input, ...offered };
      const reply = streamed
        ? await client.responses.stream(given).finalResponse()
        : await client.responses.create(given);
      input.push(...reply.output);
      const calls = reply.output.filter((item) => item.type === "function_call");
      if (!calls.length) return reply.output.find((item) => item.type === "message").content[0].text;
      for (const call of calls) input.push({ type: "function_call_output", call_id: call.call_id, output: "a cat" });
    }
  },

  async anthropic_messages(url, key, streamed, tools) {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey: key });
    const offered = tools ? { tools: [{ name: "look", input_schema: parameters }] } : {};
    for (const messages = [question(tools)]; ; ) {
      const given = { model: "m", max_tokens: 100, messages, ...offered };
      const reply = streamed ? await client.messages.stream(given).finalMessage() : await client.messages.create(given);
      messages.push({ role: "assistant", content: reply.content });
      const calls = reply.content.filter((block) => block.type === "tool_use");
      if (!calls.length) return reply.content.find((block) => block.type === "text").text;
      const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "a cat" }));
      messages.push({ role: "user", content: results });
    }
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { url, key, streamed, tools } = JSON.parse(line);
  const said = agents[process.argv[2]](url, key, streamed, tools);
  const answer = await said.then((final) => ({ final }), (error) => ({ error: String(error) }));
  console.log(JSON.stringify(answer));
}
