"""report.html: one file that loads nothing, escapes everything, survives odd numbers and fits narrow screens."""

import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazytrain.account import Account
from lazytrain.lanes import Span
from lazytrain.planning import Planned
from lazytrain.recipes import pictures
from lazytrain.recipes.charts import HEIGHT, WIDTH, Series, join_bars, line_chart, log_ticks, short, smooth, thin, ticks
from lazytrain.recipes.outcome import Tier
from lazytrain.recipes.report import RunReport, format_report, write_report
from lazytrain.recipes.rows import Row
from lazytrain.recipes.scoring import score
from lazytrain.solver.costs import problem_from_shapes
from lazytrain.solver.hardware import load_hardware
from lazytrain.solver.models import load_shapes
from lazytrain.solver.planning import Result
from lazytrain.solver.simulator import simulate
from lazytrain.standard_plans import streaming_plan

EVIL = "<script>alert(1)</script> \" ' & </pre></style> \u202e back \ud800"
VOID = {"meta", "br", "link", "img", "input"}
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium") or shutil.which("google-chrome")
NUM_STEPS = 40


@pytest.fixture(scope="module")
def report() -> RunReport:
    name, shapes = load_shapes("qwen2.5-7b")
    hardware = load_hardware("rtx3090")
    problem = problem_from_shapes(shapes, hardware, batch=8, seq=1024, microbatch=8, allow_nvme=True, name=name)
    plan = streaming_plan(len(problem.blocks))
    simulated = simulate(problem, replace(plan, num_microbatches=problem.num_microbatches))
    plan = replace(plan, num_microbatches=problem.num_microbatches).with_prediction(simulated.predicted)
    account = Account(1000.0, 300.0, 500.0, 50.0, 10.0, 5.0, 60.0, 40.0, 20.0, 0.0, 15.0)
    rows = [
        {
            "step": i,
            "loss": 2.0 / (i + 1),
            "step_s": 1.0,
            "tokens_per_s": 900.0 + i,
            "padded_tokens_per_s": 1000.0 + i,
            "model_tflops": 30.0,
            "last_account": account._asdict() if i else None,
            "skipped": i == 3,
        }
        for i in range(NUM_STEPS)
    ]
    problems = [Row(f"{EVIL} {i}", "so The answer is: 7", "evil <b>", "") for i in range(6)]
    texts = [f"{EVIL} The answer is: {n}" for n in (7, 7, 8, 9)] + ["", "x" * 9000]
    return RunReport(
        name=EVIL,
        rows=rows,
        planned=Planned(plan, problem, Result(plan=plan, code="feasible", message="", statistics={})),
        timeline=simulated.timeline,
        spans=[Span("forward", "block <0>", "compute", 0.0, 400.0), Span("load", "block 1", "h2d", 5.0, 90.0)],
        measured_ms=1000.0,
        tiers=[Tier("device", 2**34, 2**34 + 5, 2**35), Tier("host", 2**30, None, 2**36)],
        scores={"before": score(problems, texts), "after": score(problems, texts)},
    )


