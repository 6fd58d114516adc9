// The explorer's page. The settings are the link's query; the server answers it with every number and every text,
// and this file only puts them in their places.

import { $, element, factTiles, table } from "./dom.js";
import { lineChart } from "./chart.js";
import { startTheme } from "./theme.js";

const WIDE = matchMedia("(min-width: 861px)");
const LAYERS = { L: "linear", F: "full attention", C: "short convolution", P: "attention and linear", "-": "network only" };

const memory = lineChart($("memory"), {
  label: "Memory of one request against its tokens; arrow keys move the point", height: 340, logX: 2, logY: 2,
  marks: (data) => data.crossover === null ? [] : [{ x: data.crossover, text: data.crossover_text }],
});
const intervals = lineChart($("intervals"), {
  label: "Checkpoint over KV against the interval; arrow keys move the point", height: 250, logX: 2, logY: 10,
  marks: (data) => [{ x: data.equal, text: data.equal_text }],
  levels: () => [{ y: 1, text: "as much as KV" }],
});

let settings = new URLSearchParams(location.search);
let asked = 0;
let shown = null;

async function ask() {
  const turn = ++asked;
  let reply, body;
  try {
    reply = await fetch(`api/explore?${settings}`);
    body = await reply.json();
  } catch {
    reply = null;
  }
  if (turn !== asked) return;
  $("error").hidden = Boolean(reply?.ok);
  if (!reply?.ok) {
    $("error").textContent = reply ? body.error : "The explorer's server does not answer. Is it still running?";
    return;
  }
  shown = body;
  show();
}

function change(name, value, own) {
  if (value === own) settings.delete(name);
  else settings.set(name, value);
  if (name === "model") for (const control of shown.dials) settings.delete(control);
  remember();
  ask();
}

function remember() {
  const query = settings.toString();
  history.replaceState(null, "", query ? `?${query}` : location.pathname);
}

function show() {
  document.title = `${shown.model.name} · Denim explorer`;
  showControls();
  $("weave").replaceChildren(...[...shown.model.layers].map((letter, i) =>
    element("i", { class: letter === "-" ? "none" : letter, title: `layer ${i}: ${LAYERS[letter]}` })));
  $("weave").setAttribute("aria-label", `layers: ${shown.model.layers}`);
  $("model").textContent = `${shown.model.name} · ${shown.model.text}`;
  $("headline").textContent = shown.headline;
  $("headline").classList.toggle("wrong", shown.misfit !== null);
  $("facts").replaceChildren(...factTiles(shown.facts));

  memory.show(shown.memory, shown.memory.x.indexOf(shown.memory.at));
  $("memory-numbers").replaceChildren(table(
    ["tokens", ...shown.memory.series.map((one) => one.label)],
    shown.memory.rows.map((i) => [shown.memory.x_texts[i], ...shown.memory.series.map((one) => one.texts[i])]),
    "Memory of one request"));

  $("filling-card").hidden = shown.filling === null;
  if (shown.filling) {
    $("fill").max = shown.filling.length - 1;
    $("fill").value = shown.step;
    showFilling();
  }
  $("intervals-card").hidden = shown.intervals === null;
  if (shown.intervals) {
    intervals.show(shown.intervals, shown.intervals.x.indexOf(shown.intervals.at));
    $("interval-numbers").replaceChildren(table(
      ["every", `checkpoints in ${shown.intervals.tokens_text}`, "their size", "÷ KV", "lost by a miss"],
      shown.intervals.rows.map((row) => [row.interval_text, row.checkpoints_text, row.bytes_text, row.times_text, row.lost_text]),
      "What checkpoints cost by their interval"));
  }
  showDevices();
}

// Controls stay in place while they mean the same, so that a slider can be dragged through many answers.
let built = "";
function showControls() {
  const shape = JSON.stringify(shown.controls.map((group) =>
    [group.title, group.controls.map(({ name, label, own, options }) => [name, label, own, options])]));
  if (shape !== built) {
    const focused = document.activeElement?.name;
    built = shape;
    $("controls").replaceChildren(...shown.controls.map((group) =>
      element("fieldset", {}, element("legend", {}, group.title), ...group.controls.map(control))));
    if (focused) document.getElementsByName(focused)[0]?.focus({ preventScroll: true });
  }
  for (const group of shown.controls) for (const given of group.controls) place(given);
}

function place({ name, kind, value, own, options }) {
  const input = $(`set-${name}`);
  if (kind === "select") {
    input.value = value;
    return;
  }
  input.value = options.findIndex((option) => option.value === value);
  say(input, options[input.value].text);
  input.closest(".control").classList.toggle("turned", value !== own);
  input.closest(".control").querySelector(".own").hidden = value === own;
}

