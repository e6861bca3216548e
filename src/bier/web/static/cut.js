// The slider that reduces the ensemble to its first learners.

import { element } from "./tiles.js";

const byId = (id) => document.getElementById(id);
const slider = byId("learners");

const bytes = (count) => (count < 1024 ? `${count} bytes` : `${(count / 1024).toFixed(1)} kB`);

export function prepare(status, changed) {
  const count = status.groups.length;
  slider.max = count;
  slider.value = count;
  byId("cut").hidden = count < 2;
  byId("cut-ticks").replaceChildren(...status.groups.map((_, m) => element("span", { textContent: m + 1 })));
  const measured = status.queries !== null;
  byId("cut-note").textContent = measured
    ? `Recall@1: how often the nearest image has the same label, measured on ${status.measured_on} (${status.queries.toLocaleString("en")} queries).`
    : "";
  if (measured) {
    const highest = Math.max(...status.prefixes.map((prefix) => prefix.recall["1"]), 1);
    byId("cut-bars").replaceChildren(
      ...status.prefixes.map((prefix) => {
        const bar = element("div", { textContent: prefix.recall["1"].toFixed(1) });
        bar.style.height = `${Math.max(38, (100 * prefix.recall["1"]) / highest)}%`;
        return bar;
      }),
    );
  }
  measure(measured);
  byId("cut").addEventListener("submit", (event) => event.preventDefault());
  slider.addEventListener("input", () => {
    describe(status, Number(slider.value));
    changed(Number(slider.value));
  });
}

// Recall is that of the plain search: with re-ranking it is not shown.
export function measure(on) {
  for (const id of ["cut-recall-box", "cut-bars", "cut-note"]) byId(id).hidden = !on;
}

export const chosen = () => Number(slider.value);

export function describe(status, learners) {
  const all = status.prefixes.at(-1);
  const now = status.prefixes[learners - 1];
  slider.value = learners;
  const words = `${learners} of ${status.groups.length} learners`;
  byId("cut-count").textContent = words;
  slider.setAttribute("aria-valuetext", words);
  const share = Math.round((100 * now.dimension) / all.dimension);
  fact("cut-size", `${now.dimension} dimensions`, now === all ? bytes(now.bytes) : `${bytes(now.bytes)}, ${share} % of the whole vector`);
  if (now.recall) {
    const change = now.recall["1"] - all.recall["1"];
    const text = now === all ? "all learners" : `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(1)} against all learners`;
    fact("cut-recall", `${now.recall["1"].toFixed(1)} %`, text);
    [...byId("cut-bars").children].forEach((bar, m) => bar.classList.toggle("now", m === learners - 1));
  }
}

function fact(id, large, small) {
  byId(id).replaceChildren(large, element("small", { textContent: small }));
}