class Page(HTMLParser):
    """Collects tags, attributes and texts; checks that every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_loads_and_runs_nothing(report: RunReport) -> None:
    page = Page(format_report(report))
    assert {"script", "link", "img", "iframe", "object", "b", "form"} & set(page.tags) <= {"b"}
    assert {name for name, _ in page.attributes} & {"src", "href", "xlink:href", "srcset", "action"} == set()
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "url(" not in format_report(report)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_texts_of_others_are_shown_as_they_are(report: RunReport, tmp_path: Path) -> None:
    text = format_report(report)
    assert "<script>" not in text
    assert "evil <b>" not in text
    page = Page(text)
    assert page.text.count(EVIL) >= 4
    assert "block <0>" in page.text
    assert "9,000 characters" in page.text
    write_report(tmp_path / "report.html", report)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert b"\xed" not in (tmp_path / "report.html").read_bytes(), "a lone surrogate is no UTF-8"


def test_every_section_is_there(report: RunReport) -> None:
    text = Page(format_report(report)).text
    for phrase in (
        *("Loss", "Throughput", "30 model TFLOP/s", "Where a step's time went", "bound by"),
        *("Predicted: ", "Measured: 400.0 ms in the traced step, 1000.0 ms in the median step of the largest shape"),
        *("Memory against the plan", "not counted", "16.00 GiB"),
        *("blocks 0-27", "before training", "Correct: 2 of 2", "Wrong: 2 of 2", "No answer: 2 of 2", "not finite: 1."),
    ):
        assert phrase in text, phrase


def test_a_run_that_took_no_step_tells_no_time_of_one(
    report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Page(format_report(replace(report, spans=()))).text
    assert "No step was traced, 1000.0 ms in the median step of the largest shape" in text
    assert "in the traced step" not in text
    titles: list[str] = []
    monkeypatch.setattr(pictures, "draw_timeline", lambda axes, bars, title, begin_ms, end_ms: titles.append(title))
    pictures.draw_step(tmp_path / "a.png", report.timeline, (), predicted_ms=400.0, measured_ms=1000.0)
    assert titles[1] == "No step was traced (measured: 1000.0 ms)"


def test_timelines_fill_their_width_whatever_the_median_step_took(report: RunReport) -> None:
    longest = max(span.end_ms for span in (*report.timeline, *report.spans))
    for measured_ms in (1.0, 100 * longest):
        text = format_report(replace(report, measured_ms=measured_ms))
        bars = re.findall(r'<rect class="f-\w+" x="([0-9.]+)" width="([0-9.]+)"', text)
        assert math.isclose(max(float(x) + float(width) for x, width in bars), WIDTH, rel_tol=0.01)


def test_the_account_adds_up_to_the_whole_bar(report: RunReport) -> None:
    bar = re.search(r'<svg class="shares".*?</svg>', format_report(report), re.DOTALL)
    assert bar is not None
    widths = [float(width) for width in re.findall(r'width="([0-9.]+)"', bar[0])]
    assert math.isclose(sum(widths), WIDTH, abs_tol=0.1)


@pytest.mark.parametrize("losses", [[], [float("nan")], [1.0], [2.0, float("inf"), 2.0], [0.0, 0.0]])
def test_odd_losses_make_a_page(losses: list[float], report: RunReport) -> None:
    rows = [{"step": i, "loss": loss, "tokens_per_s": 0.0} for i, loss in enumerate(losses)]
    text = format_report(replace(report, rows=rows, spans=[], measured_ms=None, scores={}))
    Page(text)
    assert not re.search(r'points="[^"]*(nan|inf)', text)


def test_a_long_timeline_stays_small() -> None:
    spans = [Span("forward", f"block {i}", "compute", i * 0.01, i * 0.01 + 0.009) for i in range(20_000)]
    (bar,) = join_bars(spans, 200.0)
    assert (bar.start_ms, round(bar.end_ms, 3)) == (0.0, 199.999)
    assert len(bar.title) < 200
    apart = [Span("forward", "a", "compute", 0, 10), Span("backward", "a", "compute", 10, 20)]
    assert [bar.style for bar in join_bars([*apart, Span("forward", "b", "compute", 30, 40)], 100.0)] == [
        "forward",
        "backward",
        "forward",
    ]


@given(
    st.one_of(
        st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
        st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=50),
    ),
    st.booleans(),
)
def test_points_stay_inside_the_chart(values: list[float], by_ratio: bool) -> None:
    chart = line_chart("y", [Series("y", "main", list(enumerate(values)))], x_label="x", by_ratio=by_ratio)
    places = re.search(r'points="([^"]*)"', chart)[1].split()
    assert len(places) == len(values)
    for place in places:
        x, y = map(float, place.split(","))
        assert -0.1 <= x <= WIDTH + 0.1
        assert -0.1 <= y <= HEIGHT + 0.1


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.booleans())
def test_ticks_are_few_round_and_cover(low: float, size: float, whole: bool) -> None:
    high = low + size
    values, (first, last) = ticks(low, high, whole=whole)
    assert len(values) <= 8
    assert values == sorted(set(values))
    assert first <= low + 1e-6 * (abs(low) + size)
    assert last >= high - 1e-6 * (abs(high) + size)


@given(st.floats(1e-9, 1e6), st.floats(20.1, 1e12))
def test_log_ticks_are_few_and_inside(low: float, factor: float) -> None:
    values, ends = log_ticks(low, low * factor)
    assert ends == (low, low * factor)
    assert 1 <= len(values) <= 12
    assert values == sorted(set(values))
    assert all(low <= value <= low * factor for value in values)


def test_thinning_and_smoothing_keep_the_mean() -> None:
    points = [(float(i), float(i % 7)) for i in range(5000)]
    thinned = thin(points, 500)
    assert len(thinned) == 500
    assert math.isclose(sum(y for _, y in thinned) / 500, sum(y for _, y in points) / 5000)
    assert [y for _, y in smooth([(0, 1.0), (1, 6.0), (2, 5.0), (3, 1.0)], 2)] == [1.0, 4.0, 4.0, 1.0]
    assert [short(v) for v in (0.05, 35, 1234, 2.5e6)] == ["0.05", "35", "1.23k", "2.5M"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs headless Chromium: apt-get install chromium-headless-shell")
@pytest.mark.parametrize("width", [360, 768, 1280, 2560])
def test_no_part_is_wider_than_the_screen(width: int, report: RunReport, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", report)
    frame = f'<iframe id="f" src="report.html" style="width:{width}px;height:900px;border:0"></iframe>'
    script = (
        "onload = () => { const d = document.getElementById('f').contentDocument;"
        "d.querySelectorAll('details').forEach(e => e.open = true);"
        "const small = [...d.querySelectorAll('svg')].filter(e => e.getBoundingClientRect().width < 100).length;"
        "document.title = [d.documentElement.scrollWidth, small, d.querySelectorAll('svg').length].join() }"
    )
    (tmp_path / "frame.html").write_text(f"<body style='margin:0'>{frame}<script>{script}</script></body>")
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"--window-size={width + 40},1000"),
        (tmp_path / "frame.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    title = re.search(r"<title>(\d+),(\d+),(\d+)</title>", done.stdout)
    assert title is not None, done.stdout[-500:]
    scroll_width, num_small, num_charts = map(int, title.groups())
    assert width - 15 <= scroll_width <= width, "15 px is a scroll bar"
    assert num_small == 0
    assert num_charts >= 6
