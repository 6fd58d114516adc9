// The dashboard's page. The server sends all that is shown, with its texts, once a second; this file puts it in
// its places.

import { $, element, factTiles } from "./dom.js";
import { lineChart } from "./chart.js";
import { startTheme } from "./theme.js";
import { events, useKey } from "./events.js";
import { startChat } from "./chat.js";

const AGAIN = 2000; // milliseconds before the stream is asked for again

const throughput = lineChart($("throughput"), { label: "Tokens per second over the last two minutes", height: 190 });

async function follow() {
  for (;;) {
    try {
      for await (const shown of events("api/live")) show(shown);
      pulse("lost", "the server stops");
    } catch (error) {
      $("key-form").hidden = error.status !== 401;
      pulse("lost", error.status ? error.message : "no connection");
      if (error.status === 401) return;
    }
    await new Promise((resolve) => { setTimeout(resolve, AGAIN); });
  }
}

function pulse(state, text) {
  $("pulse").className = `pulse ${state}`;
  $("pulse").textContent = text;
}

function show(shown) {
  $("unavailable").hidden = !shown.unavailable;
  if (shown.unavailable) {
    $("unavailable").textContent = shown.unavailable;
    pulse("lost", "no engine");
    return;
  }
  pulse("live", "live");
  const model = shown.facts.find((fact) => fact.key === "model").text;
  $("served").textContent = model;
  document.title = `${model} · Denim`;
  $("facts").replaceChildren(...factTiles(shown.facts));
  showArena(shown.arena);
  throughput.show(shown.throughput, shown.throughput.x.length - 1);
  showRequests(shown.requests);
  showBars($("first-token"), shown.first_token);
  showBars($("inter-token"), shown.inter_token);
  showTree(shown.tree);
  $("lost").replaceChildren(...shown.lost.map((one) =>
    element("div", { class: `reason ${one.key}`, "data-reason": one.key, "data-tokens": one.tokens },
      element("span", {}, one.label), element("div", {}, element("i", { class: "moves", style: { width: one.width } })), element("b", {}, one.text))));
}

function showArena({ cells, each, kinds }) {
  const place = $("arena");
  while (place.childElementCount > cells.length) place.lastElementChild.remove();
  while (place.childElementCount < cells.length) place.append(element("i"));
  cells.forEach(([side, level], i) => { place.children[i].className = side === "empty" ? "" : `${side} l${level}`; });
  place.setAttribute("aria-label", kinds.map((kind) => kind.text).join("; "));
  $("arena-each").textContent = each;
  $("arena-kinds").replaceChildren(...kinds.map((kind) =>
    element("li", { "data-kind": kind.key, "data-slabs": kind.slabs }, element("i", { class: `key ${kind.key}` }), kind.text)));
}

function showRequests({ rows, more, total }) {
  $("requests").dataset.total = total;
  if (!rows.length) {
    $("requests").replaceChildren(element("p", { class: "nothing" }, "None. The chat below makes one."));
    return;
  }
  const headings = ["request", "", "prompt", "cached", "generated", "first", "age"];
  $("requests").replaceChildren(element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...headings.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...rows.map((row) => element("tr", { "data-status": row.status },
      element("td", {}, row.id),
      element("td", { class: "strip-cell" }, row.status === "running" ? strip(row.bars) : row.status),
      ...[row.prompt, row.cached, row.generated, row.first, row.age].map((text) => element("td", {}, text))))))),
    element("p", { class: "note" }, more));
}

function strip(bars) {
  return element("div", { class: "strip" }, ...bars.map(([kind, width]) => element("i", { class: kind, style: { width } })));
}

function showBars(place, { count, bars, percentiles }) {
  place.dataset.count = count;
  if (!bars.length) {
    place.replaceChildren(element("p", { class: "nothing" }, "Nothing yet."));
    return;
  }
  place.replaceChildren(
    element("div", { class: "bars", role: "img", "aria-label": bars.map((bar) => `up to ${bar.label}: ${bar.count}`).join(", ") },
      ...bars.map((bar) => element("i", { style: { height: bar.height }, title: `up to ${bar.label}: ${bar.count}` }))),
    element("div", { class: bars.length > 7 ? "labels many" : "labels", "aria-hidden": "true" }, ...bars.map((bar) => element("span", {}, bar.label))),
    element("p", { class: "percentiles" }, ...percentiles.map((one) => element("span", {}, `${one.share} `, element("b", {}, one.text))), element("span", {}, `of ${count}`)));
}

function showTree(tree) {
  $("tree-text").textContent = tree ? tree.text : "This engine was started without a prefix cache.";
  if (!tree) return;
  $("tree").replaceChildren(
    ...tree.rows.map((row) => element("div", { class: "line" }, row[0].rise
        ? element("i", { class: "rise", style: { left: row[0].left, height: row[0].rise } }) : null, ...row.map((node) =>
      element("div", { class: node.running ? "node running" : "node", style: { left: node.left, width: node.width }, title: node.text,
          "data-checkpoint": String(node.checkpoint), "data-hits": node.hits },
        node.checkpoint ? element("i", { class: node.hits ? "knot hit" : "knot" }) : null)))),
    element("div", { class: "axis", "aria-hidden": "true" }, ...tree.ticks.map((tick) => element("span", { style: { left: tick.left } }, tick.text))),
    element("p", { class: "note" }, tree.left_out));
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  $("key-form").hidden = true;
  follow();
});
startTheme($("theme"), () => throughput.redraw());
startChat();
follow();
