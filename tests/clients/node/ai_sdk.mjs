// Calls by Vercel's AI SDK, as authors of applications write them. Each method is one snippet.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError, Output, ToolLoopAgent, generateObject, generateText, jsonSchema, stepCountIs,
  streamObject, streamText, tool,
} from "ai";
import { z } from "zod";

const Ticket = z.object({ kind: z.enum(["bug", "wish"]), urgent: z.boolean() });
const QUESTION = "What is the weather in Bern?";
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => ({ city, degrees: 21 }),
});

export default ({ url, scriptedUrl, model: name }) => {
  const here = createOpenAICompatible({
    name: "sidestep", baseURL: url, apiKey: "none", includeUsage: true,
    supportsStructuredOutputs: true });
  const there = createOpenAICompatible({
    name: "sidestep", baseURL: scriptedUrl, includeUsage: true });
  const model = here(name), scripted = there("scripted");

  return {
  async generate_text() {
    const { text, usage, finishReason } = await generateText({
      model, prompt: "def hello(", maxOutputTokens: 8, instructions: "You write Python." });
    assert.ok(text.length > 0 && usage.outputTokens <= 8);
    assert.ok(["stop", "length"].includes(finishReason));
  },

  async generate_text_of_messages() {
    const { text } = await generateText({ model, maxOutputTokens: 4, messages: [
      { role: "user", content: "import os" },
      { role: "assistant", content: [{ type: "text", text: "import sys" }] },
      { role: "user", content: [{ type: "text", text: "import re" }] }] });
    assert.equal(typeof text, "string");
  },

  async every_setting() {
    const { text } = await generateText({
      model, prompt: "def f(", maxOutputTokens: 4, temperature: 0.4, topP: 0.9, seed: 3,
      presencePenalty: 0.1, frequencyPenalty: 0.1, stopSequences: ["\n\n"], maxRetries: 1 });
    assert.equal(typeof text, "string");
  },

  async stream_text() {
    const result = streamText({ model, prompt: "for i in", maxOutputTokens: 6 });
    let text = "";
    for await (const part of result.textStream) text += part;
    assert.equal(text, await result.text);
    assert.ok((await result.usage).outputTokens <= 6);
  },

  async generate_object() {
    const { object } = await generateObject({
      model, schema: Ticket, prompt: "a ticket", maxOutputTokens: 1000 });
    assert.ok(Ticket.parse(object));
  },

  async generate_object_of_a_json_schema() {
    const { object } = await generateObject({
      model, prompt: "a", maxOutputTokens: 1000, schema: jsonSchema({
        type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"],
        additionalProperties: false }) });
    assert.equal(typeof object.yes, "boolean");
  },

  async generate_an_enum() {
    const { object } = await generateObject({
      model, output: "enum", enum: ["sunny", "rainy"], prompt: "the weather",
      maxOutputTokens: 1000 });
    assert.ok(["sunny", "rainy"].includes(object));
  },

  async stream_object() {
    const result = streamObject({
      model, schema: Ticket, prompt: "a ticket", maxOutputTokens: 1000 });
    for await (const part of result.partialObjectStream) assert.equal(typeof part, "object");
    assert.ok(Ticket.parse(await result.object));
  },

  async generate_text_with_an_output() {
    const { output } = await generateText({
      model, output: Output.object({ schema: Ticket }), prompt: "a ticket",
      maxOutputTokens: 1000 });
    assert.ok(Ticket.parse(output));
  },

  async a_tool_loop() {
    const { text, steps } = await generateText({
      model: scripted, tools: { get_weather: weather }, stopWhen: stepCountIs(4),
      prompt: QUESTION });
    assert.equal(text, "It is 21 degrees in Bern.");
    assert.equal(steps.length, 2);
  },

  async a_streamed_tool_loop() {
    const result = streamText({
      model: scripted, tools: { get_weather: weather }, stopWhen: stepCountIs(4),
      prompt: QUESTION });
    const kinds = [];
    for await (const part of result.fullStream) kinds.push(part.type);
    assert.ok(kinds.includes("tool-call") && kinds.includes("tool-result"));
    assert.equal(await result.text, "It is 21 degrees in Bern.");
  },

  async an_agent() {
    const agent = new ToolLoopAgent({ model: scripted, tools: { get_weather: weather } });
    const { text } = await agent.generate({ prompt: QUESTION });
    assert.equal(text, "It is 21 degrees in Bern.");
  },

  async a_tool_that_must_be_called() {
    const { toolCalls } = await generateText({
      model, prompt: "a ticket", toolChoice: "required", maxOutputTokens: 1000,
      tools: { file_ticket: tool({ inputSchema: Ticket }) } });
    assert.equal(toolCalls[0].toolName, "file_ticket"); // the last of several may be cut off
    assert.ok(Ticket.parse(toolCalls[0].input));
  },

  async options_of_the_provider() {
    const { text } = await generateText({
      model, prompt: "def f(", maxOutputTokens: 3,
      providerOptions: { sidestep: { user: "me", top_k: 5 } } });
    assert.equal(typeof text, "string");
  },

  async a_completion_model() {
    const { text } = await generateText({
      model: here.completionModel(name), prompt: "import ", maxOutputTokens: 3 });
    assert.equal(typeof text, "string");
  },

  async the_openai_provider_s_chats() {
    const openai = createOpenAI({ baseURL: url, apiKey: "none" });
    const { text } = await generateText({
      model: openai.chat(name), prompt: "def f(", maxOutputTokens: 4 });
    assert.equal(typeof text, "string");
  },

  async the_openai_provider_s_responses() {
    const openai = createOpenAI({ baseURL: url, apiKey: "none" });
    const { text } = await generateText({
      model: openai(name), prompt: "def f(", maxOutputTokens: 4 });
    assert.ok(text.length > 0);
  },

  async a_tool_loop_over_responses() {
    const openai = createOpenAI({ baseURL: scriptedUrl, apiKey: "none" });
    const result = streamText({
      model: openai("scripted"), tools: { get_weather: weather }, stopWhen: stepCountIs(4),
      prompt: QUESTION });
    assert.equal(await result.text, "It is 21 degrees in Bern.");
  },

  async errors_of_the_api() {
    await assert.rejects(generateText({ model, prompt: "word ".repeat(3000), maxRetries: 0 }),
      (error) => APICallError.isInstance(error) && error.statusCode === 400
        && error.message.includes("maximum context length"));
    await assert.rejects(generateText({ model: here("gone"), prompt: "a", maxRetries: 0 }),
      (error) => APICallError.isInstance(error) && error.statusCode === 404);
  },
  };
};
