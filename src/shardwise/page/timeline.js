/** The timeline of a step: every rank's compute, gathers and reductions, on one canvas. */

import { bytesText, index, secondsText } from "data";
import { color, oncePerFrame, onTheme, prepare, showTooltip, ticks } from "painter";
import { KIND, drawTrack, findBar, linksOf } from "tracks";
import { GUTTER } from "view";

const RULER = 24;
const WORDS = {
  FORWARD: "forward",
  BACKWARD: "backward",
  WAIT_GATHER: "exposed wait for the gather",
  WAIT_REDUCE: "exposed wait for the reduction",
  STEP: "optimizer, in backward",
  GATHER: "gather",
  REDUCE: "reduce",
};
const CSS = { WAIT_GATHER: "exposed", WAIT_REDUCE: "exposed", STEP: "optimizer" };
const kindNames = Object.keys(KIND);

export class Timeline {
  constructor(view) {
    this.view = view;
    this.scroller = document.getElementById("scroller");
    this.canvas = document.getElementById("timeline-canvas");
    this.spacer = document.getElementById("spacer");
    this.selectedText = document.getElementById("selected");
    this.step = null;
    this.ranks = []; // positions in the step's ranks
    this.unit = null; // the highlighted unit
    this.hovered = null; // {row, track, bar}
    this.selected = null;
    this.draw = oncePerFrame(() => this.paint());
    this.readColors();
    onTheme(() => {
      this.readColors();
      this.draw();
    });
    view.addEventListener("change", () => {
      this.showRange();
      this.draw();
    });
    this.scroller.addEventListener("scroll", this.draw);
    new ResizeObserver(() => this.arrange()).observe(this.scroller);
    this.listen();
  }

  readColors() {
    const paints = kindNames.map((name) => color(CSS[name] ?? name.toLowerCase()));
    const dimmed = paints.map((paint) => `${paint}40`);
    const only = (list, name) => list.map((paint, kind) => (kind === KIND[name] ? paint : null));
    this.colors = [paints, dimmed];
    this.exposed = [null, "WAIT_GATHER", "WAIT_REDUCE"].map(
      (name) => name && [only(paints, name), only(dimmed, name)],
    );
  }

  setStep(step) {
    this.step = step;
    this.clear();
  }

  setRanks(ranks) {
    this.ranks = ranks;
    this.clear();
    this.arrange();
  }

  setUnit(unit) {
    this.unit = unit;
    this.draw();
  }

  clear() {
    this.hovered = this.selected = null;
    this.selectedText.textContent = "";
    this.draw();
  }

  /** Set the heights of the rows, which depend on their number, and the size of the canvas. */
  arrange() {
    const count = this.ranks.length;
    const [compute, other, gap] = count <= 8 ? [20, 10, 12] : count <= 32 ? [12, 6, 8] : [8, 4, 5];
    this.heights = [compute, other, other];
    this.rowHeight = compute + 2 * other + 2 + gap;
    const total = RULER + count * this.rowHeight + 8;
    const visible = Math.max(140, Math.min(total, Math.round(innerHeight * 0.62)));
    this.scroller.style.height = `${visible + 2}px`;
    this.spacer.style.height = `${Math.max(0, total - visible)}px`;
    this.height = visible;
    this.canvas.style.height = `${visible}px`;
    this.width = this.scroller.clientWidth;
    this.view.width = Math.max(50, this.width - GUTTER - 12);
    this.view.dispatchEvent(new Event("change"));
  }

  showRange() {
    if (!this.step) return;
    const [low, high] = [this.view.low, this.view.high].map((tick) => secondsText(tick * this.step.tick));
    document.getElementById("range").textContent = `${low} to ${high}`;
  }

  box(row, track) {
    let top = RULER + 4 + row * this.rowHeight - this.scroller.scrollTop;
    for (let above = 0; above < track; above += 1) top += this.heights[above] + 1;
    return { left: GUTTER, top, height: this.heights[track] };
  }

