/** The page's index, the columns of its steps (described in page/columns.py), and text formatting. */

export const index = JSON.parse(document.getElementById("index").textContent);

const steps = new Map(); // number -> promise

/** The bars and memory samples of a step; `number` counts the recorded steps from 0. */
export function loadStep(number) {
  if (!steps.has(number)) steps.set(number, decode(number));
  return steps.get(number);
}

async function decode(number) {
  const bytes = fromBase64(document.getElementById(`step-${number}`).textContent);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return arrange(index.steps[number], await new Response(stream).arrayBuffer());
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

function arrange(step, buffer) {
  const numBars = step.bars.flat().reduce((sum, count) => sum + count, 0);
  const numSamples = step.samples.reduce((sum, count) => sum + count, 0);
  let offset = 0;
  const column = (Type, length) => {
    const values = new Type(buffer, offset, length);
    offset += values.byteLength;
    return values;
  };
  const began = column(Uint32Array, numBars);
  const lasted = column(Uint32Array, numBars);
  const bytes = column(Float32Array, numBars);
  const at = column(Uint32Array, numSamples);
  const categories = index.categories.map(() => column(Float32Array, numSamples));
  const label = column(Uint16Array, numBars);
  const unit = column(Uint16Array, numSamples);
  const kind = column(Uint8Array, numBars);

  let bar = 0;
  let sample = 0;
  const ranks = step.bars.map((counts, position) => {
    const tracks = counts.map((count) => {
      const part = (values) => values.subarray(bar, bar + count);
      const track = { began: part(began), lasted: part(lasted), bytes: part(bytes), label: part(label), kind: part(kind) };
      track.longest = track.lasted.reduce((most, ticks) => (ticks > most ? ticks : most), 0);
      bar += count;
      return track;
    });
    const part = (values) => values.subarray(sample, sample + step.samples[position]);
    const memory = { at: part(at), unit: part(unit), categories: categories.map(part) };
    sample += step.samples[position];
    return { rank: index.ranks[position], tracks, memory };
  });
  return { ...step, tick: step.seconds / (2 ** 32 - 1), ranks };
}

/** The index of the first value that is not below `wanted`; values ascend. */
export function lowerBound(values, wanted) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function secondsText(seconds) {
  const size = Math.abs(seconds);
  if (!size) return "0 s";
  const [value, unit] = size >= 1 ? [seconds, "s"] : size >= 1e-3 ? [seconds * 1e3, "ms"] : [seconds * 1e6, "µs"];
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${unit}`;
}

export function bytesText(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let power = 0;
  for (let rest = Math.abs(bytes); rest >= 1000 && power < units.length - 1; rest /= 1000) power += 1;
  return power ? `${(bytes / 1000 ** power).toFixed(1)} ${units[power]}` : `${bytes} bytes`;
}
