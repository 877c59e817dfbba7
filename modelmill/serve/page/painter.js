// Paints a growing answer: at most once per frame, and less often where painting takes long.

const MAX_SHARE = 0.25; // of the time may be spent painting, so that long answers stay fluent

export class Painter {
  /** @param {() => void} paint shows the newest state */
  constructor(paint) {
    this.paint = paint;
    this.timer = 0;
    this.frame = 0;
    this.earliest = 0; // time from which painting is allowed again
  }

  /** Something has changed. */
  request() {
    if (this.timer || this.frame) return;
    const wait = this.earliest - performance.now();
    if (wait > 0) this.timer = setTimeout(() => { this.timer = 0; this.#ask(); }, wait);
    else this.#ask();
  }

  #ask() {
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const began = performance.now();
      this.paint();
      const now = performance.now();
      this.earliest = now + (now - began) * (1 / MAX_SHARE - 1);
    });
  }

  /** Nothing more comes; what was requested is dropped. */
  cancel() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
    this.timer = this.frame = 0;
  }
}
