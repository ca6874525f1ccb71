// Start the parts of the page, and ask for the API key when the server wants one.

import { apiKey } from "/page/api.js";
import { startChat } from "/page/chat.js";
import { makeEngineView } from "/page/engine.js";

const byId = (id) => document.getElementById(id);
const form = byId("key-form"), field = byId("key"), note = byId("key-note");
const forget = byId("forget-key");

function askForKey(message) {
  note.textContent = apiKey.get() === null
    ? "This server wants an API key." : `The server refused the key: ${message}`;
  apiKey.forget();
  forget.hidden = true;
  form.hidden = false;
  field.focus();
}

const engine = makeEngineView(askForKey);
startChat(askForKey);

form.addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(field.value.trim());
  field.value = "";
  form.hidden = true;
  forget.hidden = false;
  byId("question").focus();
  engine.start();
});
forget.addEventListener("click", () => {
  apiKey.forget();
  forget.hidden = true;
  engine.start();
});
forget.hidden = apiKey.get() === null;
engine.start();
