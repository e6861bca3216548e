// The query, the number of learners and the re-ranking in the address, so that Back works. A link to a picture holds the
// picture only; the others stay as they are.

export function read() {
  const values = new URLSearchParams(location.hash.slice(1));
  const learners = Number.parseInt(values.get("learners") ?? "", 10);
  return { ids: values.getAll("id"), learners: Number.isInteger(learners) ? learners : null, rerank: values.get("rerank") };
}

export function address(ids, learners, rerank) {
  const values = new URLSearchParams(ids.map((id) => ["id", id]));
  if (learners) values.set("learners", learners);
  if (rerank) values.set("rerank", rerank);
  return `#${values}`;
}

export function replace(ids, learners, rerank) {
  history.replaceState(null, "", address(ids, learners, rerank));
}
