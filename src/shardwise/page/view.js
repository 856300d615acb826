/** The visible part of a step's time in ticks, shared by the timeline and the memory chart. */

export const GUTTER = 92; // pixels to the left of the time axis
const END = 2 ** 32 - 1;
const NARROWEST = 2000; // ticks: half a millionth of a step

export class View extends EventTarget {
  low = 0;
  high = END;
  width = 1; // width of the time axis, in pixels

  get ticksPerPixel() {
    return (this.high - this.low) / this.width;
  }

  x(tick) {
    return GUTTER + (tick - this.low) / this.ticksPerPixel;
  }

  tick(x) {
    return this.low + (x - GUTTER) * this.ticksPerPixel;
  }

  show(low, high) {
    const length = Math.min(END, Math.max(NARROWEST, high - low));
    this.low = Math.min(Math.max(0, low), END - length);
    this.high = this.low + length;
    this.dispatchEvent(new Event("change"));
  }

  showAll() {
    this.show(0, END);
  }

  /** Move by a share of what is visible. */
  pan(share) {
    const length = this.high - this.low;
    this.show(this.low + share * length, this.high + share * length);
  }

  /** Show `factor` times as much time, keeping the tick `center` in place. */
  zoom(factor, center = (this.low + this.high) / 2) {
    const length = Math.min(END, Math.max(NARROWEST, (this.high - this.low) * factor));
    const share = (center - this.low) / (this.high - this.low);
    this.show(center - share * length, center + (1 - share) * length);
  }

  /** Show a bar with its surroundings. */
  showBar(track, bar) {
    const around = Math.max(track.lasted[bar] * 2, NARROWEST);
    this.show(track.began[bar] - around, track.began[bar] + track.lasted[bar] + around);
  }
}
