// What the engine does, once a second, from the figures of the whole server.

import { grown, grownBy, parse, valueOf } from "./figures.js";
import { ask } from "./server.js";

const EVERY_MS = 1000;
const KEPT = 120;

const at = (id) => document.getElementById(id);
const rates = [];
let before = null;

function showRate(rate) {
  rates.push(rate);
  if (rates.length > KEPT) rates.shift();
  at("rate").textContent = rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
  const highest = Math.max(1, ...rates);
  const points = rates.map((each, index) => {
    const x = ((KEPT - rates.length + index) * 240) / (KEPT - 1);
    return `${x.toFixed(1)},${(47 - (44 * each) / highest).toFixed(1)}`;
  });
  at("curve-line").setAttribute("points", points.join(" "));
}

// Which CUDA graph the steps since the last look replayed, or why there was none.
export function graphOf(now, earlier) {
  const replays = grownBy(now, earlier, "graph_replays_total", "key");
  if (replays.length) return replays[0][0];
  if (grown(now, earlier, "num_steps_total") <= 0) return "idle";
  const reasons = grownBy(now, earlier, "graph_fallbacks_total", "reason");
  if (reasons.length) return `none: ${reasons[0][0]}`;
  return statusOf(now) === "off" ? "none: eager" : "compiled, no graph";
}

function statusOf(now) {
  return now.get("compile_cache_info")?.[0]?.labels.status ?? "off";
}

function showGraphs(replays) {
  at("graphs").hidden = replays.length < 2;
  const rows = replays.slice(0, 8).map(([key, count]) => {
    const row = document.createElement("tr");
    for (const text of [key, count]) row.insertCell().textContent = text;
    return row;
  });
  at("graphs").tBodies[0].replaceChildren(...rows);
}

function show(now, earlier, seconds) {
  showRate(Math.max(0, grown(now, earlier, "generation_tokens_total")) / seconds);
  at("running").textContent = valueOf(now, "num_requests_running");
  at("waiting").textContent = valueOf(now, "num_requests_waiting");
  const used = valueOf(now, "kv_cache_usage_perc");
  at("kv").value = used;
  at("kv-text").textContent = `${(100 * used).toFixed(1)} % of ${valueOf(now, "kv_cache_blocks").toLocaleString("en")} blocks`;
  const queries = valueOf(now, "prefix_cache_queries_total");
  const hits = valueOf(now, "prefix_cache_hits_total");
  at("prefix").textContent = queries ? `${((100 * hits) / queries).toFixed(1)} % of prompt tokens found` : "no prompts yet";
  at("graph").textContent = graphOf(now, earlier);
  showGraphs(grownBy(now, earlier, "graph_replays_total", "key"));
  const status = statusOf(now);
  const pieces = valueOf(now, "num_compiles_total");
  at("compiled").textContent = { off: "not compiled, or not cached", hit: "from the cache" }[status] ?? `${pieces} pieces compiled now`;
}

async function look() {
  const figures = parse(await (await ask("metrics")).text());
  const now = { figures, at: performance.now() };
  if (before) show(figures, before.figures, (now.at - before.at) / 1000);
  before = now;
}

// Goes on until the server refuses; `onRefused` gets to know why. A tab that nobody sees does not ask.
export async function watch(onRefused) {
  for (;;) {
    try {
      if (!document.hidden) await look();
      at("state").textContent = "live";
    } catch (error) {
      at("state").textContent = "not reached";
      before = null;
      if (error.status === 401) return onRefused(error);
    }
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}
