/** Charts of lines and points: values over a run or a number of devices, and configurations. */

import { bytesText, secondsText } from "data";
import { color, dashedLine, onTheme, prepare, showTooltip, ticks } from "painter";

const HEIGHT = 190;
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 8, 10, 22];
const COLORS = ["accent", "exposed", "gather", "reduce", "optimizer", "data", "other"];

const FORMATS = {
  s: secondsText,
  bytes: bytesText,
  "%": (share) => `${(share * 100).toFixed(1)} %`,
  "tokens/s": (value) => (value >= 1e6 ? `${(value / 1e6).toPrecision(3)} M` : value >= 1e3 ? `${(value / 1e3).toPrecision(3)} k` : value.toPrecision(3)),
  "": (value) => (Number.isInteger(value) ? String(value) : Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(4)))),
};

/** Add a figure for a chart to `parent`. It redraws itself when its size changes. */
export function addChart(parent, chart) {
  const format = FORMATS[chart.unit];
  const figure = parent.appendChild(document.createElement("figure"));
  const caption = figure.appendChild(document.createElement("figcaption"));
  caption.appendChild(document.createElement("strong")).textContent = chart.title;
  const text = chart.note || `last: ${chart.lines.map((line) => `${line.label} ${format(line.y.at(-1))}`).join(", ")}`;
  caption.appendChild(document.createElement("span")).textContent = text;
  const canvas = figure.appendChild(document.createElement("canvas"));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${chart.title} by ${chart.x_name}; ${text}`);
  if (chart.note) figure.appendChild(legendOf(chart));
  const draw = () => paint(canvas, chart, format);
  new ResizeObserver(draw).observe(canvas);
  onTheme(draw);
  canvas.addEventListener("pointermove", (event) => hover(canvas, chart, format, event));
  canvas.addEventListener("pointerleave", () => showTooltip(""));
}

function legendOf(chart) {
  const legend = document.createElement("ul");
  legend.className = "legend";
  chart.lines.forEach((line, number) => {
    const item = legend.appendChild(document.createElement("li"));
    item.appendChild(document.createElement("i")).style.setProperty("--color", `var(--${COLORS[number]})`);
    item.append(line.label);
  });
  return legend;
}

function axes(canvas, chart) {
  const scale = chart.log_x ? Math.log2 : (value) => value;
  const xs = chart.lines.flatMap((line) => line.x).concat(chart.limit ?? []).map(scale);
  const ys = chart.lines.flatMap((line) => line.y);
  const [first, last] = [chart.x_unit ? 0 : Math.min(...xs), Math.max(...xs)];
  const from0 = chart.unit !== "" && !chart.x_unit;
  let [low, high] = [from0 ? 0 : Math.min(...ys), Math.max(...ys)];
  if (high <= low) high = low + (Math.abs(low) || 1);
  const margin = (high - low) * 0.06;
  low -= from0 ? 0 : margin;
  high += margin;
  const width = canvas.clientWidth - LEFT - RIGHT;
  return {
    first, last, low, high, width,
    x: (value) => LEFT + (width * (scale(value) - first)) / (last - first || 1),
    y: (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low)),
  };
}

function paint(canvas, chart, format) {
  const context = prepare(canvas, canvas.clientWidth, HEIGHT);
  const axis = axes(canvas, chart);
  context.textAlign = "right";
  for (const mark of ticks(axis.low, axis.high, 4)) {
    context.fillStyle = color("line");
    context.fillRect(LEFT, Math.round(axis.y(mark)), axis.width, 1);
    context.fillStyle = color("muted");
    context.fillText(mark ? format(mark) : "0", LEFT - 6, axis.y(mark));
  }
  context.textAlign = "center";
  for (const mark of marks(axis, chart)) {
    const text = FORMATS[chart.x_unit](mark);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(axis.x(mark), canvas.clientWidth - half), HEIGHT - 8);
  }
  context.textAlign = "left";
  if (chart.limit) dashedLine(context, axis.x(chart.limit), TOP, HEIGHT - BOTTOM);
  chart.lines.forEach((line, number) => {
    context.strokeStyle = context.fillStyle = color(COLORS[number]);
    context.lineWidth = 1.5;
    context.beginPath();
    line.x.forEach((value, point) => context.lineTo(axis.x(value), axis.y(line.y[point])));
    if (line.joined) context.stroke();
    if (line.joined && line.x.length > 40) return;
    for (const point of line.x.keys()) {
      context.beginPath();
      context.arc(axis.x(line.x[point]), axis.y(line.y[point]), line.joined ? 2 : 3.5, 0, 7);
      context.fill();
    }
  });
}

function marks(axis, chart) {
  if (chart.log_x) return [...new Set(chart.lines.flatMap((line) => line.x))].filter((value, at, all) => axis.width / all.length > 44 || at % 2 === 0);
  const found = ticks(axis.first, axis.last, axis.width / 80);
  return chart.x_unit ? found : found.filter(Number.isInteger);
}

function hover(canvas, chart, format, event) {
  const { left, top } = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - left, event.clientY - top];
  const axis = axes(canvas, chart);
  const distance = (line, point) => Math.hypot(axis.x(line.x[point]) - x, line.joined ? 0 : axis.y(line.y[point]) - y);
  const nearest = chart.lines.map((line) => {
    let best = 0;
    for (const point of line.x.keys()) if (distance(line, point) < distance(line, best)) best = point;
    return { line, best, away: distance(line, best) };
  });
  const closest = nearest.reduce((one, other) => (other.away < one.away ? other : one));
  const rows = (closest.line.joined ? nearest : [closest]).map(({ line, best }) => {
    const where = line.names[best] ?? `${chart.x_name} ${FORMATS[chart.x_unit](line.x[best])}`;
    return `${where}: ${line.label} ${format(line.y[best])}`;
  });
  showTooltip(rows.join("\n"), event);
}
