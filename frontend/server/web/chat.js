// The conversation: past messages, the answer as it streams, and its speed.

import { ApiError, streamChat } from "/page/api.js";
import { Renderer, copyButton } from "/page/render.js";

const WAIT_MS = 400; // a wait that is shorter is not shown

const byId = (id) => document.getElementById(id);

/** Start the chat. `onKeyNeeded(message)` is called when the server wants another API key. */
export function startChat(onKeyNeeded) {
  const log = byId("log"), form = byId("chat-form"), question = byId("question");
  const send = byId("send"), stop = byId("stop"), emptyNote = byId("log-empty");
  let messages = [];
  let running = null; // the AbortController of the answer that streams

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (text && running === null) answer(text);
  });
  question.addEventListener("keydown", (event) => {
    // While an input method composes, Enter accepts its suggestion.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  stop.addEventListener("click", () => running?.abort());
  byId("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("new-chat").addEventListener("click", () => {
    running?.abort();
    messages = [];
    log.replaceChildren(emptyNote);
    question.focus();
  });

  async function answer(text) {
    emptyNote.remove();
    const conversation = messages; // a new chat has another list
    const control = running = new AbortController();
    const asked = addMessage(log, "user", text);
    const shown = addMessage(log, "assistant", "");
    const meter = new Meter();
    const system = byId("system").value.trim();
    setBusy(true);
    shown.wait("Waiting for the first token.", WAIT_MS);
    question.value = "";
    try {
      const body = {
        messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation,
          { role: "user", content: text }],
        max_tokens: byId("max-tokens").valueAsNumber,
        temperature: byId("temperature").valueAsNumber,
      };
      const onQueue = ({ before, or_more: orMore }) => {
        shown.wait(`Waiting, ${before}${orMore ? " or more" : ""} before you.`);
      };
      for await (const chunk of streamChat(body, control.signal, onQueue)) {
        meter.note(chunk);
        const delta = chunk.choices[0]?.delta;
        if (delta?.reasoning_content) shown.think(delta.reasoning_content);
        if (delta?.content) shown.say(delta.content);
      }
      remember(conversation, text, shown.text);
      shown.end(meter.words());
    } catch (error) {
      if (control.signal.aborted) {
        remember(conversation, text, shown.text);
        shown.end(meter.words("stopped"));
      } else {
        failed(error, text, asked, shown);
      }
    } finally {
      if (running === control) {
        running = null;
        setBusy(false);
      }
    }
  }

  /** Show a failure. The question goes back into its field, so the user need not type it again. */
  function failed(error, text, asked, shown) {
    question.value ||= text;
    if (!shown.text) asked.element.remove();
    if (error instanceof ApiError && error.status === 401) {
      shown.element.remove();
      onKeyNeeded(error.message);
    } else {
      shown.fail(error instanceof ApiError ? error.message : "the server cannot be reached");
    }
  }

  function remember(conversation, text, said) {
    conversation.push({ role: "user", content: text }, { role: "assistant", content: said });
  }

  function setBusy(busy) {
    // A screen reader reads the complete answer, not each token.
    log.setAttribute("aria-busy", String(busy));
    stop.disabled = !busy;
    send.disabled = busy;
    if (!busy && [stop, document.body].includes(document.activeElement)) question.focus();
  }
}

/** Add a message to the log, and return an object to extend and end it. */
function addMessage(log, role, text) {
  const element = document.createElement("article");
  element.className = role;
  const who = document.createElement("h3");
  who.textContent = role === "user" ? "You" : "Model";
  const words = document.createElement("div");
  words.className = "words";
  // Show the user's text as it is, without code blocks.
  const renderer = role === "user" ? null : new Renderer(words);
  if (renderer === null) words.textContent = text;
  element.append(who, words);
  log.append(element);
  log.scrollTop = log.scrollHeight;
  let said = text, thoughts = null, waiting = null, timer = null;

  /** Make a change, and keep the end in sight unless the reader has scrolled up. */
  function scrolling(change) {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    change();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  function note(kind, line) {
    const paragraph = document.createElement("p");
    paragraph.className = kind;
    paragraph.textContent = line;
    if (kind === "error") paragraph.setAttribute("role", "alert");
    scrolling(() => element.append(paragraph));
    return paragraph;
  }

  function wait(line, after = 0) {
    clearTimeout(timer);
    timer = setTimeout(() => {
      waiting ??= note("waits quiet", "");
      waiting.textContent = line;
    }, after);
  }

  function begin() {
    clearTimeout(timer);
    waiting?.remove();
    waiting = null;
  }

  function end(kind, line) {
    begin();
    renderer.end();
    const last = note(kind, line);
    if (!said) return;
    const foot = document.createElement("div");
    foot.className = "foot";
    last.replaceWith(foot);
    foot.append(last, copyButton("Copy", () => said));
  }

  return {
    element,
    get text() { return said; },
    wait,
    say(more) {
      begin();
      said += more;
      scrolling(() => renderer.add(more));
    },
    think(more) {
      begin();
      if (thoughts === null) {
        const block = document.createElement("div");
        block.className = "thoughts";
        thoughts = block.appendChild(document.createTextNode(""));
        words.before(block);
      }
      scrolling(() => thoughts.appendData(more));
    },
    end: (line) => end("meter", line),
    fail: (line) => end("error", line),
  };
}

/** Meter of an answer: the time to the first token, then the rate of the others. */
class Meter {
  constructor() {
    this.sent = performance.now();
    this.first = this.last = null;
    this.events = 0;
    this.tokens = null;
    this.reason = null;
  }

  note(chunk) {
    const choice = chunk.choices[0];
    if (choice?.delta.content || choice?.delta.reasoning_content) {
      this.last = performance.now();
      this.first ??= this.last;
      this.events += 1;
    }
    this.reason = choice?.finish_reason ?? this.reason;
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens;
  }

  words(reason = this.reason) {
    if (this.first === null) return `no text (${reason})`;
    // An answer that was stopped has no usage. Its events are counted: each has one token or more.
    const tokens = this.tokens ?? this.events, about = this.tokens === null ? "at least " : "";
    const parts = [`TTFT ${(this.first - this.sent).toFixed(0)} ms`, `${about}${tokens} tokens`];
    if (tokens > 1 && this.last > this.first) {
      parts.push(`${about}${((tokens - 1) / (this.last - this.first) * 1000).toFixed(0)} tokens/s`);
    }
    return [...parts, reason].join(" · ");
  }
}
