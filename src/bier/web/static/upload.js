// The user's own pictures: chosen, dropped or pasted.

const drop = document.getElementById("drop");
const input = document.getElementById("file");

export function prepare(take) {
  input.addEventListener("change", () => {
    if (input.files.length) take([...input.files]);
    input.value = ""; // so that the same file can be chosen again
  });
  let depth = 0;
  const holdsFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  document.addEventListener("dragenter", (event) => {
    if (!holdsFile(event)) return;
    depth += 1;
    drop.classList.add("over");
  });
  document.addEventListener("dragleave", (event) => {
    if (!holdsFile(event)) return;
    depth = Math.max(0, depth - 1);
    drop.classList.toggle("over", depth > 0);
  });
  document.addEventListener("dragover", (event) => {
    if (holdsFile(event)) event.preventDefault();
  });
  document.addEventListener("drop", (event) => {
    depth = 0;
    drop.classList.remove("over");
    if (!holdsFile(event)) return;
    event.preventDefault();
    if (event.dataTransfer.files.length) take([...event.dataTransfer.files]);
  });
  document.addEventListener("paste", (event) => {
    if (event.clipboardData?.files.length) take([...event.clipboardData.files]);
  });
}

// Why a file cannot be used, as far as that is known before it is sent; otherwise null.
export function refusal(file, limits) {
  const most = limits.bytes / 2 ** 20;
  if (file.size > limits.bytes) {
    return `“${file.name}” has ${(file.size / 2 ** 20).toFixed(1)} MB; a picture may have at most ${most} MB.`;
  }
  if (file.size === 0) return `“${file.name}” is empty.`;
  if (file.type && !file.type.startsWith("image/")) return `“${file.name}” is not a picture.`;
  return null;
}
