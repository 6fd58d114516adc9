// Line charts over uPlot: a legend in HTML that reads out the point under the cursor, arrow keys, both themes.
//
// Draws what it is given; the values, their texts and the ticks come with the data.

import { colour } from "./theme.js";
import { element } from "./dom.js";

const LINES = {
  hybrid: { colour: "indigo", width: 2.6, dash: [] },
  full: { colour: "copper", width: 2, dash: [] },
  vllm: { colour: "teal", width: 1.8, dash: [7, 4] },
  sglang: { colour: "plum", width: 1.8, dash: [2, 3] },
  checkpoint: { colour: "indigo", width: 2.6, dash: [] },
  first: { colour: "indigo", width: 2.2, dash: [] },
  second: { colour: "copper", width: 2, dash: [] },
};
const NARROW = 520;

// `options`: {label, height, logX, logY, marks(data) -> [{x, text}], levels(data) -> [{y, text}], at: index}.
// A chart is {show(data), redraw()}; data: {x, x_texts, x_ticks, y_ticks, series: [{key, label, y, texts}]}.
export function lineChart(place, options) {
  const legend = element("ul", { class: "legend" });
  const box = element("div", { class: "chart", tabindex: "0", role: "group", "aria-label": options.label });
  const spoken = element("p", { class: "quiet", "aria-live": "polite" });
  place.replaceChildren(legend, box, spoken);
  let plot = null, data = null, index = 0, drawnWidth = 0;

  function read(at) {
    index = at;
    const point = legend.querySelector(".at");
    if (point) point.textContent = data.x_texts[at];
    for (const one of data.series) {
      const value = legend.querySelector(`[data-key="${one.key}"] b`);
      if (value) value.textContent = one.texts[at];
    }
  }

  function draw() {
    if (!data) return;
    drawnWidth = place.clientWidth;
    const rest = index;
    if (plot) plot.destroy();
    plot = new uPlot(settings(), [data.x, ...data.series.map((one) => one.y)], box);
    read(Math.min(rest, data.x.length - 1));
  }

  function settings() {
    const ink = colour("ink-2"), grid = colour("grid"), narrow = drawnWidth < NARROW;
    const axis = (ticks, size, thin) => ({
      stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { show: false }, size, gap: 6,
      font: "12px system-ui, sans-serif",
      splits: () => ticks.map(([at]) => at),
      values: () => ticks.map(([, text], i) => (thin && i % 2 ? "" : text)),
      filter: (_, splits) => splits,
    });
    const ends = (ticks, values) => {
      const all = values.filter((value) => value !== null && (value > 0 || !options.logY));
      const at = ticks.map(([tick]) => tick);
      return [Math.min(...at, ...all), Math.max(...at, ...all)];
    };
    const yValues = data.series.flatMap((one) => one.y);
    return {
      width: drawnWidth, height: narrow ? Math.min(options.height, 260) : options.height,
      padding: [14, 14, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
      scales: {
        x: { time: false, distr: options.logX ? 3 : 1, log: options.logX || 10, range: () => ends(data.x_ticks, data.x) },
        y: { distr: options.logY ? 3 : 1, log: options.logY || 10, range: () => ends(data.y_ticks, yValues) },
      },
      axes: [axis(data.x_ticks, 34, narrow && data.x_ticks.length > 6), axis(data.y_ticks, 66, false)],
      series: [{}, ...data.series.map((one) => ({
        stroke: colour(LINES[one.key].colour), width: LINES[one.key].width, dash: LINES[one.key].dash,
        points: { show: false }, pxAlign: 0,
      }))],
      hooks: {
        setCursor: [(drawn) => { if (drawn.cursor.idx !== null && drawn.cursor.idx !== undefined) read(drawn.cursor.idx); }],
        draw: [mark],
      },
    };
  }

  function mark(drawn) {
    const pen = drawn.ctx, { left, top, width, height } = drawn.bbox, unit = devicePixelRatio;
    pen.save();
    pen.strokeStyle = pen.fillStyle = colour("ink");
    pen.lineWidth = unit;
    pen.font = `600 ${12 * unit}px system-ui, sans-serif`;
    pen.setLineDash([3 * unit, 4 * unit]);
    const line = (x0, y0, x1, y1) => { pen.beginPath(); pen.moveTo(x0, y0); pen.lineTo(x1, y1); pen.stroke(); };
    for (const { x, text } of options.marks ? options.marks(data) : []) {
      const at = drawn.valToPos(x, "x", true);
      if (at < left || at > left + width) continue;
      line(at, top, at, top + height);
      const right = at > left + width * 0.7;
      pen.textAlign = right ? "right" : "left";
      pen.fillText(text, at + (right ? -6 : 6) * unit, top + 13 * unit);
    }
    for (const { y, text } of options.levels ? options.levels(data) : []) {
      const at = drawn.valToPos(y, "y", true);
      if (at < top || at > top + height) continue;
      line(left, at, left + width, at);
      pen.textAlign = "left";
      pen.fillText(text, left + 6 * unit, at + 15 * unit);
    }
    pen.restore();
  }

  function swatch(key) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const style = LINES[key];
    for (const [name, value] of Object.entries({
      x1: 0, x2: 22, y1: 4, y2: 4, "stroke-width": style.width, "stroke-dasharray": style.dash.join(" "),
    })) line.setAttribute(name, value);
    line.style.setProperty("stroke", `var(--${style.colour})`);
    svg.setAttribute("aria-hidden", "true");
    svg.append(line);
    return svg;
  }

  box.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageDown: -8, PageUp: 8, Home: -Infinity, End: Infinity };
    if (!plot || !(event.key in steps)) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(data.x.length - 1, index + steps[event.key]));
    plot.setCursor({ left: plot.valToPos(data.x[next], "x"), top: 0 });
    read(next);
    spoken.textContent = [data.x_texts[next], ...data.series.map((one) => `${one.label} ${one.texts[next]}`)].join(", ");
  });
  new ResizeObserver(() => { if (Math.abs(place.clientWidth - drawnWidth) > 1) draw(); }).observe(place);

  return {
    show(shown, at) {
      data = shown;
      if (at !== undefined && at >= 0) index = at;
      index = Math.min(index, data.x.length - 1);
      legend.replaceChildren(
        element("li", { class: "at" }, ""),
        ...data.series.map((one) => element("li", { "data-key": one.key }, swatch(one.key), one.label, element("b", {}, ""))),
      );
      draw();
    },
    redraw: draw,
  };
}
