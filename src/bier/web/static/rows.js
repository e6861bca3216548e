// The rows of results: the ensemble first, then each learner alone.

import { element, tile } from "./tiles.js";

const results = document.getElementById("results");

export function waiting(on) {
  results.classList.toggle("waiting", on);
  results.ariaBusy = String(on);
}

export function empty(title, ...paragraphs) {
  const box = element("div", { className: "empty" }, element("h2", { textContent: title }));
  box.append(...paragraphs.map((text) => element("p", { textContent: text })));
  results.replaceChildren(box);
}

export function show(answer, status, learners) {
  results.replaceChildren(...answer.rows.map((row) => section(row, status, learners)));
}

// Replaces the row of the ensemble after the slider has moved; the learners' rows only show whether they are used.
export function showEnsemble(answer, status, learners) {
  const old = results.querySelector(".row.ensemble");
  const [row] = answer.rows;
  if (old) old.replaceWith(section(row, status, learners));
  for (const alone of results.querySelectorAll(".row.alone")) {
    const number = Number(alone.dataset.learner);
    alone.classList.toggle("unused", number > learners);
  }
}

function section(row, status, learners) {
  const together = row.name === "ensemble";
  const number = row.learners.at(-1);
  const known = together ? status.prefixes[number - 1] : status.learners[number - 1];
  const title = together ? ensembleTitle(row, status) : `Learner ${number} alone`;
  const facts = [`${row.dimension} dimensions`];
  if (known.recall) facts.push(`Recall@1 ${known.recall["1"].toFixed(1)} %`);
  const judged = row.results.filter((one) => one.right !== null);
  if (judged.length) facts.push(`${judged.filter((one) => one.right).length} of ${judged.length} correct`);
  if (row.threshold !== null) facts.push(sameFact(row));
  if (!together && number > learners) facts.push("not used");
  const heading = element("h2", {}, title, element("small", { textContent: facts.join(" · ") }));
  const list = element("ul", { className: "strip" });
  list.append(...row.results.map((one, place) => tile(one, place + 1)));
  const similar = row.results.findIndex((one) => one.same === false);
  if (similar >= 0) list.children[similar].classList.add("similar-from-here");
  const made = element("section", { className: `row ${together ? "ensemble" : "alone"}`, ariaLabel: title }, heading, list);
  if (!together) {
    made.dataset.learner = number;
    made.classList.toggle("unused", number > learners);
  }
  if (!row.results.length) made.append(element("p", { className: "soft", textContent: "There are no other images." }));
  return made;
}

// Images from the threshold of the model on count as the same; a line separates them from those that are only similar.
function sameFact(row) {
  const same = row.results.filter((one) => one.same).length;
  return `${same || "none"} the same (similarity from ${row.threshold.toFixed(2)})`;
}

function ensembleTitle(row, status) {
  const all = status.groups.length;
  if (all === 1) return "Nearest images";
  if (row.learners.length === all) return `Ensemble of all ${all} learners`;
  return row.learners.length === 1 ? "Ensemble of the first learner" : `Ensemble of the first ${row.learners.length} learners`;
}