function say(input, text) {
  input.setAttribute("aria-valuetext", text);
  input.closest(".control").querySelector("output").textContent = text;
}

function control({ name, label, kind, own, options }) {
  const id = `set-${name}`;
  const line = element("div", { class: "line" }, element("label", { for: id }, label));
  if (kind === "select") return element("div", { class: "control" }, line, select(id, name, options, own));
  line.append(element("output", { for: id }),
    element("button", { type: "button", class: "own", title: "as it was", "aria-label": `${label}: as it was`,
      onclick: () => change(name, own, own) }, "↺"));
  const input = element("input", { id, name, type: "range", min: 0, max: options.length - 1,
    oninput: (event) => {
      const option = options[event.target.value];
      say(event.target, option.text);
      change(name, option.value, own);
    } });
  return element("div", { class: "control" }, line, input);
}

function select(id, name, options, own) {
  const made = element("select", { id, name, onchange: (event) => change(name, event.target.value, own) });
  const groups = new Map();
  for (const { value: each, text, group } of options) {
    const option = element("option", { value: each }, text);
    if (!group) made.append(option);
    else {
      if (!groups.has(group)) groups.set(group, made.appendChild(element("optgroup", { label: group })));
      groups.get(group).append(option);
    }
  }
  return made;
}

function showFilling() {
  const step = shown.filling[$("fill").value];
  $("fill-lengths").textContent = shown.lengths;
  $("fill-text").textContent = step.text;
  $("fill").setAttribute("aria-valuetext", step.text);
  $("tanks").replaceChildren(...step.engines.map((engine) =>
    element("div", { class: "tank", "data-engine": engine.key, "data-running": engine.running },
      element("div", { class: "line" }, element("b", {}, engine.name),
        element("span", {}, engine.text, element("span", { class: "waits" }, engine.waits))),
      element("div", { class: "pools" }, ...engine.pools.map((pool) => vessel(pool, engine.pools.length === 1))))));
}

// In a pool of both, states grow from the left and KV from the right.
function vessel(pool, both) {
  const part = (kind, side) => element("i", { class: `${kind} moves`, style: { [side[0]]: side[1], width: pool[kind] } });
  return element("div", { class: "pool", style: { width: pool.width } },
    element("div", { class: "vessel", "data-pool": pool.name, "data-used": pool.used, role: "img", "aria-label": pool.text },
      part("states", ["left", "0"]), part("idle", ["left", pool.states]), part("kv", [both ? "right" : "left", "0"])),
    element("small", { title: pool.text }, pool.text));
}

function showDevices() {
  const { starred, device_note: note, engines } = shown;
  $("starred").hidden = !starred;
  $("device-note").textContent = note;
  const keys = element("ul", { class: "legend" }, ...Object.entries(engines).map(([key, name]) =>
    element("li", {}, element("i", { class: `key ${key}` }), name)));
  $("devices").replaceChildren(keys, element("div", {}, ...shown.devices.map((row) =>
    element("div", { class: row.chosen ? "device chosen" : "device", "data-device": row.device },
      element("div", { class: "who" }, element("b", {}, row.device), element("small", {}, row.memory)),
      row.why ? element("p", { class: "why" }, row.why) : element("div", {}, ...row.bars.map((bar) =>
        element("div", { class: "strip", title: bar.name, "data-engine": bar.key, "data-requests": bar.requests },
          element("div", {}, element("i", { class: `${bar.key} moves`, style: { width: bar.width } })),
          element("span", {}, bar.text))))))));
}

$("controls").addEventListener("submit", (event) => event.preventDefault());
$("fill").addEventListener("input", (event) => {
  settings.set("step", event.target.value);
  if (event.target.value === event.target.max) settings.delete("step");
  remember();
  showFilling();
});
$("reset").addEventListener("click", () => { settings = new URLSearchParams(); remember(); ask(); });
$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(location.href);
    $("copy").textContent = "Copied";
  } catch {
    $("copy").textContent = "Copy it from the address bar";
  }
  setTimeout(() => { $("copy").textContent = "Copy link"; }, 1600);
});
addEventListener("popstate", () => { settings = new URLSearchParams(location.search); ask(); });
const fit = () => { $("panel").open = WIDE.matches; };
WIDE.addEventListener("change", fit);
fit();
startTheme($("theme"), () => { memory.redraw(); intervals.redraw(); });
ask();
