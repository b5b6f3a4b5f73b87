"""The HTML page in a real browser: it draws, answers the mouse and the keys, and writes no errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ds_ext.cli.schedule_verbs import comparison
from ds_ext.pipe_schedules import Op, Timetable, get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.draw.page import html
from ds_ext.pipe_schedules.draw.svg import DARK, KINDS, LIGHT, WORDS, Theme, paints
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.simulation import Simulation, simulate
from ds_ext.planner.named_models import MODELS
from ds_ext.planner.training_sizes import TrainingSizes

from .window import Window, browser, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

BITPIPE = simulate(timetable("bitpipe", 4, 8))
COMPARED = [simulate(timetable(name, 4, 8)) for name in ("1f1b", "interleaved")] + [BITPIPE]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def show(window: Window, tmp_path: Path) -> Iterator[Show]:
    """Opens pages; afterwards there must be nothing in the console."""
    opened = Show(window, tmp_path / "page.html")
    yield opened
    assert window.console() == []


class Show:
    """A page in the window."""

    def __init__(self, window: Window, path: Path) -> None:
        self.window, self.path = window, path

    def __call__(
        self, *simulations: Simulation, table: Sequence[Sequence[str]] = (), notes: Sequence[str] = ()
    ) -> None:
        self.path.write_text(html(simulations, table, notes), "utf-8")
        self.window.prefer(prefers_color_scheme="light")
        self.window.move(1, 1)
        self.window.open(self.path)
        self.frame()

    def frame(self) -> None:
        """Wait until what was asked for is on the screen."""
        self.window.run(
            "return new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)))"
        )

    def at(self, time: float, rank: int, plot: int = 0) -> tuple[float, float]:
        """Where in the window a time on a rank is drawn."""
        x, y = self.window.run(
            "const p = plots[arguments[0]], box = p.canvas.getBoundingClientRect();"
            "return [box.left + toX(p, arguments[1]), box.top + TOP + (arguments[2] + 0.5) * p.height]",
            plot, time, rank,
        )  # fmt: skip
        return x, y

    def point(self, time: float, rank: int, plot: int = 0) -> None:
        self.window.move(*self.at(time, rank, plot))
        self.frame()

    def colors(self, points: list[tuple[float, int]], plot: int = 0) -> list[str]:
        """The colours drawn at (time, rank), near the upper edge of the row, where no number is."""
        return self.window.run(
            "const p = plots[arguments[0]], k = devicePixelRatio, { width, height } = p.canvas;"
            "const data = p.pen.getImageData(0, 0, width, height).data;"
            "return arguments[1].map(([time, rank]) => {"
            "  const x = Math.floor(toX(p, time) * k), y = Math.floor((TOP + rank * p.height + 5) * k);"
            "  const i = (y * width + x) * 4, bytes = [...data.slice(i, i + 3)];"
            "  return '#' + bytes.map((byte) => byte.toString(16).padStart(2, '0')).join('');"
            "});",
            plot, points,
        )  # fmt: skip

    def tip(self) -> list[str] | None:
        text: str | None = self.window.run(
            "const tip = document.getElementById('tip');"
            "return tip.checkVisibility() ? tip.innerText.trim() : null"
        )
        return None if text is None else text.splitlines()

    def view(self) -> tuple[float, float]:
        start, end = self.window.run("return [view.from, view.to]")
        return start, end

    def zoom(self) -> str:
        text: str = self.window.run("return document.getElementById('zoom').textContent")
        return text

    def press(self, button: str) -> None:
        self.window.run(f"document.getElementById({button!r}).click()")
        self.frame()


def words(simulation: Simulation, rank: int, index: int) -> list[str]:
    """What the page has to say about a computation."""
    op, start, end = simulation.spans[rank][index]
    return [
        str(op),
        f"{WORDS[op.kind]} of micro-batch {op.micro_batch} at stage {op.stage}",
        f"pipe {simulation.timetable.pipe(op.micro_batch)}, device {rank}",
        f"start {start:g}, end {end:g}, duration {end - start:g}",
    ]


def paint(op: Op, made: Timetable, theme: Theme = LIGHT) -> str:
    return theme.kinds[made.pipe(op.micro_batch)][KINDS.index(op.kind)]


def test_every_computation_is_where_and_what_it_should_be(show: Show) -> None:
    """The colours too: the picture is read back from the screen."""
    show(*COMPARED)
    for plot, simulation in enumerate(COMPARED):
        spans = [(rank, *span) for rank, spans in enumerate(simulation.spans) for span in spans]
        seen = show.colors([((start + end) / 2, rank) for rank, _, start, end in spans], plot)
        assert seen == [paint(op, simulation.timetable) for _, op, _, _ in spans]


@pytest.mark.parametrize(
    ("name", "options", "costs"),
    [
        ("interleaved", {"chunks": 8}, Costs()),
        ("bitpipe_zb", {"waves": 4}, Costs(1, 1.2, 0.8)),
        ("zb_v", {}, Costs(comm=0.1, jitter=0.3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("slices", [1, 3])
def test_what_is_packed_is_unpacked(
    show: Show, name: str, options: dict[str, object], costs: Costs, slices: int
) -> None:
    simulation = simulate(get_schedule(name).timetable(8, 32, options, costs, slices), costs)
    show(simulation)
    rows = show.window.run("return plots[0].rows.map((ops) => ops.map((op) => [name(op), op.start, op.end]))")
    for seen, spans in zip(rows, simulation.spans, strict=True):
        assert [op for op, _, _ in seen] == [str(op) for op, _, _ in spans]
        times = [time for _, start, end in spans for time in (start, end)]
        assert [time for _, start, end in seen for time in (start, end)] == pytest.approx(times, rel=1e-7)


SIZES = TrainingSizes(**asdict(MODELS["gpt-1.3b"]))


def test_the_table_of_a_comparison_is_shown(show: Show) -> None:
    show(*COMPARED, table=comparison(COMPARED, SIZES), notes=["chunks: interleaved only"])
    text = show.window.run("return document.querySelector('table').innerText")
    assert [line.split("\t") for line in text.splitlines()] == [
        list(row) for row in comparison(COMPARED, SIZES)
    ]
    assert show.window.run("return document.querySelector('main > p').innerText").startswith("chunks:")


def test_pointing_tells_op_start_and_end(show: Show) -> None:
    show(BITPIPE)
    assert show.tip() is None
    for rank, index in ((0, 0), (1, 9), (2, 17), (3, -1)):
        _, start, end = BITPIPE.spans[rank][index]
        show.point((start + end) / 2, rank)
        assert show.tip() == words(BITPIPE, rank, index)
    show.window.move(1, 1)
    assert show.tip() is None


@pytest.mark.parametrize(("scheme", "theme"), [("light", LIGHT), ("dark", DARK)], ids=["light", "dark"])
def test_slices_are_drawn_and_followed(show: Show, scheme: str, theme: Theme) -> None:
    simulation = simulate(get_schedule("zb_v").timetable(4, 4, slices=4))
    show(simulation)
    spans = [(rank, *span) for rank, spans in enumerate(simulation.spans) for span in spans]
    points = [((start + end) / 2, rank) for rank, _, start, end in spans]
    show.press("all")
    show.window.prefer(prefers_color_scheme=scheme)
    show.frame()
    colors = dict(paints(theme, {4}))
    assert show.colors(points) == [colors[f"{op.kind}0-{op.slice}-4"] for _, op, _, _ in spans]
    rank, op, start, end = next(span for span in spans if span[1].slice == 2)
    show.point((start + end) / 2, rank)
    tip = show.tip()
    assert tip is not None and tip[0] == str(op) and f"slice 2 of micro-batch {op.micro_batch}" in tip[1]
    assert show.window.run("return plots[0].rows[0].map(label)") == [
        f"{op.micro_batch}.{op.slice}".removesuffix(".0") for op in simulation.timetable.orders[0]
    ]


def test_pointing_at_waiting_time_says_nothing(show: Show) -> None:
    show(COMPARED[0])
    show.point(7, 0)
    assert show.tip() is None


def test_all_of_the_same_micro_batch_stands_out(show: Show) -> None:
    show(*COMPARED)
    op, start, end = BITPIPE.spans[0][0]
    show.point((start + end) / 2, 0, plot=2)
    for plot, simulation in enumerate(COMPARED):
        spans = [(rank, *span) for rank, spans in enumerate(simulation.spans) for span in spans]
        # Not in the middle: lines lead from the end of a computation to the start of the micro-batch's next.
        seen = show.colors([(start * 0.7 + end * 0.3, rank) for rank, _, start, end in spans], plot)
        bright = {other for color, (_, other, _, _) in zip(seen, spans, strict=True)
                  if color == paint(other, simulation.timetable)}  # fmt: skip
        assert bright == {other for _, other, _, _ in spans if other.micro_batch == op.micro_batch}


def test_the_wheel_zooms_about_the_mouse_and_back(show: Show) -> None:
    show(*COMPARED)
    whole = (0, COMPARED[0].makespan)
    assert show.view() == whole and show.zoom() == "1×"
    before = show.at(10, 1)
    show.window.wheel(*before, delta=-400)
    show.frame()
    start, end = show.view()
    assert (end - start) * 2 < whole[1] and start < 10 < end
    assert show.at(10, 1)[0] == pytest.approx(before[0], abs=1)
    assert show.zoom() == "2.2×"
    show.window.wheel(*before, delta=2000)
    assert show.view() == whole


def test_buttons_zoom_and_dragging_moves(show: Show) -> None:
    show(BITPIPE)
    show.press("in")
    assert show.zoom() == "1.5×"
    start, end = show.view()
    x, y = show.at((start + end) / 2, 2)
    time_a_pixel = (end - start) / (show.at(end, 0)[0] - show.at(start, 0)[0])
    show.window.drag(x, y, -100)
    assert show.view()[0] == pytest.approx(start + 100 * time_a_pixel, rel=0.02)
    show.window.drag(x, y, 600)
    assert show.view()[0] == 0
    show.press("out")
    assert show.view() == (0, BITPIPE.makespan)
    for _ in range(3):
        show.press("in")
    show.press("all")
    assert show.view() == (0, BITPIPE.makespan)


def test_the_keys_walk_and_say_where_they_are(show: Show) -> None:
    show(BITPIPE)
    show.window.keys("\ue004", "\ue004", "\ue004", "\ue004")  # tab: three buttons, then the timetable
    right, down, escape = "\ue014", "\ue015", "\ue00c"
    show.window.keys(right, right)
    assert show.tip() == words(BITPIPE, 0, 1)
    show.window.keys(down)
    index = next(i for i, (_, _, end) in enumerate(BITPIPE.spans[1]) if end > BITPIPE.spans[0][1][1])
    assert show.tip() == words(BITPIPE, 1, index)
    said: str = show.window.run("return document.querySelector('[aria-live]').textContent")
    assert said == "; ".join(words(BITPIPE, 1, index)).replace("; ", ": ", 1)
    show.window.keys("+")
    show.frame()
    assert show.zoom() == "1.5×"
    show.window.keys(escape)
    assert show.tip() is None


def test_a_screenshot_in_light_and_dark(show: Show) -> None:
    """More than a twentieth of the window has a colour of a computation, and the rest the colour of the theme."""
    count = """
      const image = new Image(), wanted = arguments[1];
      image.src = "data:image/png;base64," + arguments[0];
      return image.decode().then(() => {
        const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
        const pen = canvas.getContext("2d"), counts = {};
        pen.drawImage(image, 0, 0);
        const data = pen.getImageData(0, 0, image.width, image.height).data;
        for (let i = 0; i < data.length; i += 4) {
          const color = "#" + [0, 1, 2].map((c) => data[i + c].toString(16).padStart(2, "0")).join("");
          if (wanted.includes(color)) counts[color] = (counts[color] ?? 0) + 1;
        }
        return wanted.map((color) => (counts[color] ?? 0) / (image.width * image.height));
      });"""
    show(BITPIPE)
    for scheme, theme in (("light", LIGHT), ("dark", DARK)):
        show.window.prefer(prefers_color_scheme=scheme)
        show.frame()
        painted = [theme.kinds[pipe][KINDS.index(kind)] for pipe in (0, 1) for kind in "FB"]
        paper, *shares = show.window.run(count, show.window.screenshot(), [theme.paper, *painted])
        assert paper > 0.5
        assert all(share > 0.005 for share in shares), shares
        assert sum(shares) > 0.05


def many() -> list[Any]:
    split = Timetable('<split> & "quotes"', linear(1), 1, ((Op("F", 0, 0), Op("I", 0, 0), Op("W", 0, 0)),))
    return [
        pytest.param(timetable("gpipe", 1, 1), id="one computation a kind"),
        pytest.param(split, id="split backwards and a name that needs escaping"),
        pytest.param(timetable("1f1b", 64, 128), id="64 ranks"),
    ]


@pytest.mark.parametrize("made", many())
def test_odd_sizes_draw_without_errors(show: Show, made: Timetable) -> None:
    show(simulate(made))
    assert show.window.run("return document.querySelector('h2').firstChild.data") == made.schedule
    for rank, spans in enumerate(made.orders[:1]):
        assert show.window.run("return plots[0].rows[arguments[0]].map(name)", rank) == list(map(str, spans))
