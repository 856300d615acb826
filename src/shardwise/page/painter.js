/** Shared by all drawings: theme colors, canvases in device pixels, axes and the tooltip. */

const style = getComputedStyle(document.documentElement);

const theme = matchMedia("(prefers-color-scheme: dark)");
const colors = new Map(); // cache, because reading a color is slow

/** The value of a color of page.css in the current theme. */
export function color(name) {
  if (!colors.has(name)) colors.set(name, style.getPropertyValue(`--${name}`).trim());
  return colors.get(name);
}

/** Black or white, whichever is readable on a color such as #7fa8d9. */
export function inkOn(paint) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(paint.slice(at, at + 2), 16));
  return 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#12161c" : "#ffffff";
}

theme.addEventListener("change", () => colors.clear());

/** Call `draw` when the theme changes. */
export function onTheme(draw) {
  theme.addEventListener("change", draw);
}

/** Size a canvas for device pixels, clear it, and return its context in CSS pixels. */
export function prepare(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  return context;
}

/** Round values from `low` to `high`, about `count` of them. */
export function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough) || rough;
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high * (1 + 1e-12); n += 1) found.push(n * step);
  return found;
}

/** Draw a vertical line that marks `x`. */
export function dashedLine(context, x, top, bottom) {
  context.strokeStyle = color("text");
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(x, top);
  context.lineTo(x, bottom);
  context.stroke();
  context.setLineDash([]);
}

/** Draw at most once per frame. */
export function oncePerFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}

const tooltip = document.getElementById("tooltip");

/** Show `text` next to the pointer, or nothing. */
export function showTooltip(text, event) {
  tooltip.hidden = !text;
  if (!text) return;
  tooltip.textContent = text;
  const { width, height } = tooltip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const top = event.clientY + 16 + height > innerHeight ? event.clientY - 12 - height : event.clientY + 16;
  tooltip.style.left = `${Math.max(4, left)}px`;
  tooltip.style.top = `${Math.max(4, top)}px`;
}
