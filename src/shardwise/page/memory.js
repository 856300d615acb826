/** The memory of one rank over a step, by category, on the time axis of the timeline. */

import { bytesText, index, lowerBound, secondsText } from "data";
import { color, dashedLine, oncePerFrame, onTheme, prepare, showTooltip, ticks } from "painter";
import { GUTTER } from "view";

const HEIGHT = 220;
const [TOP, BOTTOM] = [20, 8];
const COLORS = {
  shards: "backward",
  optimizer: "forward",
  gradients: "reduce",
  gathered: "gather",
  activations: "activations",
  buffers: "other",
};

const canvas = document.getElementById("memory-canvas");

export class MemoryChart {
  constructor(view) {
    this.view = view;
    this.draw = oncePerFrame(() => this.paint());
    view.addEventListener("change", this.draw);
    onTheme(this.draw);
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => showTooltip(""));
    const legend = document.getElementById("memory-legend");
    for (const name of index.categories) {
      const item = legend.appendChild(document.createElement("li"));
      item.innerHTML = `<i style="--color: var(--${COLORS[name]})"></i>${name}`;
    }
  }

  /** Show the memory of one rank over a step, and mark its peak. */
  show(step, position) {
    this.step = step;
    this.memory = step.ranks[position].memory;
    this.peak = peakOf(this.memory);
    const label = document.getElementById("memory-peak");
    label.textContent = this.peak
      ? `peak ${bytesText(this.peak.bytes)} at ${this.unit(this.peak.sample)}`
      : "no samples were recorded";
    this.draw();
  }

  unit(sample) {
    return index.labels[this.memory.unit[sample]];
  }

  y(bytes) {
    return HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * bytes) / (this.peak.bytes * 1.05);
  }

  paint() {
    const context = prepare(canvas, canvas.clientWidth, HEIGHT);
    if (!this.peak) return;
    this.paintAxis(context);
    const corners = this.corners();
    const heights = corners.map(() => 0);
    index.categories.forEach((name, category) => {
      const below = [...heights];
      corners.forEach(({ sample }, at) => (heights[at] += this.memory.categories[category][sample]));
      context.fillStyle = color(COLORS[name]);
      this.fillBand(context, corners, below, heights);
    });
    this.paintPeak(context);
  }

  /** The visible samples, at most one per pixel: the one with the most bytes. */
  corners() {
    const { at } = this.memory;
    const first = Math.max(0, lowerBound(at, this.view.low) - 1);
    const found = [];
    for (let sample = first; sample < at.length && at[sample] <= this.view.high; sample += 1) {
      const x = Math.max(GUTTER, Math.floor(this.view.x(at[sample])));
      const last = found.at(-1);
      if (last && last.x === x) {
        if (totalOf(this.memory, sample) > totalOf(this.memory, last.sample)) last.sample = sample;
      } else {
        found.push({ x, sample });
      }
    }
    return found;
  }

  fillBand(context, corners, below, above) {
    const right = GUTTER + this.view.width;
    const end = (at) => corners[at + 1]?.x ?? right;
    context.beginPath();
    corners.forEach(({ x }, at) => {
      context.lineTo(x, this.y(above[at]));
      context.lineTo(end(at), this.y(above[at]));
    });
    for (let at = corners.length - 1; at >= 0; at -= 1) {
      context.lineTo(end(at), this.y(below[at]));
      context.lineTo(corners[at].x, this.y(below[at]));
    }
    context.fill();
  }

  paintAxis(context) {
    context.textAlign = "right";
    for (const mark of ticks(0, this.peak.bytes * 1.05, 4)) {
      context.fillStyle = color("line");
      context.fillRect(GUTTER, Math.round(this.y(mark)), this.view.width, 1);
      context.fillStyle = color("muted");
      context.fillText(mark ? bytesText(mark) : "0", GUTTER - 8, this.y(mark));
    }
    context.textAlign = "left";
  }

  paintPeak(context) {
    const x = this.view.x(this.memory.at[this.peak.sample]);
    if (x < GUTTER || x > GUTTER + this.view.width) return;
    const text = `peak ${bytesText(this.peak.bytes)}, ${this.unit(this.peak.sample)}`;
    const fits = x + context.measureText(text).width + 12 < GUTTER + this.view.width;
    dashedLine(context, x, TOP - 8, HEIGHT - BOTTOM);
    context.fillStyle = color("text");
    context.textAlign = fits ? "left" : "right";
    context.fillText(text, x + (fits ? 6 : -6), 9);
    context.textAlign = "left";
  }

  hover(event) {
    const tick = this.view.tick(event.clientX - canvas.getBoundingClientRect().left);
    const sample = this.peak ? lowerBound(this.memory.at, tick + 1) - 1 : -1;
    if (sample < 0 || tick < this.view.low) {
      showTooltip("");
      return;
    }
    const rows = index.categories.map((name, category) => `${name} ${bytesText(this.memory.categories[category][sample])}`);
    const when = secondsText(this.memory.at[sample] * this.step.tick);
    const head = `${bytesText(totalOf(this.memory, sample))} at ${when}, ${this.unit(sample)}`;
    showTooltip([head, ...rows.reverse()].join("\n"), event);
  }
}

function totalOf(memory, sample) {
  let total = 0;
  for (const values of memory.categories) total += values[sample];
  return total;
}

/** The sample with the most bytes, and its bytes; null without samples. */
export function peakOf(memory) {
  let peak = null;
  for (let sample = 0; sample < memory.at.length; sample += 1) {
    const bytes = totalOf(memory, sample);
    if (!peak || bytes > peak.bytes) peak = { sample, bytes };
  }
  return peak;
}
