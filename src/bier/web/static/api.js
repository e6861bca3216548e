// Requests to the server; every failure becomes an ApiError with a sentence for people.

export class ApiError extends Error {
  constructor(code, message, again = false) {
    super(message);
    this.code = code;
    this.again = again; // whether the same request may work later
  }
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("gone", "The server does not answer. Is it still running?", true);
  }
  let body = null;
  try {
    body = await response.json();
  } catch {
    // a response that is not JSON is an error in any case
  }
  if (response.ok && body) return body;
  const { code = "http", message = `The server answered with an error (${response.status}).` } = body?.error ?? {};
  throw new ApiError(code, message, [429, 500, 502, 503].includes(response.status));
}

export const status = () => ask("api/status");

export const browse = (count, seed, label, signal) =>
  ask(`api/browse?${new URLSearchParams({ count, seed, label })}`, { signal });

export function search(ids, options, signal) {
  const values = new URLSearchParams(options);
  for (const id of ids) values.append("id", id);
  return ask(`api/search?${values}`, { signal });
}

export function upload(file, options, signal) {
  const form = new FormData();
  form.append("image", file);
  return ask(`api/search?${new URLSearchParams(options)}`, { method: "POST", body: form, signal });
}

let version = "";

export function keepPictures(text) {
  version = text;
}

// Ids may hold slashes, which stay; everything else that means something in an address is escaped.
export const picture = (id, size = 256) =>
  `api/image/${id.split("/").map(encodeURIComponent).join("/")}?size=${size}&v=${version}`;
