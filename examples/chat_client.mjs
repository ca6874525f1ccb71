// Chat with a server of the OpenAI API, with Node 18 or later alone: node chat_client.mjs [URL]
import { createInterface } from "node:readline";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const headers = {
  "Content-Type": "application/json",
  Authorization: `Bearer ${process.env.OPENAI_API_KEY ?? "none"}`,
};

// Send a request, and send it again if the server has no room now and says when it will.
async function send(path, body) {
  for (let triesLeft = 5; ; triesLeft--) {
    const response = await fetch(url + path, { method: "POST", headers, body });
    const seconds = response.headers.get("Retry-After");
    if (![429, 503].includes(response.status) || seconds === null || triesLeft === 0) return response;
    await new Promise((resolve) => setTimeout(resolve, 1000 * Number(seconds)));
  }
}

// The pieces of an answer, as they come.
async function* ask(messages) {
  const body = JSON.stringify({ messages, max_tokens: 48, stream: true });
  const response = await send("/v1/chat/completions", body);
  if (!response.ok) throw new Error((await response.json()).error.message);
  let unread = "";
  for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
    const events = (unread + text).split("\n\n");
    unread = events.pop(); // an event that has not come whole
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk.choices[0].delta.content ?? "";
    }
  }
}

const messages = [];
process.stdout.write("> ");
for await (const line of createInterface({ input: process.stdin })) {
  messages.push({ role: "user", content: line });
  let answer = "";
  for await (const piece of ask(messages)) {
    process.stdout.write(piece);
    answer += piece;
  }
  messages.push({ role: "assistant", content: answer });
  process.stdout.write("\n> ");
}
