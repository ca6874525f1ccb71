// Show a model's text as it streams. Text between code fences becomes a block of code with a copy
// button. The text is only put into text nodes, so no text of a model is ever parsed as HTML.

const OPENING = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$/;
const MAY_BE_FENCE = /^ {0,3}(`*|`{3,}[^`]*|~+|~{3,}.*)$/;

/** Append text to `root`, piece by piece. */
export class Renderer {
  #root;
  #line = ""; // the last line so far, which is hidden while it may be a fence
  #shown = 0; // characters of that line that are shown
  #fence = null; // the marks that the open block of code began with
  #target; // the text node that grows

  constructor(root) {
    this.#root = root;
    this.#target = root.appendChild(document.createTextNode(""));
  }

  add(text) {
    const lines = text.split("\n");
    this.#grow(lines[0]);
    for (const line of lines.slice(1)) {
      this.#endLine("\n");
      this.#grow(line);
    }
  }

  /** End the text. */
  end() {
    if (this.#line) this.#endLine("");
  }

  #grow(part) {
    this.#line += part;
    if (MAY_BE_FENCE.test(this.#line)) return;
    this.#target.appendData(this.#line.slice(this.#shown));
    this.#shown = this.#line.length;
  }

  #endLine(end) {
    const line = this.#line, opening = OPENING.exec(line);
    const isHidden = this.#shown === 0;
    if (isHidden && this.#fence === null && opening) {
      this.#open(opening[1], opening[2]);
    } else if (isHidden && this.#fence !== null && this.#closes(line)) {
      this.#fence = null;
      this.#target = this.#root.appendChild(document.createTextNode(""));
    } else {
      this.#target.appendData(line.slice(this.#shown) + end);
    }
    this.#line = "";
    this.#shown = 0;
  }

  #closes(line) {
    const marks = line.trim();
    return marks.length >= this.#fence.length && marks === this.#fence[0].repeat(marks.length);
  }

  #open(marks, language) {
    this.#fence = marks;
    const block = document.createElement("div"), head = document.createElement("div");
    const name = document.createElement("span"), area = document.createElement("pre");
    const code = area.appendChild(document.createElement("code"));
    block.className = "code";
    name.textContent = language || "code";
    head.append(name, copyButton("Copy code", () => code.textContent));
    area.tabIndex = 0; // so the keyboard can scroll it
    block.append(head, area);
    this.#root.append(block);
    this.#target = code.appendChild(document.createTextNode(""));
  }
}

/** Return a button that copies the result of `read`, and shows that it has. */
export function copyButton(label, read) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "plain copy";
  button.textContent = label;
  let timer = null;
  button.addEventListener("click", async () => {
    button.textContent = await copy(read()) ? "Copied" : "Not copied";
    clearTimeout(timer);
    timer = setTimeout(() => { button.textContent = label; }, 2000);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // A page that came over plain HTTP from another machine has no clipboard.
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const before = document.activeElement, field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}
