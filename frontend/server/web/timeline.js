// The last steps on three lanes: the work of the core, the worker and the device over time. Steps
// with drafts have a fourth lane, with a bar of the drafts that were accepted and rejected.

import { element, fit, milliseconds, roundUp, text } from "/page/charts.js";

const LEFT = 58, TOP = 6, LANE = 30, GAP = 10, BOTTOM = 20;
const LANES = ["core", "worker", "device", "drafts"];
const laneTop = (lane) => TOP + LANES.indexOf(lane) * (LANE + GAP);

/** Draw the end of `steps` at a scale that shows about `count` of them. */
export function drawTimeline(svg, steps, count) {
  const most = mostDrafts(steps); // the height of a bar of drafts
  const shown = most ? LANES : LANES.slice(0, 3);
  const bottom = laneTop(shown.at(-1)) + LANE;
  const width = fit(svg, bottom + GAP + BOTTOM);
  if (!steps.length) return svg.replaceChildren(...lanes(width, shown));
  const end = steps.at(-1).told_us;
  const span = roundUp(count * median(steps.slice(-64).map((s) => s.end_us - s.start_us)) || 1);
  const begin = end - span;
  const x = (time) => LEFT + (time - begin) / span * (width - LEFT - 4);
  const drawn = [...lanes(width, shown), ...axis(width, span, x, begin, bottom)];
  for (const step of steps) {
    if (step.told_us < begin) continue;
    drawn.push(...marks(step, x));
    if (step.num_draft_tokens) drawn.push(...draftBars(step, x, most));
  }
  svg.replaceChildren(...drawn);
}

/** Describe the newest step in words, and whether it was ready when the device needed it. */
export function describe(steps) {
  if (!steps.length) return "No step yet.";
  const step = steps.at(-1), before = steps.at(-2);
  const size = [count(step.num_rows, "request"), count(step.num_tokens, "token"),
    ...(step.num_draft_tokens ? [drafts(step)] : [])].join(", ");
  const what = `Step ${step.step} (${step.kind}, ${size})`;
  const ran = `ran ${milliseconds((step.end_us - step.start_us) / 1000)} on the device`;
  if (before?.step !== step.step - 1) return `${what} ${ran}.`;
  if (step.idle_us.no_work) return `${what} ${ran}, after a pause without work.`;
  const lead = before.end_us - step.launched_us;
  if (lead >= 0) {
    const early = milliseconds(lead / 1000);
    return `${what} ${ran}; it was packed and queued ${early} before step ${before.step} ended.`;
  }
  const waited = milliseconds((step.start_us - before.end_us) / 1000);
  return `${what} ${ran}; the device had waited ${waited} for it.`;
}

export function median(values) {
  return values.length ? values.toSorted((a, b) => a - b)[values.length >> 1] : 0;
}

/** Return the largest number of drafts of a step; 0 if no step had any. */
export function mostDrafts(steps) {
  return steps.reduce((most, step) => Math.max(most, step.num_draft_tokens), 0);
}

/** Describe the drafts of a step in words. */
export function drafts(step) {
  return `${step.num_accepted_tokens} of ${count(step.num_draft_tokens, "draft")} accepted`;
}

function count(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

function lanes(width, shown) {
  const size = { width: width - LEFT - 4, height: LANE };
  return shown.flatMap((lane) => [
    element("rect", { class: "lane", x: LEFT, y: laneTop(lane), ...size }),
    text(LEFT - 8, laneTop(lane) + LANE / 2 + 4, lane, { "text-anchor": "end" })]);
}

function axis(width, span, x, begin, bottom) {
  const parts = width < 480 ? 2 : 5; // on a narrow screen five labels would overlap
  const tick = span / parts, drawn = [];
  for (let i = 0; i <= parts; i += 1) {
    const at = x(begin + i * tick), label = i ? milliseconds(i * tick / 1000) : "0";
    drawn.push(element("line", { class: "grid", x1: at, x2: at, y1: TOP, y2: bottom + 4 }),
      text(at, bottom + 16, label, { "text-anchor": i === parts ? "end" : "middle" }));
  }
  return drawn;
}

function marks(step, x) {
  const drawn = [
    bar("core", "schedule", step.schedule_us, step.submit_us, step, x, 0, 0.6),
    // The core schedules the next step after it has taken a step's tokens and before it tells them,
    // so this bar lies below that of `schedule`.
    bar("core", "take", step.taken_us, step.told_us, step, x, 0.64, 0.36),
    bar("worker", "prepare", step.received_us, step.launched_us, step, x, 0, 1),
    bar("device", step.kind, step.start_us, step.end_us, step, x, 0, 1)];
  const from = x(step.launched_us), to = x(step.start_us);
  if (from >= LEFT && to > from) {
    drawn.push(element("line", {
      class: "queued", x1: from, x2: to, y1: laneTop("worker") + LANE, y2: laneTop("device") }));
  }
  const room = x(step.end_us) - Math.max(LEFT, x(step.start_us));
  if (room > 7 * String(step.step).length + 6) {
    drawn.push(text(x(step.end_us) - room / 2, laneTop("device") + LANE / 2 + 4, String(step.step),
      { class: "on-bar", "text-anchor": "middle" }));
  }
  return drawn;
}

/** Return a bar for a step's drafts: the accepted ones below, the rejected ones above. */
function draftBars(step, x, most) {
  const from = Math.max(LEFT, x(step.start_us)), width = x(step.end_us) - from - 0.5;
  if (width <= 0) return [];
  const floor = laneTop("drafts") + LANE, unit = LANE / most;
  const part = (kind, number, above) => element("rect", {
    class: kind, "data-step": step.step, "data-drafts": number, x: from, width: Math.max(1, width),
    y: floor - (above + number) * unit, height: number * unit,
  }, element("title", {}, `step ${step.step}: ${drafts(step)}`));
  const rejected = step.num_draft_tokens - step.num_accepted_tokens;
  return [part("accepted", step.num_accepted_tokens, 0),
    part("rejected", rejected, step.num_accepted_tokens)];
}

function bar(lane, kind, start, end, step, x, offset, share) {
  const from = Math.max(LEFT, x(start));
  const words = `step ${step.step}: ${kind}, ${milliseconds((end - start) / 1000)}`;
  return element("rect", {
    class: kind, "data-step": step.step, x: from, y: laneTop(lane) + offset * LANE,
    width: Math.max(x(end) < LEFT ? 0 : 1, x(end) - from - 0.5), height: share * LANE, rx: 2,
  }, element("title", {}, words));
}
