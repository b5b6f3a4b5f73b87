"use strict";
const KINDS = "FBIWR";
const WORDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", R: "repeated forward" };
const RIGHT = 118, TOP = 38, BOTTOM = 42;
const FONT = getComputedStyle(document.body).fontFamily;
const plots = [];
// Times: at the edges, the last, the shortest range. Pixels left of the rows. Whether fit() chose the edges.
const view = { from: 0, to: 1, end: 1, least: 0.01, left: 0, fits: true };
const tip = document.getElementById("tip");
const said = document.getElementById("said");
let chosen = null; // {plot, row, index} of the computation under the pointer or the cursor keys; or {plot, row, mark}
let queued = false;

const short = (x) => String(Number(x.toPrecision(6)));
const range = (n) => [...Array(n).keys()];

/** Numbers from text: to the base 30 with digits from "=", the last digit of each from "]". */
function* unpack(text) {
  let number = 0;
  for (let i = 0; i < text.length; i++) {
    const digit = text.charCodeAt(i) - 61, last = digit >= 32;
    number = number * 30 + (last ? digit - 32 : digit);
    if (!last) continue;
    yield number;
    number = 0;
  }
}

/**
 * The ops of a device from its text, the numbers of its words. A word is the time of a wait, or an op: kind,
 * how many stages and micro-batches it is from the last one of that kind, its time, and how many slices it is from it
 * if there are any.
 */
function* computations(text, words) {
  const last = [...KINDS].map(() => ({ stage: 0, m: 0, slice: 0 }));
  let time = 0;
  for (const number of unpack(text)) {
    const word = words[number];
    if (typeof word === "number") {
      time += word;
      continue;
    }
    const [kind, stages, microBatches, duration, slices = 0] = word;
    const stage = (last[kind].stage += stages), m = (last[kind].m += microBatches);
    const slice = (last[kind].slice += slices);
    yield { kind: KINDS[kind], m, stage, slice, start: time, end: (time += duration) };
  }
}

/** A plot per canvas. */
function read(data, canvas) {
  const stages = data.pipes[0].length;
  const visits = data.pipes.map((devices) => {
    const seen = {};
    return devices.map((device) => (seen[device] = (seen[device] ?? -1) + 1));
  });
  const visitsOf = visits.map((counts) => Math.max(1, ...counts));
  const rows = data.rows.map((text) => Array.from(computations(text, data.words), (op) => {
    const pipe = data.pipe[op.m];
    const shade = data.slices ? `-${Math.floor((op.slice * data.shades) / data.slices)}-${data.shades}` : "";
    return { ...op, pipe, paint: op.kind + (pipe % 4) + shade, head: op.stage >= stages, visit: (visits[pipe][op.stage] ?? 0) / visitsOf[pipe] };
  }));
  const held = data.rows.map((_, device) => (data.forward.includes(device) ? [data.forward] : data.pipes).map((devices) =>
    range(stages).filter((stage) => devices[stage] === device).join(" ")).join(" · "))
    .map((stages) => (stages.length > 16 ? "" : `stage${/\d\D+\d/.test(stages) ? "s" : ""} ${stages}`));
  const names = data.names ?? data.rows.map((_, device) => `device ${device}`);
  const height = rows.length <= 8 ? 30 : rows.length <= 16 ? 24 : rows.length <= 32 ? 17 : 14;
  canvas.style.height = `${TOP + rows.length * height + BOTTOM}px`;
  const marks = (data.marks ?? []).map((row) => row.map(([start, end, below, text, load]) => ({ start, end, below, text, load })));
  const scroller = canvas.closest(".scroll"), pen = canvas.getContext("2d");
  pen.font = `11px ${FONT}`;
  const left = 16 + Math.max(...[...names, ...(height >= 30 ? held : [])].map((text) => pen.measureText(text).width));
  return { data, canvas, scroller, rows, marks, held, names, height, pen, left, width: 0, scrolled: 0 };
}

const visible = () => plots.filter((plot) => plot.canvas.offsetParent);
const inner = (plot) => Math.max(plot.width - view.left - RIGHT, 50);
const timePerPixel = (plot) => (view.to - view.from) / inner(plot);
const toX = (plot, time) => view.left + (time - view.from) / timePerPixel(plot);
const toTime = (plot, x) => view.from + (x - view.left) * timePerPixel(plot);
const part = (op) => op.m + (op.slice ? `.${op.slice}` : "");
const name = (op) => `${op.kind}${part(op)}@${op.stage}`;
const label = (op) => part(op) + (op.head ? "h" : op.kind === "R" ? "*" : "");
const opOf = (at) => at.plot.rows[at.row][at.index];

