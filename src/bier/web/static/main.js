// The page. Its state, the query, the number of learners and the re-ranking, is in the address.

import * as api from "./api.js";
import * as cut from "./cut.js";
import * as pick from "./pick.js";
import * as place from "./place.js";
import * as rows from "./rows.js";
import { moveWithArrows } from "./tiles.js";
import * as upload from "./upload.js";

const byId = (id) => document.getElementById(id);
const RESULTS = 10;
let status = null;
let shown = null; // { id, label } of the query on the screen
let running = null;
let again = null;
let timer = 0;

function showBanner(text, retry = null) {
  byId("banner-text").textContent = text;
  again = retry;
  byId("banner-again").hidden = retry === null;
  byId("banner").hidden = false;
}

const hideBanner = () => (byId("banner").hidden = true);

function failed(error, retry = null) {
  if (!(error instanceof api.ApiError)) throw error;
  showBanner(error.message, error.again ? retry : null);
}

const learnersNow = () => Math.min(Math.max(place.read().learners ?? cut.chosen(), 1), status.groups.length);

const NO_RERANKING = "none";

function rerankNow() {
  const wanted = place.read().rerank;
  const select = byId("rerank");
  if ([...select.options].some((option) => option.value === wanted)) select.value = wanted;
  return select.value;
}

// What a search asks for besides the query.
function options(learners, more = {}) {
  const rerank = rerankNow();
  return { k: RESULTS, learners, ...more, ...(rerank === NO_RERANKING ? {} : { rerank }) };
}

function showQuery(thing, source = api.picture(thing.id, 640)) {
  shown = thing;
  document.body.classList.remove("start");
  byId("query").hidden = false;
  byId("hint").hidden = true;
  byId("query-image").src = source;
  byId("query-image").alt = thing.label ? `The query: ${thing.label}` : "The query: your picture";
  byId("query-label").textContent = thing.label ?? (thing.id.startsWith("upload:") ? "Your picture" : thing.id);
}

function showNothing() {
  shown = null;
  document.body.classList.add("start");
  document.title = "bier";
  byId("query").hidden = true;
  byId("hint").hidden = false;
  if (status.images === 0) {
    rows.empty(
      "The collection is empty",
      "There are no images to search. Stop the server and start it with a data set or a folder of images:",
      "bier serve RUN --images FOLDER",
    );
    return;
  }
  const count = status.groups.length;
  const more = count > 1 ? ` The first row is that of all ${count} learners together, the others are those of each learner alone.` : "";
  rows.empty(
    "Which images are alike?",
    `Choose a picture below or drop one of your own to see its nearest neighbours.${more}`,
  );
}

// Runs one search at a time: a newer one cancels an older one that is still running.
async function during(work, retry) {
  running?.abort();
  const mine = (running = new AbortController());
  rows.waiting(true);
  try {
    const answer = await work(mine.signal);
    if (mine === running) hideBanner();
    return mine === running ? answer : null;
  } catch (error) {
    if (error.name !== "AbortError" && mine === running) failed(error, retry);
    return null;
  } finally {
    if (mine === running) rows.waiting(false);
  }
}

async function follow() {
  const { id } = place.read();
  const learners = learnersNow();
  cut.describe(status, learners);
  place.replace(id, learners, rerankNow());
  if (!id || status.images === 0) {
    running?.abort();
    rows.waiting(false);
    showNothing();
    return;
  }
  const asked = (signal) => api.search(id, options(learners, { rows: "all" }), signal);
  const answer = await during(asked, follow);
  if (!answer) {
    if (!shown) showNothing();
    return;
  }
  showAnswer(answer, learners);
}

function showAnswer(answer, learners) {
  const held = document.activeElement?.closest?.("#results") !== null;
  showQuery(answer.query);
  rows.show(answer, status, learners);
  const [first] = answer.rows;
  byId("key-line").hidden = first.threshold === null;
  const same = first.threshold === null ? "" : `, ${first.results.filter((one) => one.same).length} of them the same`;
  byId("told").textContent = `${first.results.length} nearest images to ${answer.query.label ?? "your picture"}${same}`;
  document.title = `${answer.query.label ?? "Your picture"} · bier`;
  if (held) byId("results").focus({ preventScroll: true });
  if (byId("query").getBoundingClientRect().top < 0) scrollTo({ top: 0, behavior: "smooth" });
}

async function take(file) {
  const why = upload.refusal(file, status.upload);
  if (why) return showBanner(why);
  if (status.images === 0) return;
  const preview = URL.createObjectURL(file);
  const before = shown;
  showQuery({ id: "upload:", label: null }, preview);
  const learners = learnersNow();
  const answer = await during((signal) => api.upload(file, options(learners), signal), () => take(file));
  if (answer) {
    history.pushState(null, "", place.address(answer.query.id, learners, rerankNow()));
    showAnswer(answer, learners);
  } else if (before) {
    showQuery(before);
  } else {
    showNothing();
  }
  URL.revokeObjectURL(preview);
}

function cutTo(learners) {
  const { id } = place.read();
  place.replace(id, learners, rerankNow());
  if (!id || !shown) return;
  clearTimeout(timer);
  timer = setTimeout(async () => {
    const asked = (signal) => api.search(id, options(learners, { rows: "ensemble" }), signal);
    const answer = await during(asked, () => cutTo(learners));
    if (answer) rows.showEnsemble(answer, status, learners);
  }, 60);
}

function rerankBy(name) {
  const { id } = place.read();
  place.replace(id, learnersNow(), name);
  follow();
}

async function showRandom() {
  try {
    const one = await pick.random();
    if (one) location.hash = place.address(one.id);
  } catch (error) {
    failed(error, showRandom);
  }
}

function introduce() {
  const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
  const facts = [count(status.images, "image"), count(status.groups.length, "learner"), status.backbone];
  if (status.classes) facts.splice(1, 0, count(status.classes, "label"));
  byId("title").textContent = status.title;
  byId("about").textContent = facts.join(" · ");
  byId("report").hidden = !status.report;
  byId("random").hidden = status.images === 0;
}

async function start() {
  hideBanner();
  try {
    status = await api.status();
  } catch (error) {
    rows.empty("The server does not answer", "The page will work again when `bier serve` runs.");
    return failed(error, start);
  }
  api.keepPictures(status.version);
  introduce();
  cut.prepare(status, cutTo);
  const refresh = pick.prepare(status, failed);
  upload.prepare(take);
  moveWithArrows(byId("results"));
  byId("random").addEventListener("click", showRandom);
  byId("order").hidden = status.images === 0;
  byId("order").addEventListener("submit", (event) => event.preventDefault());
  byId("rerank").addEventListener("change", (event) => rerankBy(event.target.value));
  addEventListener("hashchange", follow);
  await Promise.all([follow(), status.images ? refresh() : null]);
}

byId("banner-close").addEventListener("click", hideBanner);
byId("banner-again").addEventListener("click", () => again?.());
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address holds the query
  byId("results").focus();
});
byId("home").addEventListener("click", (event) => {
  event.preventDefault();
  location.hash = "";
});
start();
