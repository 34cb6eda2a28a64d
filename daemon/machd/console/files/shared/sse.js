// Server-sent events over fetch, which can send headers and a body, as EventSource cannot.

/**
 * Read the events of a response until it ends.
 *
 * @param {Response} response Its body is text/event-stream.
 * @yields {{event: string, data: string}} One event; comments are left out.
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      unread += value;
      const lines = unread.split("\n");
      unread = lines.pop();
      for (const one of lines) {
        const line = one.endsWith("\r") ? one.slice(0, -1) : one;
        if (line === "") {
          if (data.length > 0) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line.startsWith("event:")) {
          event = line.slice(6).trim();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
