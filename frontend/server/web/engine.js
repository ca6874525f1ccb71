// The live view: it polls the flight recorder and shows the new data. While the tab is hidden, it
// asks nothing.

import { ApiError, getFlight } from "/page/api.js";
import { drawBars, milliseconds, roundUp } from "/page/charts.js";
import { queueRows } from "/page/queue.js";
import { describe, drafts, drawTimeline, median, mostDrafts } from "/page/timeline.js";

const POLL_MS = 500, RETRY_MS = 2000, ANSWER_MS = 8000;
const MOST_STEPS = 2048, BINS = 120, BIN_US = 250_000, RATE_US = 5_000_000;
const TABLE_STEPS = 12, TILES = ["running", "waiting", "kv", "tokens", "busy", "step"];
const byId = (id) => document.getElementById(id);

/** Make the view. `onKeyNeeded(message)` is called when the server wants another API key.
 *
 *  Call `start()` once there is a key. */
export function makeEngineView(onKeyNeeded) {
  const live = byId("live");
  const steps = [];
  const bins = new Map(); // interval of time -> its largest batch, queue and share of the cache
  const choice = byId("replica");
  let replica = null, isChosen = false; // the shown replica, and whether the user has chosen it
  let next = null, timer = null, asking = null, newest = null;
  let seen = 0, isKnown = false; // time of the newest data, and whether no request has failed since

  function start() {
    stop();
    if (live.checked && !document.hidden) poll();
  }

  function stop() {
    clearTimeout(timer);
    asking?.abort();
    asking = null;
  }

  async function poll() {
    const mine = asking = new AbortController();
    let wait = POLL_MS;
    try {
      const signal = AbortSignal.any([mine.signal, AbortSignal.timeout(ANSWER_MS)]);
      const flight = await getFlight(next, replica, signal);
      if (asking !== mine) return;
      take(flight);
      draw();
      const bad = flight.replicas.filter(trouble).length;
      if (bad) setState("bad", `live, without ${bad} of ${flight.replicas.length} replicas`);
      else setState("ok", "live");
    } catch (error) {
      if (asking !== mine) return;
      if (error instanceof ApiError && error.status === 401) {
        setState("bad", "key needed");
        drawNothing("The server wants an API key.");
        return onKeyNeeded(error.message);
      }
      const problem = await explain(error, mine.signal);
      if (asking !== mine) return;
      setState("bad", problem);
      drawNothing(problem);
      wait = RETRY_MS;
    }
    timer = setTimeout(poll, wait);
  }

  /** Return why there is no data.
   *
   *  If the shown replica has died, show another one next, unless the user has chosen the dead
   *  one. */
  async function explain(error, signal) {
    const isAnswer = error instanceof ApiError;
    const overview = isAnswer ? await getFlight(null, null, signal).catch(() => null) : null;
    if (newest !== null) {
      newest.replicas = overview?.replicas ?? newest.replicas.map(
        ({ replica: number }) => ({ replica: number, dead: null, stalled: null, restarting: null }));
    }
    if (overview !== null && !isChosen && !signal.aborted) turnTo(overview.replica);
    if (isAnswer) return error.message;
    if (error.name === "TimeoutError") return "the server does not answer";
    return "the server cannot be reached";
  }

  function take(flight) {
    // A smaller number than before shows that the server was restarted and counts from 0.
    if (next !== null && flight.next < next) forget();
    next = flight.next;
    replica = flight.replica;
    newest = flight;
    seen = Date.now();
    isKnown = true;
    steps.push(...flight.steps);
    steps.splice(0, steps.length - MOST_STEPS);
    const share = (free) => 1 - free / flight.num_kv_blocks;
    for (const step of flight.steps) {
      note(step.end_us, step.num_rows, step.num_waiting, share(step.num_free_blocks));
    }
    note(flight.now_us, 0, flight.num_waiting, flight.kv_cache_usage);
    const oldest = Math.floor(flight.now_us / BIN_US) - BINS;
    for (const bin of bins.keys()) if (bin < oldest) bins.delete(bin);
  }

  function forget() {
    steps.length = 0;
    bins.clear();
  }

  function turnTo(number) {
    if (number !== replica) forget();
    replica = number;
    next = null;
  }

  function note(time, rows, waiting, used) {
    const bin = Math.floor(time / BIN_US), old = bins.get(bin) ?? { rows: 0, waiting: 0, used: 0 };
    bins.set(bin, {
      rows: Math.max(old.rows, rows),
      waiting: Math.max(old.waiting, waiting),
      used: Math.max(old.used, used),
    });
  }

  /** Replace unknown figures by dashes. The charts show the past, and stay. */
  function drawNothing(problem) {
    isKnown = false;
    const when = newest === null ? "" : ` The charts end ${new Date(seen).toLocaleTimeString()}.`;
    const sentence = problem[0].toUpperCase() + problem.slice(1).replace(/\.$/, "");
    byId("engine-note").textContent = `${sentence}.${when}`;
    byId("engine-note").hidden = false;
    for (const name of TILES) byId(`tile-${name}`).textContent = "–";
    fill(byId("queue"), []);
    byId("queue-note").textContent = "Not known now.";
    if (newest !== null) drawReplicas();
  }

  function draw() {
    if (newest === null || !isKnown) return;
    byId("engine-note").hidden = true;
    drawReplicas();
    drawTiles();
    drawTimeline(byId("timeline"), steps, Number(byId("zoom").value));
    for (const each of document.querySelectorAll(".of-drafts")) each.hidden = !mostDrafts(steps);
    byId("timeline-note").textContent = describe(steps);
    drawHistory();
    drawLatency("ttft", newest.ttft_s, "request");
    drawLatency("itl", newest.itl_s, "gap");
    drawRequests();
    fill(byId("steps"), steps.slice(-TABLE_STEPS).reverse().map(stepRow));
    byId("served").textContent = `${newest.model} on ${newest.device}`;
  }

  function drawReplicas() {
    byId("replica-choice").hidden = newest.replicas.length < 2;
    if (choice.length !== newest.replicas.length) {
      const options = newest.replicas.map((each) => new Option(each.replica, each.replica));
      choice.replaceChildren(...options);
    }
    newest.replicas.forEach((each, i) => {
      const state = each.dead ? " (dead)" : each.stalled ? " (stalled)"
        : each.restarting ? " (restarting)" : "";
      choice.options[i].text = `${each.replica}${state}`;
    });
    choice.value = replica;
    const bad = newest.replicas.filter(trouble);
    byId("replicas").hidden = newest.replicas.length < 2 || !bad.length;
    byId("replicas").replaceChildren(...bad.map((each) => {
      const item = document.createElement("li");
      item.textContent = `Replica ${each.replica}: ${trouble(each)}`;
      return item;
    }));
  }

  function drawTiles() {
    const since = newest.now_us - RATE_US, last = steps.filter((step) => step.end_us > since);
    // Steps may come too fast for an answer to hold them all. Then the rates are those of the steps
    // that it holds.
    const isFull = last.length && last[0] !== steps[0];
    const begin = isFull ? since : Math.max(since, steps[0]?.start_us ?? since);
    const seconds = (newest.now_us - begin) / 1e6;
    const given = (step) => step.num_sampled + step.num_accepted_tokens;
    const tokens = last.reduce((sum, step) => sum + given(step), 0);
    const busyUs = (step) => step.end_us - Math.max(begin, step.start_us);
    const busy = last.reduce((sum, step) => sum + busyUs(step), 0) / 1e6;
    byId("tile-running").textContent = newest.num_running;
    byId("tile-waiting").textContent = newest.num_waiting;
    byId("tile-kv").textContent = percent(newest.kv_cache_usage);
    byId("tile-tokens").textContent = (tokens / seconds || 0).toFixed(0);
    byId("tile-busy").textContent = percent(Math.min(1, busy / seconds || 0));
    const stepUs = median(steps.slice(-64).map((step) => step.end_us - step.start_us));
    byId("tile-step").textContent = steps.length ? milliseconds(stepUs / 1000) : "–";
  }

  function drawHistory() {
    const first = Math.floor(newest.now_us / BIN_US) - BINS + 1;
    const none = { rows: 0, waiting: 0, used: 0 };
    const values = Array.from({ length: BINS }, (_, i) => bins.get(first + i) ?? none);
    const rows = values.map((v) => v.rows), waiting = values.map((v) => v.waiting);
    const used = values.map((v) => v.used);
    const most = Math.max(1, ...rows, ...waiting), mostUsed = Math.max(...used);
    drawBars(byId("batch"), rows, {
      line: waiting, top: most <= 4 ? most : roundUp(most), label: String, kind: "decode" });
    const mostRows = Math.max(0, ...rows), mostWaiting = Math.max(0, ...waiting);
    byId("batch-note").textContent =
      `At most ${mostRows} in a step; at most ${mostWaiting} waiting (the line).`;
    const top = mostUsed > 0.5 ? 1 : roundUp(Math.max(0.01, mostUsed));
    drawBars(byId("kv"), used, { top, label: percent, kind: "prepare" });
    const blocks = `${newest.num_kv_blocks} blocks of ${newest.block_size} tokens`;
    byId("kv-note").textContent = `At most ${percent(mostUsed)} of ${blocks}.`;
  }

  function drawLatency(row, values, word) {
    const cells = byId(row).querySelectorAll("td");
    [values.p50, values.p90, values.p99].forEach((value, i) => {
      cells[i].textContent = value === null ? "–" : milliseconds(value * 1000);
    });
    cells[3].textContent = `${values.count} ${word}${values.count === 1 ? "" : "s"}`;
  }

  function drawRequests() {
    const { rows, more } = queueRows(newest);
    fill(byId("queue"), rows);
    const rest = more > 0 ? `And ${more} more.` : "";
    byId("queue-note").textContent = rows.length ? rest : "No requests.";
  }

  live.addEventListener("change", () => {
    if (!live.checked) setState("wait", "paused");
    start();
  });
  document.addEventListener("visibilitychange", start);
  choice.addEventListener("change", () => {
    isChosen = true;
    turnTo(Number(choice.value));
    start();
  });
  byId("zoom").addEventListener("change", draw);
  window.addEventListener("resize", draw);
  return { start };
}