function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    const style = getComputedStyle(document.documentElement);
    const color = (key) => style.getPropertyValue(`--${key}`).trim();
    visible().forEach((plot) => draw(plot, color));
    document.getElementById("zoom").textContent = `${Number((view.end / (view.to - view.from)).toPrecision(2))}×`;
  });
}

function draw(plot, color) {
  const { canvas, pen, rows, height, data } = plot;
  const ratio = window.devicePixelRatio || 1;
  plot.width = canvas.clientWidth;
  canvas.width = Math.round(plot.width * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  moveBar(plot);
  const write = (text, x, y, align, key) => {
    pen.font = `11px ${FONT}`;
    pen.textAlign = align;
    pen.fillStyle = color(key);
    pen.fillText(text, x, y);
  };
  pen.textBaseline = "middle";
  drawMargins(plot, write, color);
  drawAxis(plot, write, color);
  pen.save();
  pen.beginPath();
  pen.rect(view.left, 0, inner(plot), TOP + rows.length * height + 5);
  pen.clip();
  const wait = pen.createPattern(hatch(color("hatch"), ratio), "repeat");
  wait.setTransform(new DOMMatrix().scale(1 / ratio));
  const left = toX(plot, 0), right = toX(plot, data.end);
  pen.fillStyle = wait;
  range(rows.length).forEach((r) => pen.fillRect(left, TOP + r * height + 2, right - left, height - 4));
  rows.forEach((ops, r) => drawRow(plot, ops, TOP + r * height, color));
  plot.marks.forEach((marks, r) => drawMarksOf(plot, marks, TOP + (r + 1) * height, color));
  if (chosen?.index !== undefined) drawChosen(plot, color);
  pen.restore();
  drawMarks(plot, write, color);
}

/** Scroll the bar below a timetable to the part that is shown. */
function moveBar(plot) {
  const { canvas, scroller } = plot, place = view.from / timePerPixel(plot);
  canvas.parentElement.style.width = `calc(100% + ${view.end / timePerPixel(plot) - inner(plot)}px)`;
  if (Math.abs(scroller.scrollLeft - place) > 1) scroller.scrollLeft = place;
  plot.scrolled = scroller.scrollLeft;
}

function hatch(color, ratio) {
  const tile = document.createElement("canvas"), size = Math.round(6 * ratio);
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.strokeStyle = color;
  pen.lineWidth = ratio;
  [-size, 0, size].forEach((dx) => {
    pen.moveTo(dx - 1, size + 1);
    pen.lineTo(dx + size + 1, -1);
  });
  pen.stroke();
  return tile;
}

function drawMargins(plot, write, color) {
  const { pen, rows, held, names, height, data, width } = plot;
  const most = Math.max(...data.most, 1e-9);
  write("peak activations", width - 4, TOP - 25, "right", "muted");
  write(data.peak_unit, width - 4, TOP - 11, "right", "muted");
  rows.forEach((_, r) => {
    const y = TOP + r * height + height / 2;
    const two = height >= 30 && held[r];
    write(names[r], view.left - 12, two ? y - 6 : y, "right", "ink");
    if (two) write(held[r], view.left - 12, y + 7, "right", "muted");
    pen.fillStyle = color("bar");
    pen.fillRect(width - RIGHT + 22, y - 4, (40 * data.peaks[r]) / most, 8);
    write(String(Number(data.peaks[r].toPrecision(3))), width - 4, y, "right", "ink");
  });
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find((factor) => power * factor >= least * 0.999) ?? 10);
}

function drawAxis(plot, write, color) {
  const { pen, rows, height, data } = plot;
  const bottom = TOP + rows.length * height;
  const step = niceStep(56 * timePerPixel(plot));
  pen.lineWidth = 1;
  for (let i = Math.ceil(view.from / step - 1e-9); i * step <= view.to * (1 + 1e-9); i++) {
    const x = Math.round(toX(plot, i * step)) + 0.5;
    pen.strokeStyle = color("line");
    pen.beginPath();
    pen.moveTo(x, TOP);
    pen.lineTo(x, bottom + 5);
    pen.stroke();
    write(short(i * step), x, bottom + 13, "center", "muted");
  }
  write(data.axis, view.left + inner(plot) / 2, bottom + 32, "center", "muted");
}

