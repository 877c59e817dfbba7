// How much of the model's context the conversation takes, as the server counted after the last answer.
import { $ } from "./dom.js";

const NEARLY_FULL = 0.9;
const count = new Intl.NumberFormat("en");

/**
 * @param {{contextTokens?: number}[]} path messages that are shown
 * @param {number|null|undefined} limit tokens of the model's context
 */
export function showContext(path, limit) {
  const used = path.findLast((message) => message.contextTokens)?.contextTokens;
  $("context").hidden = !used || !limit;
  if (!used || !limit) return;
  const meter = $("context-meter");
  meter.max = limit;
  meter.high = NEARLY_FULL * limit;
  meter.value = used;
  const full = used >= NEARLY_FULL * limit;
  $("context").classList.toggle("full", full);
  $("context-text").textContent = `${count.format(used)} of ${count.format(limit)} tokens of context`;
  $("context").title = full ? "The context is nearly full: shorten the conversation, or start a new one." : "Tokens of the conversation, as the model reads it";
}
