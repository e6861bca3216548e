// One photograph at its full size, with its name and folder.

import { picture } from "./api.js";
import { address, read } from "./place.js";

const byId = (id) => document.getElementById(id);
const box = byId("photo");
let shown = "";

export function look(thing) {
  const mine = thing.id.startsWith("upload:");
  const parts = thing.id.split("/");
  shown = thing.id;
  byId("photo-image").src = byId("photo-open").href = picture(thing.id, mine ? 640 : "full");
  byId("photo-image").alt = thing.label ?? "";
  byId("photo-name").textContent = mine ? "Your picture" : parts.pop();
  byId("photo-folder").textContent = mine ? "" : [parts.join("/"), thing.label ? `label: ${thing.label}` : ""].filter(Boolean).join(" · ");
  byId("photo-search").href = address([thing.id]);
  const { ids } = read();
  byId("photo-add").hidden = !ids.length || ids.includes(thing.id);
  byId("photo-add").href = address([...ids, thing.id]);
  byId("photo-copy").hidden = mine;
  byId("photo-copy").textContent = "Copy the name";
  box.showModal();
}

for (const id of ["photo-close", "photo-search", "photo-add"]) byId(id).addEventListener("click", () => box.close());
box.addEventListener("click", (event) => event.target === box && box.close());
byId("photo-copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(shown);
    byId("photo-copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(byId("photo-name")); // without a secure address there is no clipboard
  }
});
