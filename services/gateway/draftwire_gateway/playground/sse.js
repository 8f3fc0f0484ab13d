/** Server-sent events of a response. */

/**
 * Yields the data of each event. What follows the last whole event is dropped, as the standard has it.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string, void>}
 */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  /** @type {string[]} */
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      // A carriage return at the very end may be half of a line's end.
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line !== "" || data.length === 0) continue;
        yield data.join("\n");
        data = [];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // else a stream that is left before its end stays open
  }
}
