/** Draws one track, finds bars in it, and finds which bars belong together. */

import { index, lowerBound } from "data";
import { inkOn } from "painter";

export const KIND = index.kinds;
const [COMPUTE, GATHER, REDUCE] = [0, 1, 2];
const LABEL_WIDTH = 40; // pixels from which a bar shows its unit's name

/**
 * Draw the visible part of a track. Bars within one pixel share a column, which has the color of the
 * longest bar. Adjacent columns of one color are one rectangle, so the cost depends only on the width.
 *
 * `colors` has two lists by kind, for bars of the highlighted unit and for others; bars without a
 * color are not drawn.
 */
export function drawTrack(context, track, view, box, colors, unit) {
  const { began, lasted, label, kind } = track;
  const scale = 1 / view.ticksPerPixel;
  const first = lowerBound(began, view.low - track.longest);
  const right = box.left + view.width;
  let run = null; // columns of one color, not drawn yet
  let column = -1;
  let longest = -1; // duration of the longest bar in that column
  let winner = null; // color of that bar
  let present = null; // reading context.fillStyle is slow
  const fill = (paint, left, width) => {
    if (paint !== present) context.fillStyle = present = paint;
    context.fillRect(left, box.top, width, box.height);
  };
  const flush = () => {
    if (run) fill(run.paint, run.left, run.right - run.left);
    run = null;
  };
  const endColumn = () => {
    if (column >= 0 && run && run.paint === winner && run.right === column) {
      run.right += 1;
    } else if (column >= 0) {
      flush();
      run = { paint: winner, left: column, right: column + 1 };
    }
    column = -1;
  };
  for (let bar = first; bar < began.length && began[bar] < view.high; bar += 1) {
    const start = box.left + (began[bar] - view.low) * scale;
    const width = lasted[bar] * scale;
    const matches = unit === null || label[bar] === unit;
    const paint = colors[matches ? 0 : 1][kind[bar]];
    if (!paint || start + width < box.left) continue;
    if (width >= 1.5) {
      endColumn();
      flush();
      const left = Math.max(start, box.left);
      const end = Math.min(start + width, right);
      fill(paint, left, end - left - (width > 4 ? 0.5 : 0));
      if (end - left > LABEL_WIDTH && box.height >= 13) {
        context.fillStyle = present = inkOn(paint);
        write(context, index.labels[label[bar]], left, end, box);
      }
      continue;
    }
    const here = Math.max(box.left, Math.floor(start));
    if (here !== column) {
      endColumn();
      [column, longest] = [here, -1];
    }
    const weight = lasted[bar] + (matches && unit !== null ? 2 ** 32 : 0);
    if (weight > longest) [winner, longest] = [paint, weight];
  }
  endColumn();
  flush();
}

function write(context, text, left, right, box) {
  const room = right - left - 8;
  const full = context.measureText(text).width;
  if (full > room) {
    const fits = Math.floor((text.length * room) / full) - 1;
    if (fits < 3) return;
    text = `${text.slice(0, fits)}…`;
  }
  context.fillText(text, left + 4, box.top + box.height / 2 + 0.5);
}

/** The bar of a track at a tick, or the nearest one within `reach` ticks; -1 for none. */
export function findBar(track, tick, reach) {
  const { began, lasted } = track;
  let best = -1;
  let distance = Infinity;
  for (let bar = lowerBound(began, tick + reach) - 1; bar >= 0; bar -= 1) {
    if (began[bar] < tick - reach - track.longest) break;
    const away = Math.max(0, began[bar] - tick, tick - began[bar] - lasted[bar]);
    if (away <= reach && away < distance) [best, distance] = [bar, away];
    if (distance === 0) break; // the last bar that began before the tick
  }
  return best;
}

/** The first bar of these kinds and this label from `bar` on (`step` 1) or back (-1); -1 for none. */
function seek(track, bar, step, kinds, label) {
  for (let at = bar; at >= 0 && at < track.kind.length; at += step) {
    if (track.label[at] === label && kinds.includes(track.kind[at])) return at;
  }
  return -1;
}

const COMPUTES = [KIND.FORWARD, KIND.BACKWARD];

/** Pairs of bars, each [track, bar], that arrows join: gather to use, backward to reduction. */
export function linksOf(tracks, trackNumber, bar) {
  const [compute, gathers, reductions] = tracks;
  const track = tracks[trackNumber];
  const [label, began] = [track.label[bar], track.began[bar]];
  const until = (values) => lowerBound(values, began + 1) - 1; // the last that had begun
  const found = [];
  const link = (fromTrack, from, toTrack, to) => {
    if (from >= 0 && to >= 0) found.push([[fromTrack, from], [toTrack, to]]);
  };
  const kind = track.kind[bar];
  if (kind === KIND.GATHER) {
    link(GATHER, bar, COMPUTE, seek(compute, lowerBound(compute.began, began), 1, COMPUTES, label));
  } else if (kind === KIND.WAIT_GATHER) {
    const gather = seek(gathers, until(gathers.began), -1, [KIND.GATHER], label);
    link(GATHER, gather, COMPUTE, seek(compute, bar + 1, 1, COMPUTES, label));
  } else if (COMPUTES.includes(kind)) {
    link(GATHER, seek(gathers, until(gathers.began), -1, [KIND.GATHER], label), COMPUTE, bar);
    if (kind === KIND.BACKWARD) {
      link(COMPUTE, bar, REDUCE, seek(reductions, lowerBound(reductions.began, began), 1, [KIND.REDUCE], label));
    }
  } else if (kind === KIND.REDUCE) {
    link(COMPUTE, seek(compute, until(compute.began), -1, [KIND.BACKWARD], label), REDUCE, bar);
    link(REDUCE, bar, COMPUTE, seek(compute, lowerBound(compute.began, began), 1, [KIND.WAIT_REDUCE], label));
  } else if (kind === KIND.WAIT_REDUCE) {
    link(REDUCE, seek(reductions, until(reductions.began), -1, [KIND.REDUCE], label), COMPUTE, bar);
  }
  return found;
}
