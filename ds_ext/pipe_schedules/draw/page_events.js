/* The second half of the page's script: what the mouse, the wheel and the keys do. page.js draws. */

function choose(at, aloud) {
  const same = (key) => chosen?.[key] === at?.[key];
  if (same("plot") && same("row") && same("index") && same("mark")) return;
  chosen = at;
  tip.hidden = !at;
  if (at) {
    const op = at.mark ?? opOf(at), box = at.plot.canvas.getBoundingClientRect();
    const { unit } = at.plot.data, length = short(op.end - op.start);
    const times = `start ${short(op.start)}${unit}, end ${short(op.end)}${unit}, duration ${length}${unit}`;
    const lines = at.mark ? [at.plot.names[at.row], times] : [
      `${WORDS[op.kind]} of ${at.plot.data.slices ? `slice ${op.slice} of ` : ""}micro-batch ${op.m} at stage ${op.stage}`,
      `pipe ${op.pipe}, ${at.plot.names[at.row]}`,
      times,
    ];
    const title = op.text ?? name(op);
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: title }),
      ...lines.map((text) => Object.assign(document.createElement("div"), { textContent: text })));
    const middle = (Math.max(op.start, view.from) + Math.min(op.end, view.to)) / 2;
    const x = box.left + toX(at.plot, middle) - tip.offsetWidth / 2;
    // Beside the rows, so that it does not cover the way of the micro-batch; in a tall picture beside the row.
    const { rows, height } = at.plot, tall = rows.length * height > 320;
    const above = box.top + TOP + (tall ? at.row * height : 0) - tip.offsetHeight - 6;
    const y = above > 4 ? above : box.top + TOP + (tall ? at.row + 1 : rows.length) * height + 6;
    tip.style.left = `${scrollX + Math.min(Math.max(x, 6), document.documentElement.clientWidth - tip.offsetWidth - 6)}px`;
    tip.style.top = `${scrollY + y}px`;
    if (aloud) said.textContent = `${title}: ${lines.join("; ")}`;
  }
  redraw();
}

function under(plot, event) {
  const row = Math.floor((event.offsetY - TOP) / plot.height);
  if (!plot.rows[row] || event.offsetX < view.left || event.offsetX > plot.width - RIGHT) return null;
  const time = toTime(plot, event.offsetX), index = firstFrom(plot.rows[row], time);
  const marks = (plot.marks[row] ?? []).filter((mark) => mark.start <= time && time < mark.end);
  const below = marks.find((mark) => mark.below), beside = marks.find((mark) => !mark.below);
  if (below && event.offsetY > TOP + (row + 1) * plot.height - 4) return { plot, row, mark: below };
  if (plot.rows[row][index]?.start <= time) return { plot, row, index };
  return beside ? { plot, row, mark: beside } : null;
}

function look(from, to) {
  const length = Math.min(Math.max(to - from, view.least), view.end);
  const middle = (from + to) / 2;
  view.from = Math.min(Math.max(middle - length / 2, 0), view.end - length);
  view.to = view.from + length;
  view.fits = false;
  choose(null);
  redraw();
}

/** Show the first part in which computations have room for their labels, or all. */
function fit() {
  const shown = visible();
  shown.forEach((plot) => (plot.width = plot.canvas.clientWidth));
  const parts = shown.map((plot) => (inner(plot) * plot.data.shortest) / plot.data.label);
  look(0, Math.min(view.end, ...parts));
  view.fits = true;
}

function zoom(factor, about = (view.from + view.to) / 2) {
  const length = Math.min(Math.max((view.to - view.from) / factor, view.least), view.end);
  const from = about - ((about - view.from) * length) / (view.to - view.from);
  look(from, from + length);
}

const pan = (time) => look(view.from + time, view.to + time);

function walk(plot, key) {
  const at = chosen?.plot === plot && chosen.index !== undefined ? chosen : null;
  let row = at?.row ?? 0, index = at?.index ?? firstFrom(plot.rows[0], view.from);
  if (at && key === "ArrowRight") index++;
  if (at && key === "ArrowLeft") index--;
  if (at && (key === "ArrowUp" || key === "ArrowDown")) {
    row = Math.min(Math.max(row + (key === "ArrowUp" ? -1 : 1), 0), plot.rows.length - 1);
    index = firstFrom(plot.rows[row], opOf(at).start);
  }
  index = Math.min(Math.max(index, 0), plot.rows[row].length - 1);
  const op = plot.rows[row][index];
  if (!op) return;
  if (op.start < view.from) pan(op.start - view.from);
  else if (op.end > view.to) pan(op.end - view.to);
  choose({ plot, row, index }, true);
}

function listen(plot) {
  const { canvas, scroller } = plot;
  let grip = null;
  scroller.addEventListener("scroll", () => {
    const by = scroller.scrollLeft - plot.scrolled;
    plot.scrolled += by;
    if (by) pan(by * timePerPixel(plot));
  });
  canvas.addEventListener("pointermove", (event) => {
    if (grip === null) return choose(under(plot, event));
    pan((grip - event.offsetX) * timePerPixel(plot));
    grip = event.offsetX;
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    grip = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("held");
  });
  const release = () => {
    grip = null;
    canvas.classList.remove("held");
  };
  ["pointerup", "pointercancel"].forEach((type) => canvas.addEventListener(type, release));
  canvas.addEventListener("pointerleave", () => choose(null));
  canvas.addEventListener("blur", () => choose(null));
  canvas.addEventListener("wheel", (event) => {
    const whole = view.to - view.from >= view.end;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return; // the timetable scrolls
    if (event.deltaY > 0 && whole) return; // nothing to zoom out of: the page scrolls
    zoom(1.002 ** -event.deltaY, toTime(plot, event.offsetX));
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const actions = { "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => look(0, view.end),
      Escape: () => choose(null) };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow")) walk(plot, event.key);
    else if (actions[event.key]) actions[event.key]();
    else return;
    event.preventDefault();
  });
}

function start() {
  const all = JSON.parse(document.getElementById("data").textContent);
  const most = all.flatMap((data) => data.peaks);
  document.querySelectorAll("canvas").forEach((canvas, i) => plots.push(read({ ...all[i], most }, canvas)));
  view.end = Math.max(...all.map((data) => data.end)) || 1;
  view.left = Math.ceil(Math.max(...plots.map((plot) => plot.left)));
  view.least = view.end / 1000;
  plots.forEach(listen);
  document.getElementById("in").onclick = () => zoom(1.5);
  document.getElementById("out").onclick = () => zoom(1 / 1.5);
  document.getElementById("all").onclick = () => look(0, view.end);
  new ResizeObserver(() => (view.fits ? fit() : redraw())).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", ({ matches }) => (matches ? look(0, view.end) : fit()));
  fit();
}

start();
