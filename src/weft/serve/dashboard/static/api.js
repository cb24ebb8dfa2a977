// Talks to the service with the user's key, which lives in this tab's session and nowhere else.

const SLOT = "weft-key";
let onSignedOut = () => {};

export const key = {
  get: () => sessionStorage.getItem(SLOT) || "",
  set: (text) => sessionStorage.setItem(SLOT, text),
  clear: () => sessionStorage.removeItem(SLOT),
};

/** Called when the service stops accepting the key. */
export function whenSignedOut(callback) { onSignedOut = callback; }

/** A refusal in one sentence; `status` 0 means that no answer came. */
export class ApiError extends Error {
  constructor(message, status, details = {}) {
    super(message);
    this.status = status;
    this.details = details;
  }
}

const PLAIN = {
  0: "The service cannot be reached; this page tries again by itself.",
  401: "This key is not accepted; check it, or ask your operator for another.",
  403: "This key may not do that; ask your operator for one with the right scope.",
  404: "There is no such thing here, or it belongs to somebody else.",
  413: "That is larger than the service accepts.",
  429: "Too many requests; wait a moment.",
  503: "Nobody can answer at the moment; try again shortly.",
};

function headers(more = {}) {
  return key.get() ? { Authorization: `Bearer ${key.get()}`, ...more } : more;
}

function refusal(status, text) {
  let details = {};
  try { details = JSON.parse(text).error || {}; } catch { /* a proxy's page is no sentence of ours */ }
  const said = typeof details.message === "string" ? details.message.trim() : "";
  if (status === 401) queueMicrotask(onSignedOut);
  const plain = PLAIN[status] || "The service made a mistake; its log knows more.";
  return new ApiError(status === 401 || !said ? plain : said, status, details);
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(PLAIN[0], 0);
  }
  if (!answer.ok) throw refusal(answer.status, await answer.text());
  return answer;
}

/** How long to leave the service alone after a refusal, if it asked for that. */
export const patience = (error) => (error.status === 429 ? 15 : undefined);

/** GET, as JSON. */
export async function get(path, signal) { return (await ask(path, { signal })).json(); }

/** POST of JSON, or of nothing. */
export async function post(path, body, extra = {}) {
  const options = { method: "POST", headers: { "Content-Type": "application/json", ...extra } };
  if (body !== undefined) options.body = JSON.stringify(body);
  return (await ask(path, options)).json();
}

/** DELETE. */
export async function remove(path) { return (await ask(path, { method: "DELETE" })).json(); }

/** A path with its parameters. */
export function path(base, query = {}) {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== undefined && value !== null));
  return String(text) ? `${base}?${text}` : base;
}

/** Uploads a training file, telling `progress` the share sent; `signal` ends it. */
export function upload(file, progress, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const form = new FormData();
    form.append("purpose", "fine-tune");
    form.append("file", file, file.name);
    request.open("POST", "/v1/files");
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onload = () => {
      if (request.status < 300) resolve(JSON.parse(request.responseText));
      else reject(refusal(request.status, request.responseText));
    };
    request.onerror = () => reject(new ApiError("The upload was cut off; try again.", 0));
    request.onabort = () => reject(new DOMException("stopped", "AbortError"));
    signal.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}

/** Saves what a path answers as a file of the browser's. */
export async function download(from, filename) {
  const place = URL.createObjectURL(await (await ask(from)).blob());
  const link = Object.assign(document.createElement("a"), { href: place, download: filename });
  link.click();
  setTimeout(() => URL.revokeObjectURL(place), 60_000);
}

/** One chat answer, piece by piece: calls `piece` with every bit of text and returns the usage, if it was told. */
export async function chat(body, piece, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, signal };
  options.body = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
  let usage = null;
  for await (const data of serverSent(await ask("/v1/chat/completions", options))) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message || PLAIN[503], 503, chunk.error);
    const text = chunk.choices?.[0]?.delta?.content;
    if (text) piece(text);
    usage = chunk.usage || usage;
  }
  return usage;
}

async function* serverSent(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
