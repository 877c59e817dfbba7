// Speed of an answer, by a clock in milliseconds.
const LEAST_MS = 250; // a shorter time measures the transfer, not the generation

export class Pace {
  constructor(now = () => performance.now()) {
    this.now = now;
    this.began = now();
    this.first = this.last = null;
    this.tokens = this.firstTokens = 0;
  }

  more(tokens) {
    this.last = this.now();
    if (this.first === null) { this.first = this.last; this.firstTokens = tokens; }
    this.tokens += tokens;
  }

  told() {
    if (this.first === null) return "";
    const took = this.last - this.first;
    const after = this.tokens - this.firstTokens; // tokens of the first delta were generated before it arrived
    const parts = [`first token after ${((this.first - this.began) / 1000).toFixed(2)} s`];
    if (after > 0 && took >= LEAST_MS) parts.unshift(`${((1000 * after) / took).toFixed(1)} tokens/s`);
    return [...parts, `${this.tokens} token${this.tokens === 1 ? "" : "s"}`].join(" · ");
  }
}
