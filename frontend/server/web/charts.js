// Small SVG charts. Their colours come from the style sheet, by class, so they follow the dark and
// the light scheme.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function text(x, y, words, attributes = {}) {
  return element("text", { x, y, ...attributes }, words);
}

/** Set a drawing's view box to its size in pixels, so that text and lines are not scaled.
 *
 *  Return its width. */
export function fit(svg, height) {
  const width = Math.max(200, Math.round(svg.parentElement.clientWidth));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  return width;
}

/** Return the least of 1, 2, 5, 10, 20 ... that is not below a value. */
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const candidates = [1, 2, 5, 10].map((digit) => digit * power);
  return candidates.find((candidate) => candidate >= value * 0.999999);
}

export function milliseconds(value) {
  if (value === null) return "–";
  if (value < 999.5) return `${value.toFixed(value < 0.995 ? 2 : value < 9.95 ? 1 : 0)} ms`;
  return `${(value / 1000).toFixed(value < 9950 ? 2 : 1)} s`;
}

/** Draw bars over time, and a line over them if there is one.
 *
 *  bars, line: one value for each interval of time; null for no value. */
export function drawBars(svg, bars, { line = null, top, label, kind }) {
  const height = 96, bottom = height - 16, head = 12, left = 34;
  const width = fit(svg, height), step = (width - left - 2) / bars.length;
  const y = (value) => bottom - (bottom - head) * Math.min(1, value / top);
  const drawn = [
    element("line", { class: "grid", x1: left, x2: width, y1: y(top), y2: y(top) }),
    element("line", { class: "grid", x1: left, x2: width, y1: bottom, y2: bottom }),
    text(left - 6, y(top) + 4, label(top), { "text-anchor": "end" }),
    text(left - 6, bottom + 4, label(0), { "text-anchor": "end" }),
    text(left, height - 3, "30 s ago"),
    text(width - 2, height - 3, "now", { "text-anchor": "end" }),
  ];
  bars.forEach((value, i) => {
    if (!value) return;
    drawn.push(element("rect", {
      class: kind, x: left + i * step, y: y(value), width: step + 0.3, height: bottom - y(value),
    }));
  });
  if (line?.some((value) => value)) {
    const points = line.map((value, i) => `${left + (i + 0.5) * step},${y(value ?? 0)}`);
    drawn.push(element("polyline", { class: "waiting", points: points.join(" ") }));
  }
  svg.replaceChildren(...drawn);
}
