// Some images of the collection to choose from, filtered by label.

import { browse } from "./api.js";
import { moveWithArrows, tile } from "./tiles.js";

const grid = document.getElementById("browse");
const filter = document.getElementById("filter");
const note = document.getElementById("browse-note");
let seed = Math.floor(Math.random() * 1e6);
let running = null;
let timer = 0;

export function prepare(status, failed) {
  document.getElementById("pick").hidden = status.images === 0;
  filter.hidden = status.classes === 0;
  const refresh = () => fill(failed);
  document.getElementById("others").addEventListener("click", () => {
    seed += 1;
    refresh();
  });
  filter.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, 150);
  });
  moveWithArrows(grid);
  return refresh;
}

export async function random() {
  seed += 1;
  const found = await browse(1, seed, filter.value.trim());
  return found.images[0] ?? (await browse(1, seed, "")).images[0];
}

async function fill(failed) {
  running?.abort();
  running = new AbortController();
  const label = filter.value.trim();
  try {
    const found = await browse(36, seed, label, running.signal);
    grid.replaceChildren(...found.images.map((one) => tile(one)));
    note.textContent = found.matching
      ? `${found.images.length} of ${found.matching.toLocaleString("en")} images${label ? ` with “${label}” in their label` : ""}`
      : `No label contains “${label}”. Labels look like “${await example()}”.`;
  } catch (error) {
    if (error.name !== "AbortError") failed(error);
  }
}

async function example() {
  const some = await browse(1, seed, "");
  return some.images[0]?.label ?? "…";
}
