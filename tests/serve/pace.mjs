// Run by test_page: the page's clock, with times in milliseconds instead of a clock.
import { Pace } from "../../modelmill/serve/page/pace.js";

const cases = JSON.parse(process.argv[2]);
console.log(JSON.stringify(cases.map(([began, ...pieces]) => {
  let now = began;
  const pace = new Pace(() => now);
  for (const [at, tokens] of pieces) { now = at; pace.more(tokens); }
  return pace.told();
})));
