// Server-sent events over fetch, so that a key can come along. Gives the data of each event as it arrives.

let key = sessionStorage.getItem("denim-key") || "";

export function useKey(given) {
  key = given;
  sessionStorage.setItem("denim-key", given);
}

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

// Throws an Error with `status` for an answer that is no stream.
export async function* events(address, options = {}) {
  const reply = await fetch(address, { ...options, headers: { ...headers(), ...options.headers } });
  if (!reply.ok) {
    const body = await reply.json().catch(() => ({}));
    throw Object.assign(new Error(body.error?.message ?? `the server answered ${reply.status}`), { status: reply.status });
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    let end;
    while ((end = waiting.indexOf("\n\n")) >= 0) {
      const data = waiting.slice(0, end).split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      waiting = waiting.slice(end + 2);
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
