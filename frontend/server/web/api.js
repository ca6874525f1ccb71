// Send requests to the server of this page. The API key stays in the tab's session storage, and is
// sent to this server alone.

const KEY = "sidestep-api-key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY),
  set: (key) => sessionStorage.setItem(KEY, key),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Error of a request that the server did not answer with success. */
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
    // The answer came from something between the page and the server.
  }
  throw new ApiError(answer.status, message);
}

/** Return the flight recorder of a replica from the step `since` on.
 *
 *  since: null for the newest steps. replica: null for the first replica that lives. */
export async function getFlight(since, replica, signal) {
  const query = new URLSearchParams();
  if (since !== null) query.set("since", since);
  if (replica !== null) query.set("replica", replica);
  const answer = await ask(`/v1/flight?${query}`, { signal });
  return answer.json();
}

/** Yield the chunks of a streamed chat, as they come.
 *
 *  `onQueue(position)` is called with the request's queue position while it waits. */
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

/** Yield the server-sent events of a stream.
 *
 *  This server sends one `data` line for each, and comments while a stream waits. */
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
