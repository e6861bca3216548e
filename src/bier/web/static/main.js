// The page. Its state, the query, the number of learners and the re-ranking, is in the address.

import * as api from "./api.js";
import * as crop from "./crop.js";
import * as cut from "./cut.js";
import { look } from "./photo.js";
import * as pick from "./pick.js";
import * as place from "./place.js";
import * as rows from "./rows.js";
import { moveWithArrows, tile } from "./tiles.js";
import * as upload from "./upload.js";

const byId = (id) => document.getElementById(id);
const RESULTS = 12;
const MOST = 100;
const PICTURES = 8; // of one query
const LOOK_SECONDS = 5;
let status = null;
let shown = null; // { id, label } of the query on the screen
let count = RESULTS;
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
  return { k: count, learners, ...more, ...(rerank === NO_RERANKING ? {} : { rerank }) };
}

// A single learner's results are asked for while they can be seen.
const comparing = () => byId("compare").open && status.groups.length > 1;
const measured = () => status.queries !== null && rerankNow() === NO_RERANKING;

function showQuery(thing, source = api.picture(thing.id, 640), others = []) {
  shown = thing;
  document.body.classList.remove("start");
  byId("query").hidden = false;
  byId("hint").hidden = true;
  byId("query-image").src = source;
  byId("query-image").alt = thing.label ? `The query: ${thing.label}` : "The query: your picture";
  byId("query-label").textContent = thing.label ?? (thing.id.startsWith("upload:") ? "Your picture" : thing.id);
  byId("query-more").replaceChildren(...others.map((other) => tile(other)));
  byId("look").hidden = thing.id === "upload:";
  crop.clear();
}

function showNothing() {
  shown = null;
  document.body.classList.add("start");
  document.title = "bier";
  byId("more").hidden = true;
  byId("compare").hidden = true;
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
  rows.empty("Which images are alike?", "Choose a picture below or drop one of your own to see the images that are most like it.");
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
  const { ids } = place.read();
  const learners = learnersNow();
  cut.describe(status, learners);
  cut.measure(measured());
  place.replace(ids, learners, rerankNow());
  if (!ids.length || status.images === 0) {
    running?.abort();
    rows.waiting(false);
    showNothing();
    return;
  }
  const asked = (signal) => api.search(ids, options(learners, { rows: comparing() ? "all" : "ensemble" }), signal);
  const answer = await during(asked, follow);
  if (!answer) {
    if (!shown) showNothing();
    return;
  }
  showAnswer(answer, learners);
}

function showAnswer(answer, learners) {
  const held = document.activeElement?.closest?.("#results") !== null;
  showQuery(answer.query, undefined, answer.others);
  if (!comparing()) rows.forgetLearners();
  rows.show(answer, status, learners, measured());
  byId("compare").hidden = false;
  byId("more").hidden = answer.rows[0].results.length < count || count >= MOST;
  const [first] = answer.rows;
  byId("key-line").hidden = first.threshold === null;
  const same = first.threshold === null ? "" : `, ${first.results.filter((one) => one.same).length} of them the same`;
  byId("told").textContent = `${first.results.length} nearest images to ${answer.query.label ?? "your picture"}${same}`;
  document.title = `${answer.query.label ?? "Your picture"} · bier`;
  if (held) byId("results").focus({ preventScroll: true });
}

// After a new query its results are in view: on a phone they lie below the picture.
function scrollToResults() {
  const narrow = matchMedia("(max-width: 62rem)").matches;
  if (narrow) byId("results").scrollIntoView({ block: "start" });
  else if (byId("query").getBoundingClientRect().top < 0) scrollTo({ top: 0 });
}

async function take(files) {
  const some = files.slice(0, PICTURES);
  const why = some.map((file) => upload.refusal(file, status.upload)).find(Boolean);
  if (why) return showBanner(why);
  if (status.images === 0) return;
  const [file] = some;
  count = RESULTS;
  const preview = URL.createObjectURL(file);
  const before = shown;
  showQuery({ id: "upload:", label: null }, preview);
  const learners = learnersNow();
  const wide = { rows: comparing() ? "all" : "ensemble" };
  const asked = async (signal) => {
    const answers = [];
    for (const one of some) answers.push(await api.upload(one, options(learners, wide), signal));
    return answers.length === 1 ? answers[0] : api.search(answers.map((one) => one.query.id), options(learners, wide), signal);
  };
  const answer = await during(asked, () => take(files));
  if (answer) {
    const ids = [answer.query, ...answer.others].map((one) => one.id);
    history.pushState(null, "", place.address(ids, learners, rerankNow()));
    showAnswer(answer, learners);
    scrollToResults();
    if (files.length > PICTURES) showBanner(`A query takes up to ${PICTURES} pictures; the first ${PICTURES} were used.`);
  } else if (before) {
    showQuery(before);
  } else {
    showNothing();
  }
  URL.revokeObjectURL(preview);
}

function cutTo(learners) {
  const { ids } = place.read();
  place.replace(ids, learners, rerankNow());
  if (!ids.length || !shown) return;
  clearTimeout(timer);
  timer = setTimeout(async () => {
    const asked = (signal) => api.search(ids, options(learners, { rows: "ensemble" }), signal);
    const answer = await during(asked, () => cutTo(learners));
    if (answer) rows.show(answer, status, learners, measured());
  }, 60);
}

function rerankBy(name) {
  place.replace(place.read().ids, learnersNow(), name);
  follow();
}

async function showRandom() {
  try {
    const one = await pick.random();
    if (one) location.hash = place.address([one.id]);
  } catch (error) {
    failed(error, showRandom);
  }
}

function introduce() {
  const several = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
  const facts = [several(status.images, "image"), ...(status.classes ? [several(status.classes, "label")] : [])];
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
  byId("compare").open = learnersNow() < status.groups.length || rerankNow() !== NO_RERANKING;
  crop.prepare(take);
  byId("look").addEventListener("click", () => look(shown));
  byId("more").addEventListener("click", () => {
    count = Math.min(count + 2 * RESULTS, MOST);
    follow();
  });
  byId("compare").addEventListener("toggle", () => comparing() && shown && follow());
  byId("order").addEventListener("submit", (event) => event.preventDefault());
  byId("rerank").addEventListener("change", (event) => rerankBy(event.target.value));
  addEventListener("hashchange", async () => {
    count = RESULTS;
    await follow();
    scrollToResults();
  });
  setInterval(() => notice(refresh), 1000 * LOOK_SECONDS);
  await Promise.all([follow(), status.images ? refresh() : null]);
}

// Another process has replaced the collection, or the server was started anew: show what there is now, and say so.
async function notice(refresh) {
  if (document.hidden) return;
  const now = await api.status().catch(() => null);
  if (now === null || now.version === status.version) return;
  status = now;
  api.keepPictures(status.version);
  introduce();
  await Promise.all([follow(), status.images ? refresh() : null]);
  showBanner(`The collection was replaced. It has ${status.images.toLocaleString("en")} images now.`);
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
