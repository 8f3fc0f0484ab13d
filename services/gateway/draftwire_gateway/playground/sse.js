/** Server-sent events of a response. */

/**
 * Yields the data of each event. An incomplete event at the end is dropped, as the standard requires.
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
      // A carriage return at the very end may be the first half of a CRLF.
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
    reader.cancel().catch(() => {}); // otherwise a stream that is not read to its end stays open
  }
}