function drawRow(plot, ops, y, color) {
  const { pen, height } = plot;
  const fills = {}, tones = { F: color("text"), W: color("weight"), R: color("text"), B: color("inverse"), I: color("inverse") };
  const paper = color("paper");
  let drawnTo = -Infinity;
  for (let i = firstFrom(ops, view.from); i < ops.length && ops[i].start < view.to; i++) {
    const op = ops[i], x = toX(plot, op.start), end = toX(plot, op.end), width = end - x;
    if (end - drawnTo < 0.5) continue; // less than a pixel beyond what is there: nobody would see it
    drawnTo = end;
    const faint = chosen?.index !== undefined && opOf(chosen).m !== op.m;
    if (faint) {
      pen.fillStyle = paper; // hides the pattern of waiting
      pen.fillRect(x, y + 2, width, height - 4);
      pen.globalAlpha = 0.22;
    }
    pen.fillStyle = fills[op.paint] ??= color(op.paint);
    const gap = width > 8 ? 0.5 : width > 3 ? 0.3 : 0;
    if (width > 6) {
      pen.beginPath();
      pen.roundRect(x + gap, y + 2, width - 2 * gap, height - 4, 2.5);
      pen.fill();
    } else pen.fillRect(x + gap, y + 2, Math.max(width - 2 * gap, 0.5), height - 4);
    if (op.visit > 0 && width > 13 && height >= 17) {
      pen.globalAlpha *= 0.45;
      pen.fillStyle = tones[op.kind];
      pen.fillRect(x + 3, y + height - 6, (width - 6) * op.visit, 2);
      pen.globalAlpha = faint ? 0.22 : 1;
    }
    // The longest label has room, or none is written.
    const size = [12, 11].find((s) => width * 1.001 >= (plot.data.label * s) / 11 && height >= s + 3);
    if (size) {
      pen.font = `${size}px ${FONT}`;
      pen.textAlign = "center";
      pen.fillStyle = tones[op.kind];
      pen.fillText(label(op), x + width / 2, y + height / 2 + 0.5);
    }
    pen.globalAlpha = 1;
  }
}

/** What goes on below the computations of a row, and the wait that is pointed at. */
function drawMarksOf(plot, marks, bottom, color) {
  const { pen, height } = plot;
  pen.strokeStyle = color("ink");
  for (const mark of marks) {
    pen.fillStyle = color(mark.load ? "bar" : "ink");
    const x = toX(plot, mark.start), width = Math.max(toX(plot, mark.end) - x, 0.5);
    if (mark.load) pen.fillRect(x, bottom - height + 2, width, height - 4);
    if (mark.below) pen.fillRect(x, bottom - 1.5, width, 3);
    else if (mark === chosen?.mark) pen.strokeRect(x, bottom - height + 2.5, width, height - 5);
  }
}

/** Lines at the ideal and at the end: what lies between them is the bubble. */
function drawMarks(plot, write, color) {
  const { pen, rows, height, data } = plot;
  const line = (time, dash, label, align, dx, y) => {
    if (time < view.from || time > view.to * (1 + 1e-9)) return;
    const x = Math.round(toX(plot, time)) + 0.5;
    pen.strokeStyle = color("muted");
    pen.beginPath();
    pen.moveTo(x, y - 6);
    pen.lineTo(x, TOP - 5);
    pen.stroke();
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(x, TOP - 5);
    pen.lineTo(x, TOP + rows.length * height + 5);
    pen.stroke();
    pen.setLineDash([]);
    write(label, x + dx, y, align, "muted");
  };
  const text = (time) => (data.unit ? `${Number(time.toPrecision(4))}${data.unit}` : short(time));
  line(data.makespan, [], `makespan ${text(data.makespan)}`, "right", -4, TOP - 25);
  line(data.ideal, [3, 3], `ideal ${text(data.ideal)}`, "right", -4, TOP - 11);
}

/** The path of the chosen slice of a micro-batch through the devices, and a frame around the chosen op. */
function drawChosen(plot, color) {
  const { pen, rows, height } = plot, followed = part(opOf(chosen));
  const way = [];
  rows.forEach((ops, r) => ops.forEach((op) => {
    if (part(op) === followed && op.kind !== "W") way.push({ op, y: TOP + r * height + height / 2 });
  }));
  way.sort((a, b) => a.op.start - b.op.start || a.op.end - b.op.end);
  pen.strokeStyle = color("ink");
  pen.globalAlpha = 0.55;
  pen.beginPath();
  way.forEach(({ op, y }, i) => {
    if (i) pen.lineTo(toX(plot, op.start), y);
    pen.moveTo(toX(plot, op.end), y);
  });
  pen.stroke();
  pen.globalAlpha = 1;
  if (chosen.plot !== plot) return;
  const op = opOf(chosen), x = toX(plot, op.start);
  pen.lineWidth = 2;
  pen.beginPath();
  pen.roundRect(x, TOP + chosen.row * height + 1, toX(plot, op.end) - x, height - 2, 3);
  pen.stroke();
  pen.lineWidth = 1;
}

/** Index of the first op that ends after ``time``. */
function firstFrom(ops, time) {
  let low = 0, high = ops.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ops[middle].end > time) high = middle;
    else low = middle + 1;
  }
  return low;
}