  paint() {
    if (!this.step || !this.height) return;
    const context = prepare(this.canvas, this.width, this.height);
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / this.rowHeight));
    const last = Math.min(this.ranks.length, first + Math.ceil(this.height / this.rowHeight) + 1);
    this.paintRuler(context);
    context.save();
    context.beginPath();
    context.rect(0, RULER, this.width, this.height - RULER);
    context.clip();
    for (let row = first; row < last; row += 1) this.paintRow(context, row);
    for (const at of [this.selected, this.hovered]) if (at) this.paintLinks(context, at);
    context.restore();
  }

  paintRow(context, row) {
    const { rank, tracks } = this.step.ranks[this.ranks[row]];
    const boxes = tracks.map((_, track) => this.box(row, track));
    context.fillStyle = color("text");
    context.fillText(`rank ${rank}`, 10, boxes[0].top + boxes[0].height / 2 + 0.5);
    if (this.heights[1] >= 9) {
      context.fillStyle = color("muted");
      const font = context.font;
      context.font = font.replace("11px", "9.5px");
      context.textAlign = "right";
      for (const track of [1, 2]) context.fillText(index.tracks[track], GUTTER - 8, boxes[track].top + 5.5);
      context.textAlign = "left";
      context.font = font;
    }
    context.fillStyle = color("faint");
    for (const box of boxes) context.fillRect(GUTTER, box.top, this.view.width, box.height);
    tracks.forEach((track, number) => {
      drawTrack(context, track, this.view, boxes[number], this.colors, this.unit);
      // The wait for a collective is the exposed part of it.
      if (number) drawTrack(context, tracks[0], this.view, boxes[number], this.exposed[number], this.unit);
    });
  }

  paintRuler(context) {
    const seconds = (tick) => tick * this.step.tick;
    const unit = this.view.width / Math.max(2, Math.floor(this.view.width / 110));
    const marks = ticks(seconds(this.view.low), seconds(this.view.high), this.view.width / unit);
    context.fillStyle = color("muted");
    for (const mark of marks) {
      const x = Math.round(this.view.x(mark / this.step.tick)) + 0.5;
      const text = secondsText(mark);
      if (x + 4 + context.measureText(text).width < this.width) context.fillText(text, x + 4, RULER / 2);
      context.fillRect(x - 0.5, 6, 1, RULER - 6);
    }
    context.fillStyle = color("line");
    context.fillRect(0, RULER - 1, this.width, 1);
  }

  paintLinks(context, { row, track, bar }) {
    const { tracks } = this.step.ranks[this.ranks[row]];
    const ends = linksOf(tracks, track, bar);
    this.outline(context, row, track, bar);
    for (const [from, to] of ends) {
      for (const [number, one] of [from, to]) this.outline(context, row, number, one);
      const start = this.corner(row, tracks, from, "end");
      const stop = this.corner(row, tracks, to, "start");
      if (stop.x >= start.x - 8) this.arrow(context, start, stop); // not to the start of a wait
    }
  }

  outline(context, row, number, bar) {
    const track = this.step.ranks[this.ranks[row]].tracks[number];
    const box = this.box(row, number);
    const left = Math.max(GUTTER - 2, this.view.x(track.began[bar]));
    const right = Math.min(GUTTER + this.view.width + 2, this.view.x(track.began[bar] + track.lasted[bar]));
    if (right < left) return;
    context.strokeStyle = color("text");
    context.lineWidth = 1.5;
    context.strokeRect(left - 0.75, box.top - 0.75, Math.max(1, right - left) + 1.5, box.height + 1.5);
  }

  corner(row, tracks, [number, bar], side) {
    const track = tracks[number];
    const box = this.box(row, number);
    const tick = track.began[bar] + (side === "end" ? track.lasted[bar] : 0);
    return { x: this.view.x(tick), y: box.top + box.height / 2 };
  }

  arrow(context, from, to) {
    const bend = to.x - from.x > 24 ? (to.x - from.x) / 3 : 0; // none: straight
    const angle = bend ? 0 : Math.atan2(to.y - from.y, to.x - from.x);
    context.strokeStyle = context.fillStyle = color("text");
    context.lineWidth = 1.25;
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.bezierCurveTo(from.x + bend, from.y, to.x - bend, to.y, to.x, to.y);
    context.stroke();
    context.save();
    context.translate(to.x, to.y);
    context.rotate(angle);
    context.beginPath();
    context.moveTo(1, 0);
    context.lineTo(-6, -3.5);
    context.lineTo(-6, 3.5);
    context.fill();
    context.restore();
  }

  /** The item under the pointer: {row, track, bar}, or null. */
  at(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    if (!this.step || x < GUTTER || y < RULER) return null;
    const row = Math.floor((y - RULER - 4 + this.scroller.scrollTop) / this.rowHeight);
    if (row < 0 || row >= this.ranks.length) return null;
    for (const track of [0, 1, 2]) {
      const box = this.box(row, track);
      if (y < box.top || y > box.top + box.height + 1) continue;
      const { tracks } = this.step.ranks[this.ranks[row]];
      const bar = findBar(tracks[track], this.view.tick(x), 3 * this.view.ticksPerPixel);
      return bar < 0 ? null : { row, track, bar };
    }
    return null;
  }

  describe({ row, track, bar }) {
    const { rank, tracks } = this.step.ranks[this.ranks[row]];
    const { began, lasted, bytes, label, kind } = tracks[track];
    const name = index.labels[label[bar]];
    const seconds = (ticksCount) => secondsText(ticksCount * this.step.tick);
    const what = WORDS[kindNames[kind[bar]]];
    const size = bytes[bar] ? `, ${bytesText(bytes[bar])}` : "";
    return `${what ? `${what} of ${name}` : name}: ${seconds(lasted[bar])}${size}, at ${seconds(began[bar])} on rank ${rank}`;
  }

  select(at) {
    this.selected = at;
    this.selectedText.textContent = at ? this.describe(at) : "";
    this.draw();
  }

  /** The bar before (-1) or after (1) the selected one, on its track. */
  selectNext(step) {
    const at = this.selected ?? { row: 0, track: 0, bar: -1 };
    const track = this.step.ranks[this.ranks[at.row]].tracks[at.track];
    const bar = Math.min(track.began.length - 1, Math.max(0, at.bar + step));
    if (bar < 0) return;
    this.select({ ...at, bar });
    const [began, ended] = [track.began[bar], track.began[bar] + track.lasted[bar]];
    if (ended < this.view.low || began > this.view.high) this.view.showBar(track, bar);
  }

  zoomToSelected() {
    if (!this.selected) return;
    const { row, track, bar } = this.selected;
    this.view.showBar(this.step.ranks[this.ranks[row]].tracks[track], bar);
  }

  selectLongestWait() {
    let longest = null;
    let ticksCount = 0;
    this.ranks.forEach((position, row) => {
      const { kind, lasted } = this.step.ranks[position].tracks[0];
      kind.forEach((one, bar) => {
        if ((one === KIND.WAIT_GATHER || one === KIND.WAIT_REDUCE) && lasted[bar] > ticksCount) {
          [longest, ticksCount] = [{ row, track: 0, bar }, lasted[bar]];
        }
      });
    });
    if (!longest) return;
    this.scrollToRow(longest.row);
    this.select(longest);
    this.zoomToSelected();
  }

  scrollToRow(row) {
    this.scroller.scrollTop = (row + 0.5) * this.rowHeight - this.height / 2;
  }

  listen() {
    const { scroller, view } = this;
    scroller.addEventListener("pointermove", (event) => this.move(event));
    scroller.addEventListener("pointerleave", () => this.hover(null));
    scroller.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.offsetX > scroller.clientWidth) return;
      scroller.setPointerCapture(event.pointerId);
      this.drag = { x: event.clientX, y: event.clientY, moved: false };
    });
    scroller.addEventListener("pointerup", (event) => {
      if (this.drag && !this.drag.moved) this.select(this.at(event));
      this.drag = null;
      scroller.classList.remove("dragging");
    });
    scroller.addEventListener("dblclick", () => this.zoomToSelected());
    scroller.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    scroller.addEventListener("keydown", (event) => {
      const action = this.keys[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      action();
    });
    this.keys = {
      ArrowLeft: () => view.pan(-0.15),
      ArrowRight: () => view.pan(0.15),
      ArrowUp: () => view.zoom(1 / 1.4),
      ArrowDown: () => view.zoom(1.4),
      "+": () => view.zoom(1 / 1.4),
      "-": () => view.zoom(1.4),
      Home: () => view.showAll(),
      ",": () => this.selectNext(-1),
      ".": () => this.selectNext(1),
      Enter: () => this.zoomToSelected(),
      Escape: () => this.select(null),
    };
  }

  move(event) {
    if (!this.drag) {
      this.hover(this.at(event), event);
      return;
    }
    const [right, down] = [event.clientX - this.drag.x, event.clientY - this.drag.y];
    if (!this.drag.moved && Math.abs(right) + Math.abs(down) < 4) return;
    this.hover(null);
    this.scroller.classList.add("dragging");
    this.view.pan(-right / this.view.width);
    this.scroller.scrollTop -= down;
    this.drag = { x: event.clientX, y: event.clientY, moved: true };
  }

  hover(at, event) {
    showTooltip(at && this.describe(at), event);
    const same = (one, other) => one === other || (one && other && one.row === other.row && one.track === other.track && one.bar === other.bar);
    if (same(at, this.hovered)) return;
    this.hovered = at;
    this.draw();
  }

  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const x = event.clientX - this.canvas.getBoundingClientRect().left;
      this.view.zoom(1.002 ** event.deltaY, this.view.tick(Math.max(GUTTER, x)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.view.pan((event.deltaX || event.deltaY) / this.view.width);
    }
  }
}
