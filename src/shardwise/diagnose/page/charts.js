/** Lines over the steps of a run: loss, throughput, MFU, times. */

import { secondsText } from "data";
import { color, onTheme, prepare, showTooltip, ticks } from "painter";

const HEIGHT = 190;
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 8, 10, 22];
const COLORS = ["accent", "exposed"];

const FORMATS = {
  s: secondsText,
  "%": (share) => `${(share * 100).toFixed(1)} %`,
  "tokens/s": (value) => (value >= 1e6 ? `${(value / 1e6).toPrecision(3)} M` : value >= 1e3 ? `${(value / 1e3).toPrecision(3)} k` : value.toPrecision(3)),
  "": (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(4)))),
};

/** Add a figure for a chart to `parent`, which draws itself again when its size changes. */
export function addChart(parent, chart) {
  const format = FORMATS[chart.unit];
  const figure = parent.appendChild(document.createElement("figure"));
  const caption = figure.appendChild(document.createElement("figcaption"));
  caption.appendChild(document.createElement("strong")).textContent = chart.title;
  const words = chart.lines.map((line) => `${line.label} ${format(line.y.at(-1))}`).join(", ");
  caption.appendChild(document.createElement("span")).textContent = `last: ${words}`;
  const canvas = figure.appendChild(document.createElement("canvas"));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${chart.title} over the steps of the run; last: ${words}`);
  const draw = () => paint(canvas, chart, format);
  new ResizeObserver(draw).observe(canvas);
  onTheme(draw);
  canvas.addEventListener("pointermove", (event) => hover(canvas, chart, format, event));
  canvas.addEventListener("pointerleave", () => showTooltip(""));
}

function axes(canvas, chart) {
  const xs = chart.lines.flatMap((line) => line.x);
  const ys = chart.lines.flatMap((line) => line.y);
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const from0 = chart.unit !== "";
  let [low, high] = [from0 ? 0 : Math.min(...ys), Math.max(...ys)];
  if (high <= low) high = low + (Math.abs(low) || 1);
  const margin = (high - low) * 0.06;
  low -= from0 ? 0 : margin;
  high += margin;
  const width = canvas.clientWidth - LEFT - RIGHT;
  return {
    first, last, low, high, width,
    x: (step) => LEFT + (width * (step - first)) / (last - first || 1),
    y: (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low)),
    step: (x) => first + ((x - LEFT) / width) * (last - first),
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
  for (const mark of ticks(axis.first, axis.last, axis.width / 80)) {
    if (!Number.isInteger(mark)) continue;
    const half = context.measureText(mark).width / 2;
    context.fillText(mark, Math.min(axis.x(mark), canvas.clientWidth - half), HEIGHT - 8);
  }
  context.textAlign = "left";
  chart.lines.forEach((line, number) => {
    context.strokeStyle = context.fillStyle = color(COLORS[number]);
    context.lineWidth = 1.5;
    context.beginPath();
    line.x.forEach((step, point) => context.lineTo(axis.x(step), axis.y(line.y[point])));
    context.stroke();
    if (line.x.length > 40) return;
    for (const point of line.x.keys()) {
      context.beginPath();
      context.arc(axis.x(line.x[point]), axis.y(line.y[point]), 2, 0, 7);
      context.fill();
    }
  });
}

function hover(canvas, chart, format, event) {
  const wanted = axes(canvas, chart).step(event.clientX - canvas.getBoundingClientRect().left);
  const rows = chart.lines.map((line) => {
    let nearest = 0;
    line.x.forEach((step, point) => {
      if (Math.abs(step - wanted) < Math.abs(line.x[nearest] - wanted)) nearest = point;
    });
    return `step ${line.x[nearest]}: ${line.label} ${format(line.y[nearest])}`;
  });
  showTooltip(rows.join("\n"), event);
}
