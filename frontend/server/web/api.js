// Speaks to the server that this page came from. The API key lives in the tab's session storage and goes nowhere else.

const KEY = "sidestep-api-key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY),
  set: (key) => sessionStorage.setItem(KEY, key),
  forget: () => sessionStorage.removeItem(KEY),
};

/** What the server said, when it was no success. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = apiKey.get();
  if (key) headers.set("authorization", `Bearer ${key}`);
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  let message = `the server answered with status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Not the server itself: something between it and us.
  }
  throw new ApiError(answer.status, message);
}

/** The flight recorder of a replica from a step on; null for the newest, and for the first replica that lives. */
export async function getFlight(since, replica, signal) {
  const query = new URLSearchParams();
  if (since !== null) query.set("since", since);
  if (replica !== null) query.set("replica", replica);
  const answer = await ask(`/v1/flight?${query}`, { signal });
  return answer.json();
}

/** The chunks of a streamed chat, as they come. `onQueue(place)` is called with its place while it waits in the queue. */
export async function* streamChat(body, signal, onQueue) {
  const answer = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", "x-queue-events": "1" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const { event, data } of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (event === "queue") {
      onQueue(chunk);
      continue;
    }
    if (chunk.error) throw new ApiError(answer.status, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(answer.status, "the stream broke off");
}

/** Server-sent events; this server sends one `data` line each, and comments while a stream waits. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const { event, data } = Object.fromEntries(part.split("\n").map((line) => {
          const colon = line.indexOf(": ");
          return [line.slice(0, colon), line.slice(colon + 2)];
        }));
        if (data !== undefined) yield { event, data };
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have been ended already
  }
}
