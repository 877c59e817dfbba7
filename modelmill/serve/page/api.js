// All requests to the server.
import { kept } from "./storage.js";

const PLAIN = {
  401: "The server wants an API key: enter it in the settings.",
  403: "This server answers to localhost only.",
  408: "Sending took too long.",
  413: "This is too large for the server.",
  429: "The server is busy. Try again in a moment.",
};
const CODES = {
  context_length_exceeded: "The conversation has become longer than the model can take. Shorten it, or start a new one.",
  not_ready: "The model is not ready yet.",
  draining: "The server is shutting down.",
  engine_restarted: "The model stopped while it answered, and is being started again.",
};

export class Refused extends Error {
  constructor(status, told = {}) {
    super(CODES[told.code] || PLAIN[status] || told.message || "The server made a mistake. Its log says more.");
    this.status = status;
    this.code = told.code || null;
  }
}

export async function call(path, body, signal) {
  /** @type {Record<string, string>} */
  const headers = {};
  const key = kept("key");
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    const method = body === undefined ? "GET" : "POST";
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, { message: "The server cannot be reached." });
  }
  if (response.ok || path === "/health") return response;
  let told = {};
  try { told = (await response.json()).error || {}; } catch { /* not JSON */ }
  throw new Refused(response.status, told);
}

// Yields the events of a stream. A stream that ends without [DONE] was interrupted.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      piece = { done: true };
    }
    if (piece.done) throw new Refused(0, { message: "The answer broke off: the connection was lost." });
    const blocks = (rest + piece.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(503, event.error);
      yield event;
    }
  }
}
