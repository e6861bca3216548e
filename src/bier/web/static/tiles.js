// A picture that can be searched with: an ordinary link, so that keyboards, history and new tabs work.

import { picture } from "./api.js";
import { look } from "./photo.js";
import { address } from "./place.js";

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const spoken = { true: "same label", false: "different label", null: "" };

const sameOrSimilar = { true: "the same", false: "similar", null: "" };

export const nameOf = (thing) => (thing.id.startsWith("upload:") ? "Your picture" : thing.id.split("/").pop());

export function tile(thing, rank = 0) {
  const name = nameOf(thing);
  const image = element("img", { alt: "", loading: "lazy", decoding: "async", src: picture(thing.id) });
  const frame = element("span", { className: "frame" }, image);
  const link = element("a", { className: "tile", href: address([thing.id]), draggable: false, title: thing.id }, frame);
  image.addEventListener("error", () => link.classList.add("gone"));
  const words = [rank ? `Rank ${rank}` : "", thing.label ?? "", name];
  if (thing.right !== undefined && thing.right !== null) {
    link.classList.add(thing.right ? "right" : "wrong");
    frame.append(element("span", { className: "mark", textContent: thing.right ? "✓" : "✗", ariaHidden: "true" }));
  }
  if (thing.label !== null) link.append(element("span", { className: "label", textContent: thing.label }));
  link.append(element("span", { className: "name", textContent: name }));
  const item = element("li", {}, link);
  if (thing.similarity !== undefined) {
    const score = thing.similarity.toFixed(3);
    words.push(`similarity ${score}`, spoken[thing.right], sameOrSimilar[thing.same ?? null]);
    link.append(element("span", { className: "score", textContent: `similarity ${score}` }));
    const chosen = element("input", { type: "checkbox", className: "choose", ariaLabel: `Choose ${name}` });
    chosen.dataset.id = thing.id;
    const button = element("button", { type: "button", className: "look", textContent: "⤢", title: "Full size", ariaLabel: `${name} at full size` });
    button.addEventListener("click", () => look(thing));
    item.append(chosen, button);
  }
  link.ariaLabel = words.filter(Boolean).join(", ");
  return item;
}

const STEPS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };

// Arrow keys inside `area`: left and right along a list, up and down to the picture that lies there.
export function moveWithArrows(area) {
  area.addEventListener("keydown", (event) => {
    const from = event.target.closest?.(".tile");
    const step = STEPS[event.key];
    if (!from || !step || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = [...area.querySelectorAll(".tile")];
    const next = step[0] ? all[all.indexOf(from) + step[0]] : nearest(from, all, step[1]);
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}

function nearest(from, all, direction) {
  const here = from.getBoundingClientRect();
  let best = null;
  let least = Infinity;
  for (const one of all) {
    const there = one.getBoundingClientRect();
    const down = (there.top - here.top) * direction;
    if (down < here.height / 2) continue;
    const distance = 10 * down + Math.abs(there.left - here.left);
    if (distance < least) [best, least] = [one, distance];
  }
  return best;
}
