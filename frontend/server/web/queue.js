// The table of requests: a row for each running request, and a row for all requests that wait for
// the same reason.

import { milliseconds } from "/page/charts.js";

const MOST_RUNNING = 8;
const REASONS = {
  turn: "its turn: others are before it",
  max_num_seqs: "a seat: as many run as may (max_num_seqs)",
  max_num_batched_tokens: "the next step: this one is full (max_num_batched_tokens)",
  kv_cache: "KV blocks: the cache has too few free",
  output: "its last token, on its way back",
  grammar: "its grammar, which is being compiled",
};

/** Return the table's rows for the requests of a flight answer.
 *
 *  more: the number of requests that are in no row. */
export function queueRows(flight) {
  const running = flight.requests.filter((r) => r.status === "running").slice(0, MOST_RUNNING);
  const waiting = flight.requests.filter((r) => r.status !== "running");
  const rows = [...groups(waiting).map((group) => groupRow(group, flight.now_us)),
    ...running.map((request) => groupRow([request], flight.now_us))];
  return { rows, more: flight.num_waiting + flight.num_running - waiting.length - running.length };
}

/** Group requests by state and reason to wait, in the order of the first request of each group. */
function groups(waiting) {
  const found = new Map();
  for (const request of waiting) {
    const key = `${request.status} ${request.waiting_for}`;
    if (found.has(key)) found.get(key).push(request);
    else found.set(key, [request]);
  }
  return [...found.values()];
}

function groupRow(group, now) {
  const [first] = group, reason = first.waiting_for;
  const row = document.createElement("tr");
  row.className = first.status;
  if (reason !== null) row.dataset.waitingFor = reason;
  const name = shorten(first.request_id) || "another user's";
  row.append(
    cell("th", group.length === 1 ? name : `${group.length} requests`),
    cell("td", reason === null ? first.status : `${first.status} for ${REASONS[reason] ?? reason}`),
    cell("td", total(group, "num_prompt_tokens")), cell("td", total(group, "num_output_tokens")),
    cell("td", milliseconds((now - Math.min(...group.map((r) => r.arrival_us))) / 1000)));
  row.cells[0].scope = "row";
  if (group.length === 1) row.cells[0].title = first.request_id ?? "";
  return row;
}

function cell(kind, words) {
  const made = document.createElement(kind);
  made.textContent = words;
  return made;
}

function total(group, name) {
  return group.reduce((sum, request) => sum + request[name], 0);
}

/** Shorten a request's name, which is mostly random.
 *
 *  The kind, the beginning of the random part and the number of the choice stay. */
function shorten(name) {
  if (!name) return "another's"; // the server names only the requests of the key that asks
  return name.replace(/^([a-z]+-)?([0-9a-f]{8})[0-9a-f]{24}(-\d+)?$/, "$1$2$3").slice(0, 40);
}
