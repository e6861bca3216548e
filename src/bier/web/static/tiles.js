// A picture that can be searched with: an ordinary link, so that keyboards, history and new tabs work.

import { picture } from "./api.js";
import { address } from "./place.js";

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const spoken = { true: "same label", false: "different label", null: "" };

const sameOrSimilar = { true: "the same", false: "similar", null: "" };

export function tile(thing, rank = 0) {
  const name = thing.label ?? thing.id.split("/").pop();
  const image = element("img", { alt: "", loading: "lazy", decoding: "async", src: picture(thing.id) });
  const frame = element("span", { className: "frame" }, image);
  const link = element("a", { className: "tile", href: address(thing.id), draggable: false }, frame);
  image.addEventListener("error", () => link.classList.add("gone"));
  const words = [rank ? `Rank ${rank}` : "", name];
  if (thing.similarity !== undefined) {
    const score = thing.similarity.toFixed(3);
    words.push(`similarity ${score}`, spoken[thing.right], sameOrSimilar[thing.same ?? null]);
    frame.append(element("span", { className: "score", textContent: score }));
    link.title = `${name}: similarity ${score}`;
  } else {
    link.title = name;
  }
  if (thing.right !== undefined && thing.right !== null) {
    link.classList.add(thing.right ? "right" : "wrong");
    frame.append(element("span", { className: "mark", textContent: thing.right ? "✓" : "✗", ariaHidden: "true" }));
  }
  link.append(element("span", { className: "name", textContent: name }));
  link.ariaLabel = words.filter(Boolean).join(", ");
  return element("li", {}, link);
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
