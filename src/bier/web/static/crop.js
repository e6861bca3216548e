// A part of the query's picture, chosen by dragging; it is cut out here and sent like any other picture.

const area = document.getElementById("crop");
const image = document.getElementById("query-image");
const box = document.getElementById("crop-box");
const LEAST = 12; // pixels on the screen; less is a click
let from = null;

// Where the picture lies inside its element, which keeps the picture's proportions.
function frame() {
  const whole = image.getBoundingClientRect();
  const scale = Math.min(whole.width / image.naturalWidth, whole.height / image.naturalHeight);
  const [width, height] = [image.naturalWidth * scale, image.naturalHeight * scale];
  return { left: whole.left + (whole.width - width) / 2, top: whole.top + (whole.height - height) / 2, width, height, scale };
}

function at(event) {
  const { left, top, width, height } = frame();
  return [Math.min(Math.max(event.clientX - left, 0), width), Math.min(Math.max(event.clientY - top, 0), height)];
}

function between([a, b], [c, d]) {
  return { left: Math.min(a, c), top: Math.min(b, d), width: Math.abs(a - c), height: Math.abs(b - d) };
}

function draw(part) {
  const [outer, inner] = [area.getBoundingClientRect(), frame()];
  const sides = { left: inner.left - outer.left + part.left, top: inner.top - outer.top + part.top, width: part.width, height: part.height };
  for (const [side, value] of Object.entries(sides)) box.style[side] = `${value}px`;
  box.hidden = false;
}

export const clear = () => (box.hidden = true);

export function prepare(take) {
  area.addEventListener("pointerdown", (event) => {
    if (event.button || !image.naturalWidth) return;
    from = at(event);
    area.setPointerCapture(event.pointerId);
    clear();
  });
  area.addEventListener("pointermove", (event) => from && draw(between(from, at(event))));
  area.addEventListener("pointercancel", () => ((from = null), clear()));
  area.addEventListener("pointerup", (event) => {
    const part = from && between(from, at(event));
    from = null;
    if (!part || part.width < LEAST || part.height < LEAST) return clear();
    const { scale } = frame();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [part.width / scale, part.height / scale].map((side) => Math.max(1, Math.round(side)));
    canvas.getContext("2d").drawImage(image, -part.left / scale, -part.top / scale);
    canvas.toBlob((blob) => blob && take([new File([blob], "part.png", { type: "image/png" })]), "image/png");
  });
}
