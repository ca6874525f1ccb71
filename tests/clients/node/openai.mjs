// Calls by Node's openai library, as authors of applications write them. Each method is one
// snippet.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodFunction } from "openai/helpers/zod";
import { z } from "zod";

const HELLO = [{ role: "user", content: "def hello(" }];
const ASK = [{ role: "user", content: "What is the weather in Bern?" }];
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const Ticket = z.object({ kind: z.enum(["bug", "wish"]), urgent: z.boolean() });

export default ({ scriptedUrl, model }) => ({
  async a_chat() {
    const completion = await new OpenAI().chat.completions.create({
      model, messages: HELLO, max_tokens: 6 });
    assert.equal(completion.choices[0].message.role, "assistant");
    assert.ok(completion.usage.total_tokens > 0);
  },

  async a_stream() {
    const stream = await new OpenAI().chat.completions.create({
      model, messages: HELLO, max_tokens: 6, stream: true,
      stream_options: { include_usage: true } });
    let text = "", usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.ok(text.length > 0 && usage.completion_tokens <= 6);
  },

  async the_stream_helper() {
    const runner = new OpenAI().chat.completions.stream({ model, messages: HELLO, max_tokens: 6 });
    let text = "";
    runner.on("content", (delta) => { text += delta; });
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.content, text);
  },

  async a_conversation() {
    const client = new OpenAI(), messages = [...HELLO];
    for (const content of ["and?", "so?"]) {
      const { choices } = await client.chat.completions.create({ model, messages, max_tokens: 3 });
      messages.push(choices[0].message, { role: "user", content });
    }
    assert.equal(messages.length, 5);
  },

  async a_zod_schema() {
    const completion = await new OpenAI().chat.completions.parse({
      model, messages: HELLO, max_tokens: 1000,
      response_format: zodResponseFormat(Ticket, "ticket") });
    assert.ok(Ticket.parse(completion.choices[0].message.parsed));
  },

  async json_mode() {
    const completion = await new OpenAI().chat.completions.create({
      model, messages: HELLO, max_tokens: 10, response_format: { type: "json_object" } });
    assert.match(completion.choices[0].message.content, /^\s*\{/);
  },

  async a_tool_loop() {
    const client = new OpenAI({ baseURL: scriptedUrl }), messages = [...ASK];
    for (let turn = 0; turn < 4; turn++) {
      const { choices } = await client.chat.completions.create({
        model: "scripted", messages, tools: [WEATHER] });
      messages.push(choices[0].message);
      if (!choices[0].message.tool_calls) break;
      for (const call of choices[0].message.tool_calls) {
        assert.deepEqual(JSON.parse(call.function.arguments), { city: "Bern" });
        messages.push({ role: "tool", tool_call_id: call.id, content: "21 degrees" });
      }
    }
    assert.equal(messages.at(-1).content, "It is 21 degrees in Bern.");
  },

  async run_tools() {
    const runner = new OpenAI({ baseURL: scriptedUrl }).chat.completions.runTools({
      model: "scripted", messages: ASK, tools: [{ type: "function", function: {
        function: ({ city }) => `21 degrees in ${city}`, parse: JSON.parse,
        ...WEATHER.function } }] });
    assert.equal(await runner.finalContent(), "It is 21 degrees in Bern.");
  },

  async run_tools_streamed() {
    const runner = new OpenAI({ baseURL: scriptedUrl }).chat.completions.runTools({
      model: "scripted", stream: true, messages: ASK, tools: [{ type: "function", function: {
        function: ({ city }) => `21 degrees in ${city}`, parse: JSON.parse,
        ...WEATHER.function } }] });
    assert.equal(await runner.finalContent(), "It is 21 degrees in Bern.");
  },

  async a_zod_function_that_must_be_called() {
    const completion = await new OpenAI().chat.completions.parse({
      model, messages: ASK, max_tokens: 1000, tool_choice: "required", parallel_tool_calls: false,
      tools: [zodFunction({ name: "file_ticket", parameters: Ticket })] });
    assert.ok(Ticket.parse(completion.choices[0].message.tool_calls[0].function.parsed_arguments));
  },

  async a_response() {
    const response = await new OpenAI().responses.create({
      model, input: "def f(", max_output_tokens: 5 });
    assert.ok(response.output_text.length > 0);
  },

  async a_streamed_response() {
    const kinds = [];
    const stream = await new OpenAI().responses.create({
      model, input: "a", max_output_tokens: 3, stream: true });
    for await (const event of stream) kinds.push(event.type);
    assert.equal(kinds[0], "response.created");
  },

  async a_response_with_a_function() {
    const client = new OpenAI({ baseURL: scriptedUrl });
    const tool = { type: "function", strict: false, ...WEATHER.function };
    const first = await client.responses.create({ model: "scripted", input: ASK, tools: [tool] });
    const call = first.output.find((item) => item.type === "function_call");
    const last = await client.responses.create({ model: "scripted", tools: [tool], input: [
      ...ASK, ...first.output,
      { type: "function_call_output", call_id: call.call_id, output: "wet" }] });
    assert.equal(last.output_text, "It is 21 degrees in Bern.");
  },

  async a_completion() {
    const made = await new OpenAI().completions.create({
      model, prompt: ["import ", "class "], max_tokens: 3 });
    assert.equal(made.choices.length, 2);
  },

  async the_models() {
    const ids = [];
    for await (const each of await new OpenAI().models.list()) ids.push(each.id);
    assert.ok(ids.includes(model));
  },

  async an_aborted_stream() {
    const stream = await new OpenAI().chat.completions.create({
      model, messages: HELLO, max_tokens: 500, stream: true });
    for await (const chunk of stream) {
      assert.ok(chunk.id);
      break;
    }
  },

  async errors_by_their_classes() {
    const client = new OpenAI({ maxRetries: 0 });
    await assert.rejects(client.chat.completions.create({ model: "gone", messages: HELLO }),
      OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ model, messages: HELLO, temperature: 9 }),
      (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
    await assert.rejects(client.embeddings.create({ model, input: "a" }),
      (error) => error instanceof OpenAI.BadRequestError && error.code === "unsupported_task");
  },
});