/** Return why a replica is dead, stalled or being started again; null if it serves. */
function trouble(replica) {
  return replica.dead ?? replica.stalled ?? replica.restarting;
}

function setState(kind, words) {
  const state = byId("state");
  // A screen reader announces each change, so the text changes only with the state.
  if (state.textContent !== words) state.textContent = words;
  state.dataset.state = kind;
}

function percent(share) {
  if (share > 0 && share < 0.001) return "<0.1%";
  return `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;
}

function fill(table, rows) {
  table.tBodies[0].replaceChildren(...rows);
}

function makeRow(...cells) {
  const row = document.createElement("tr");
  cells.forEach((words, i) => {
    const cell = document.createElement(i === 0 ? "th" : "td");
    if (i === 0) cell.scope = "row";
    cell.textContent = words;
    row.append(cell);
  });
  return row;
}

function stepRow(step) {
  const length = (start, end) => milliseconds((end - start) / 1000), idle = step.idle_us;
  return makeRow(step.step, step.kind, step.num_rows, step.num_tokens,
    step.num_draft_tokens ? drafts(step) : "–",
    length(step.schedule_us, step.submit_us), length(step.received_us, step.launched_us),
    length(step.start_us, step.end_us),
    milliseconds((idle.result + idle.schedule + idle.prepare) / 1000));
}
