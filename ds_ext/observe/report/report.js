/* The report's own script: a cursor at the same step in all charts, and the picker of the step's timetable. */

const figures = [...document.querySelectorAll("figure[data-curves]")].map((figure) => {
  const { unit, x, curves } = JSON.parse(figure.dataset.curves);
  const svg = figure.querySelector("svg"), output = figure.querySelector("output");
  const line = document.createElementNS(svg.namespaceURI, "path");
  line.setAttribute("class", "cursor");
  svg.append(line);
  return { svg, output, line, unit, x, curves, last: output.textContent };
});

/** The point of a curve at a step, or the one nearest to it. */
function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1;
    else high = middle;
  }
  const before = points[Math.max(low - 1, 0)];
  return step - before[0] < points[low][0] - step ? before : points[low];
}

function pointAt(step) {
  for (const { output, line, unit, x: [low, high, left, right], curves } of figures) {
    const texts = curves.map(([name, points]) => {
      const [at, value] = nearest(points, step);
      const digits = unit === "%" ? { minimumFractionDigits: 1, maximumFractionDigits: 1 } : { maximumSignificantDigits: 4 };
      return `${name}${name && " "}${value.toLocaleString("en", digits)}${unit} at step ${at}`;
    });
    output.textContent = texts.join(", ");
    const at = left + ((nearest(curves[0][1], step)[0] - low) * (right - left)) / (high - low);
    line.setAttribute("d", `M${at} 22V170`);
  }
}

function pointNowhere() {
  for (const { output, line, last } of figures) {
    output.textContent = last;
    line.removeAttribute("d");
  }
}

for (const { svg, x: [low, high, left, right] } of figures) {
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width;
    pointAt(low + ((place - left) * (high - low)) / (right - left));
  });
  svg.addEventListener("pointerleave", pointNowhere);
}

const picker = document.getElementById("step");
if (picker) {
  const turn = (by) => {
    picker.selectedIndex = Math.min(Math.max(picker.selectedIndex + by, 0), picker.options.length - 1);
    show();
  };
  const show = () => {
    choose(null);
    document.querySelectorAll(".step").forEach((part) => (part.hidden = part.dataset.step !== picker.value));
    document.getElementById("before").disabled = picker.selectedIndex === 0;
    document.getElementById("after").disabled = picker.selectedIndex === picker.options.length - 1;
    view.end = Math.max(...visible().map((plot) => plot.data.end));
    fit();
  };
  picker.addEventListener("change", show);
  document.getElementById("before").onclick = () => turn(-1);
  document.getElementById("after").onclick = () => turn(1);
  show();
}
