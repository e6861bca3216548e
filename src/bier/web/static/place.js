// The query and the number of learners in the address, so that Back works. A link to a picture holds the picture only;
// the number of learners stays as it is.

export function read() {
  const values = new URLSearchParams(location.hash.slice(1));
  const learners = Number.parseInt(values.get("learners") ?? "", 10);
  return { id: values.get("id"), learners: Number.isInteger(learners) ? learners : null };
}

export function address(id, learners) {
  const values = new URLSearchParams();
  if (id) values.set("id", id);
  if (learners) values.set("learners", learners);
  return `#${values}`;
}

export function replace(id, learners) {
  history.replaceState(null, "", address(id, learners));
}
