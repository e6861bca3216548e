// The results: those of the ensemble, which can be filtered, selected and exported, and those of each learner.

import { element, nameOf, tile } from "./tiles.js";

const byId = (id) => document.getElementById(id);
const results = byId("results");
const alone = byId("alone");
let shown = []; // the hits of the ensemble

export function waiting(on) {
  results.classList.toggle("waiting", on);
  results.ariaBusy = String(on);
}

export function empty(title, ...paragraphs) {
  const box = element("div", { className: "empty" }, element("h2", { textContent: title }));
  box.append(...paragraphs.map((text) => element("p", { textContent: text })));
  results.replaceChildren(box);
  alone.replaceChildren();
  byId("tools").hidden = true;
}

// Without the rows of single learners in an answer, those on the screen stay and only show whether they are used.
export function show(answer, status, learners, measured) {
  const [first, ...others] = answer.rows;
  shown = first.results;
  results.replaceChildren(section(first, status, learners, measured));
  if (others.length) alone.replaceChildren(...others.map((row) => section(row, status, learners, measured)));
  for (const row of alone.children) row.classList.toggle("unused", Number(row.dataset.learner) > learners);
  byId("tools").hidden = !shown.length;
  narrow();
  count();
}

export const forgetLearners = () => alone.replaceChildren();

function narrow() {
  const text = byId("narrow").value.trim().toLocaleLowerCase();
  results.querySelectorAll(".strip > li").forEach((item, place) => {
    const { id, label } = shown[place];
    item.hidden = !`${label ?? ""} ${id}`.toLocaleLowerCase().includes(text);
  });
}

const chosen = () => new Set([...results.querySelectorAll(".choose:checked")].map((one) => one.dataset.id));

function count() {
  const number = chosen().size;
  byId("selected").textContent = number ? `${number} selected` : "";
}

// Texts that a spreadsheet would take for a formula get an apostrophe.
function cell(value) {
  const text = String(value ?? "");
  return `"${(/^[=+\-@\t\r]/.test(text) && typeof value === "string" ? `'${text}` : text).replaceAll('"', '""')}"`;
}

function save() {
  const [some, text] = [chosen(), byId("narrow").value.trim()];
  const visible = [...results.querySelectorAll(".strip > li")].map((item) => !item.hidden);
  const lines = shown.flatMap((hit, place) =>
    (some.size ? some.has(hit.id) : visible[place] || !text)
      ? [[place + 1, hit.similarity, hit.label, nameOf(hit), hit.id].map(cell).join(",")]
      : [],
  );
  const file = new Blob([["rank,similarity,label,name,id", ...lines, ""].join("\r\n")], { type: "text/csv" });
  const link = element("a", { href: URL.createObjectURL(file), download: "similar.csv" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

byId("narrow").addEventListener("input", narrow);
byId("export").addEventListener("click", save);
byId("tools").addEventListener("submit", (event) => event.preventDefault());
results.addEventListener("change", count);

function section(row, status, learners, measured) {
  const together = row.name === "ensemble";
  const number = row.learners.at(-1);
  const known = together ? status.prefixes[number - 1] : status.learners[number - 1];
  const title = together ? ensembleTitle(row, status) : `Learner ${number} alone`;
  const facts = together && status.groups.length === row.learners.length ? [] : [`${row.dimension} dimensions`];
  if (measured && known.recall) facts.push(`Recall@1 ${known.recall["1"].toFixed(1)} %`);
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
  if (row.learners.length === all) return "Nearest images";
  return row.learners.length === 1 ? "Nearest images by the first learner" : `Nearest images by the first ${row.learners.length} learners`;
}
