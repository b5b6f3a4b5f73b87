"""The HTML page and the SVG picture, without a browser; tests/browser opens the page in one."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Op, Timetable, get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.draw.page import Mark, html, svg
from ds_ext.pipe_schedules.draw.svg import (
    BELOW,
    DARK,
    DRAWN,
    KINDS,
    LIGHT,
    TONES,
    Theme,
    axis_title,
    nice_step,
    paints,
)
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.ports import Collective
from ds_ext.pipe_schedules.simulation import Simulation, simulate
from tests.colors import contrast, luminance

SVG = "{http://www.w3.org/2000/svg}"
SPLIT = Timetable("split", linear(1), 1, ((Op("F", 0, 0), Op("I", 0, 0), Op("W", 0, 0)),))


def data_of(page: str) -> list[dict]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def numbers_of(text: str) -> Iterator[int]:
    """Yield the numbers of a text to the base 30, with digits from ``=``, or ``]`` for the last digit."""
    number = 0
    for sign in text:
        number = number * 30 + (ord(sign) - 61) % 32
        if sign >= "]":
            yield number
            number = 0


def spans_of(plot: dict) -> list[list[tuple[Op, float, float]]]:
    """Return the spans that page.js computes from the data."""
    rows = []
    for text in plot["rows"]:
        row, time, last = [], 0.0, {kind: (0, 0, 0) for kind in DRAWN}
        for word in (plot["words"][number] for number in numbers_of(text)):
            if not isinstance(word, list):
                time += word
                continue
            number, stages, micro_batches, duration, *slices = word
            assert len(slices) == ("slices" in plot)
            kind = DRAWN[number]
            stage, m, j = last[kind]
            stage, m, j = last[kind] = (stage + stages, m + micro_batches, j + sum(slices))
            row.append((Op(kind, m, stage, j), time, time + duration))
            time += duration
        rows.append(row)
    return rows


def assert_has_everything(plot: dict, simulation: Simulation) -> None:
    assert [[op for op, _, _ in row] for row in spans_of(plot)] == list(
        map(list, simulation.timetable.orders)
    )
    for drawn, spans in zip(spans_of(plot), simulation.spans, strict=True):
        for (_, start, end), (_, wanted_start, wanted_end) in zip(drawn, spans, strict=True):
            assert (start, end) == pytest.approx((wanted_start, wanted_end), rel=1e-6, abs=1e-12)


TIMES = st.floats(1e-6, 1e6)


@given(
    st.sampled_from(["1f1b", "interleaved", "bitpipe", "zb_h1"]),
    st.builds(Costs, TIMES, TIMES, TIMES, TIMES, jitter=st.sampled_from([0.0, 0.5])),
)
def test_the_page_has_every_computation_with_its_times(name: str, costs: Costs) -> None:
    simulation = simulate(timetable(name, 4, 8), costs)
    (plot,) = data_of(html([simulation]))
    assert_has_everything(plot, simulation)
    assert plot["pipe"] == [simulation.timetable.pipe(m) for m in range(8)]


LARGEST = [(name, {}) for name in sorted(SCHEDULES)] + [
    ("interleaved", {"chunks": 8}),
    ("bitpipe_zb", {"waves": 4}),
    ("bitpipe", {"mode": "greedy"}),
]


@pytest.mark.parametrize(("name", "options"), LARGEST, ids=str)
def test_the_page_is_small(name: str, options: dict[str, object]) -> None:
    simulation = simulate(timetable(name, 8, 32, **options))
    page = html([simulation])
    assert len(page.encode()) <= 60_000
    assert_has_everything(data_of(page)[0], simulation)


@pytest.mark.parametrize("name", ["interleaved", "bitpipe_zb"])
def test_the_page_is_small_at_costs_that_are_no_round_numbers(name: str) -> None:
    costs = Costs(1, 1.234567, 0.87654321, 0.0123456)
    options = {"chunks": 8} if name == "interleaved" else {"waves": 4}
    made = timetable(name, 8, 32, **options)
    assert len(html([simulate(made, costs)]).encode()) <= 60_000


@pytest.mark.parametrize(("name", "slices"), [("1f1b", 4), ("zb_v", 3), ("bitpipe_zb", 12)])
def test_slices_have_shades(name: str, slices: int) -> None:
    """The page and the picture have a color for every slice, or for every few of many."""
    simulation = simulate(get_schedule(name).timetable(4, 8, slices=slices))
    page, picture = html([simulation]), svg(simulation)
    (plot,) = data_of(page)
    assert_has_everything(plot, simulation)
    count = plot["shades"]
    assert (plot["slices"], count) == (slices, min(slices, 8))
    drawn = boxes(simulation)
    for op in (op for order in simulation.timetable.orders for op in order):
        pipe, shade = simulation.timetable.pipe(op.micro_batch), op.slice * count // slices
        assert drawn[str(op)].attrib["class"] == f"{op.kind}{pipe}-{shade}-{count}"
        assert f"slice {op.slice}," in str(drawn[str(op)][0].text)
    for theme in (LIGHT, DARK):
        for color_class, color in paints(theme, {count}):
            assert f"--{color_class}:{color}" in page
            assert f".{color_class}{{fill:{color}}}" in picture
    assert f"slices 0 to {slices - 1}" in page and f"slices 0 to {slices - 1}" in picture


@pytest.mark.parametrize(("micro_batches", "written"), [(8, 8), (64, 4)])
def test_the_label_of_a_slice_is_written_where_it_fits(micro_batches: int, written: int) -> None:
    """All ops have room for their label, unless the picture has its largest width: ``3.2`` then needs a backward."""
    simulation = simulate(get_schedule("1f1b").timetable(4, micro_batches, slices=4))
    texts = ElementTree.fromstring(svg(simulation)).iter(f"{SVG}text")
    labels = Counter(text.text for text in texts if text.get("class") in ("text c", "inverse c"))
    assert (labels["3"], labels["3.2"]) == (8, written)


def test_the_page_has_the_table_of_a_comparison() -> None:
    page = html([simulate(timetable("1f1b", 2, 2))], [("schedule", "memory"), ("<mine>", "3 GB")], ["a & b"])
    found = re.search(r"<table>.*</table>\n(.*)", page, re.DOTALL)
    assert found
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in found[0].split("<tr>")[1:]]
    assert rows == [["schedule", "memory"], ["&lt;mine&gt;", "3 GB"]]
    assert found[1].startswith("<p>a &amp; b</p>")
    assert "<table>" not in html([simulate(timetable("1f1b", 2, 2))])


@pytest.mark.parametrize("costs", [Costs(0, 0, 0), Costs(0, 0, 0, 1)], ids=["nothing", "messages"])
def test_pictures_of_computations_that_take_no_time(costs: Costs) -> None:
    simulation = simulate(timetable("bitpipe", 2, 2), costs)
    (plot,) = data_of(html([simulation]))
    assert_has_everything(plot, simulation)
    assert len(boxes(simulation)) == 16
    assert {box.attrib["width"] for box in boxes(simulation).values()} == {"0"}


def test_the_page_needs_nothing_else() -> None:
    page = html([simulate(timetable("bitpipe", 4, 8))])
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(|\bsrc=", page)
    assert re.findall(r"<link [^>]*>", page) == ['<link rel="icon" href="data:,">']


def test_the_page_says_what_it_costs() -> None:
    simulations = [simulate(timetable(name, 4, 4)) for name in ("1f1b", "bitpipe")]
    page = html(simulations)
    assert "<title>1f1b, bitpipe</title>" in page
    for simulation in simulations:
        peaks = " ".join(f"{peak:g}" for peak in simulation.peak_activations)
        assert f"<dt>makespan</dt><dd>{simulation.makespan:g}</dd>" in page
        assert f"<dt>bubble</dt><dd>{simulation.bubble:.1%}</dd>" in page
        assert f"<dt>peak activations</dt><dd>{peaks}</dd>" in page
    assert page.count("<canvas ") == 2
    assert "<dt>peak activations</dt><dd>1 to 20</dd>" in html([simulate(timetable("1f1b", 20, 40))])


def test_the_legend_has_what_occurs() -> None:
    def legend(*made: Timetable) -> str:
        found = re.search(r'<ul class="legend".*?</ul>', html([simulate(m) for m in made]))
        assert found
        return re.sub(r"<[^>]*>", " ", found[0])

    assert legend(timetable("1f1b", 2, 2)).split() == ["forward", "backward", "waiting"]
    assert "input gradient" in legend(SPLIT) and "backward" not in legend(SPLIT)
    both = legend(timetable("bitpipe", 2, 2), SPLIT)
    assert "pipe 0" in both and "pipe 1" in both and "later stage" in both and "weight gradient" in both


def test_names_from_files_are_text() -> None:
    name = "</script><b>&\"'"
    simulation = simulate(Timetable(name, linear(1), 1, ((Op("F", 0, 0),),)))
    assert "<b>&" not in html([simulation])
    heading = ElementTree.fromstring(svg(simulation)).find(f".//{SVG}text[@class='name']")
    assert heading is not None and heading.text == name


def test_a_page_of_nothing_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"1 .*got 0"):
        html([])


def boxes(simulation: Simulation) -> dict[str, ElementTree.Element]:
    """Return the box of every op in the picture."""
    found = {}
    for box in ElementTree.fromstring(svg(simulation)).iter(f"{SVG}rect"):
        tip = box.find(f"{SVG}title")
        if tip is not None:
            assert tip.text
            found[tip.text.split(":")[0]] = box
    return found


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "bitpipe"])
def test_the_picture_is_to_scale(name: str) -> None:
    simulation = simulate(timetable(name, 4, 8), Costs(1, 1.2, 0.8, 0.1))
    drawn = boxes(simulation)
    assert len(drawn) == sum(map(len, simulation.timetable.orders))
    left = float(drawn["F0@0"].attrib["x"])
    op, start, _ = max((span for spans in simulation.spans for span in spans), key=lambda span: span[1])
    scale = (float(drawn[str(op)].attrib["x"]) - left) / start
    tops = set()
    for spans in simulation.spans:
        (top,) = {drawn[str(op)].attrib["y"] for op, _, _ in spans}
        tops.add(top)
        for op, start, end in spans:
            box = drawn[str(op)].attrib
            assert float(box["x"]) == pytest.approx(left + start * scale, abs=0.02)
            assert float(box["width"]) == pytest.approx((end - start) * scale - 1, abs=0.02)
            assert box["class"] == f"{op.kind}{simulation.timetable.pipe(op.micro_batch)}"
    assert len(tops) == 4


def test_pictures_have_collectives() -> None:
    """Below their row, to scale, after the makespan too."""
    plain = simulate(timetable("1f1b", 2, 2))
    rows = ((Collective("gather@0"), 0.0, 3.0),), ((Collective("reduce"), 9.0, 11.0),)
    simulation = replace(plain, collectives=rows)
    (plot,) = data_of(html([simulation], marks=[[[], [Mark(1.0, 2.0, "waits", data=True)]]]))
    assert plot["marks"] == [
        [[0, 3, True, "gather@0"]],
        [[1, 2, False, "waits", 1], [9, 11, True, "reduce"]],
    ]
    assert plot["end"] == 11
    drawn = boxes(simulation)
    left, one = (float(drawn[name].attrib["x"]) for name in ("F0@0", "F0@1"))
    assert float(drawn["reduce"].attrib["x"]) == pytest.approx(left - 0.5 + 9 * (one - left), abs=0.02)
    assert BELOW in svg(simulation) and BELOW in html([simulation])
    assert BELOW not in svg(plain) and BELOW not in html([plain])


def test_marks_and_peaks_have_names_and_units() -> None:
    simulation = simulate(timetable("bitpipe", 4, 4))
    texts = [element.text for element in ElementTree.fromstring(svg(simulation)).iter(f"{SVG}text")]
    assert {"ideal 12", "makespan 14", "peak activations", "of 1/4 model"} <= set(texts)
    texts = [
        element.text for element in ElementTree.fromstring(svg(simulation, unit="ms")).iter(f"{SVG}text")
    ]
    assert {"ideal 12 ms", "makespan 14 ms"} <= set(texts)
    (plot,) = data_of(html([simulation], unit="ms"))
    assert (plot["unit"], plot["peak_unit"]) == (" ms", "of 1/4 model")
    (plot,) = data_of(html([simulate(timetable("gpipe", 1, 1))]))
    assert (plot["unit"], plot["peak_unit"]) == ("", "of the model")


def test_the_axis_is_in_forwards() -> None:
    made = timetable("bitpipe", 4, 4)
    assert axis_title(simulate(made)) == "time, in forwards of 1/4 of the model"
    assert axis_title(simulate(made, Costs(forward=2.5))) == "time (a forward of 1/4 of the model takes 2.5)"
    assert axis_title(simulate(timetable("gpipe", 1, 1))) == "time, in forwards of the model"


@given(st.floats(1e-6, 1e9))
def test_ticks_are_at_round_numbers(least: float) -> None:
    step = nice_step(least)
    assert least <= step * (1 + 1e-9) and step <= least * 2.5 * (1 + 1e-9)
    assert f"{step:.0e}"[0] in "125" and step == pytest.approx(float(f"{step:.0e}"))


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colors_can_be_read_and_told_apart(theme: Theme) -> None:
    """WCAG contrast of text at least 4.5, and the kinds differ in lightness alone, for every pipe."""
    for colors in theme.kinds:
        for kind, fill in zip(KINDS, colors, strict=True):
            assert contrast(getattr(theme, TONES[kind]), fill) >= 4.5, fill
        assert all(contrast(a, b) >= 1.35 for a, b in itertools.combinations(colors, 2)), colors
        assert theme is LIGHT or contrast(colors[0], theme.paper) >= 3, colors
    assert contrast(theme.muted, theme.paper) >= 4.5


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_shades_can_be_read_and_told_apart(theme: Theme, count: int) -> None:
    """Shades are in the order of the slices, and those of a kind are apart from those of the others."""
    colors = dict(paints(theme, {count}))
    for pipe in range(len(theme.kinds)):
        ranges = []
        for kind in KINDS:
            fills = [colors[f"{kind}{pipe}-{shade}-{count}"] for shade in range(count)]
            assert all(contrast(getattr(theme, TONES[kind]), x) >= 4.5 for x in fills)
            levels = [luminance(fill) for fill in fills]
            assert levels == sorted(levels, reverse=theme is LIGHT)
            assert len(set(levels)) == count and contrast(fills[0], fills[-1]) >= 1.2
            ranges.append((min(levels), max(levels)))
        assert all(above[0] > below[1] for below, above in itertools.pairwise(sorted(ranges)))
