"""`gru-ref plot`: what is read from a run directory, what is drawn of it, and what is refused."""

import json
import math
import os
import subprocess
import sys

import matplotlib.style
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gru_ref import cli
from gru_ref.config import load, to_toml
from gru_ref.errors import ConfigError, RunDirectoryError, UsageError
from gru_ref.report import curves
from gru_ref.report.curves import draw, load_run, smooth


def row(step, loss, **others):
    """A line of metrics.jsonl as the trainer writes it, of a byte tokenizer."""
    known = {
        "step": step,
        "loss": loss,
        "bpb": None if loss is None else loss / math.log(2),
        "lr": 1e-3,
        "grad_norm": None if loss is None else 2.0,
        "tokens": 2048 * step,
        "tokens_per_second": 30_000.0,
        "seconds": 0.07,
        "epoch": 0,
        "skipped": 0,
    }
    return known | others


def evaluation(step, loss):
    bpb = loss / math.log(2)
    return {"event": "evaluation", "step": step, "loss": loss, "bpb": bpb, "top1": 0.4, "top5": 0.7}


METRICS = [row(step, 4.6 / math.sqrt(step)) for step in range(1, 11)]
EVENTS = [
    {"event": "start", "parameters": 264_420},
    evaluation(0, 4.6),
    {"event": "checkpoint", "step": 5, "path": "x"},
    evaluation(5, 2.1),
    {"event": "resume", "step": 5},
    evaluation(10, 1.5),
]


def write_run(path, metrics=METRICS, events=EVENTS, **options):
    path.mkdir(parents=True)
    (path / "config.toml").write_text(to_toml(load(options=options)), "utf-8")
    for name, rows in (("metrics.jsonl", metrics), ("events.jsonl", events)):
        rows = [{"time": "2025-01-01T00:00:00Z"} | row if "event" in row else row for row in rows]
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def panels(*runs):
    """The panels of the figure: loss, accuracy, learning rate, gradient norm, tokens per second."""
    with matplotlib.style.context(curves.STYLE):
        return curves._figure(runs, None).axes


@pytest.fixture
def plain_figure(monkeypatch):
    """One line instead of the five panels, where a test is about the file and not what is in it."""

    def figure(runs, title):
        plain = Figure(figsize=(2, 1))
        plain.add_artist(Line2D([0, 1], [0, 1], clip_on=True))
        plain.text(0.5, 0.5, "text")
        return plain

    monkeypatch.setattr(curves, "_figure", figure)


def points(axes, **style):
    """The (x, y) pairs of the one line with this style."""
    found = [
        line
        for line in axes.lines
        if all(getattr(line, f"get_{key}")() == value for key, value in style.items())
    ]
    assert len(found) == 1
    return list(zip(*found[0].get_data(), strict=True))


# --- reading ------------------------------------------------------------------------------------------


def test_a_run_is_read_as_columns_over_the_steps(run):
    loaded = load_run(run)
    assert loaded.path == run
    assert loaded.config == load()
    assert loaded.parameters == 264_420
    assert loaded.metrics["step"].tolist() == list(range(1, 11))
    assert loaded.metrics["loss"].tolist() == [row["loss"] for row in METRICS]
    assert loaded.evaluations["step"].tolist() == [0, 5, 10]
    assert loaded.evaluations["loss"].tolist() == [4.6, 2.1, 1.5]
    assert loaded.resumes.tolist() == [5]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\0\0\0", b"\xe6"])
def test_a_torn_last_line_is_left_out(run, name, end):
    whole = load_run(run)
    last = json.dumps(row(11, 1.0)).encode() if name == "metrics.jsonl" else b'{"event": "resume", "step": 6}'
    content = (run / name).read_bytes()
    for length in (1, len(last) // 2, len(last) - 1):
        (run / name).write_bytes(content + last[:length] + end)
        torn = load_run(run)
        np.testing.assert_equal(torn.metrics, whole.metrics)
        np.testing.assert_equal(torn.evaluations, whole.evaluations)
        np.testing.assert_equal(torn.resumes, whole.resumes)


def test_a_last_line_without_its_newline_counts_when_it_is_whole(run):
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row(11, 1.0)))
    assert load_run(run).metrics["step"][-1] == 11


def test_of_two_records_of_a_step_the_last_counts(tmp_path):
    """A skipped step and its second attempt; an evaluation before and after a resume."""
    metrics = [row(1, 4.0), row(2, None, skipped=1), row(2, 3.0, skipped=1), row(3, None, skipped=2)]
    events = [evaluation(2, 9.0), {"event": "resume", "step": 1}, evaluation(1, 5.0), evaluation(2, 3.5)]
    loaded = load_run(write_run(tmp_path / "run", metrics, events))
    assert loaded.metrics["step"].tolist() == [1, 2, 3]
    np.testing.assert_equal(loaded.metrics["loss"], [4.0, 3.0, np.nan])
    assert loaded.evaluations["loss"].tolist() == [5.0, 3.5]


def test_evaluations_of_a_part_lost_before_a_resume_are_left_out(tmp_path):
    events = [evaluation(1, 4.0), evaluation(3, 2.0), {"event": "resume", "step": 1}]
    loaded = load_run(write_run(tmp_path / "run", [row(1, 4.0), row(2, 3.0)], events))
    assert loaded.evaluations["step"].tolist() == [1]


def test_a_run_without_events_has_no_evaluations(run):
    (run / "events.jsonl").unlink()
    loaded = load_run(run)
    assert loaded.evaluations["top1"].shape == (0,)
    assert loaded.parameters is None


@pytest.mark.parametrize("content", ["", '{"step": 1, "lo', json.dumps(row(1, None)) + "\n"])
def test_a_run_without_a_finished_step_is_refused(run, content):
    (run / "metrics.jsonl").write_text(content, "utf-8")
    with pytest.raises(RunDirectoryError, match=f"^{run}: .* no finished step yet; wait"):
        load_run(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for missing in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirectoryError, match=f"^{missing}: no run here"):
            load_run(missing)


def test_a_damaged_configuration_is_refused_and_named(run):
    (run / "config.toml").write_text("[train", "utf-8")
    with pytest.raises(ConfigError, match=f"^{run}/config.toml: not valid TOML"):
        load_run(run)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "lo', "line 1 is not a JSON object"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"step": "1"}', "'step' is not a number"),
        ('{"step": 1, "loss": true}', "'loss' is not a number"),
        ('{"loss": 1}', "'step' is missing"),
    ],
)
def test_damage_before_the_last_line_is_refused_and_named(run, line, message):
    (run / "metrics.jsonl").write_text(line + "\n" + json.dumps(row(2, 1.0)) + "\n", "utf-8")
    with pytest.raises(RunDirectoryError, match=f"^{run}/metrics.jsonl: {message}"):
        load_run(run)


# --- smoothing ----------------------------------------------------------------------------------------


def test_smoothing_is_the_bias_corrected_average_with_beta_0_6():
    """By hand: (.6·.4·1 + .4·2)/(1−.36) = 1.625 and (.6·1.04 + .4·3)/(1−.216)."""
    np.testing.assert_allclose(smooth(np.array([1.0, 2.0, 3.0])), [1.0, 1.625, 1.824 / 0.784], rtol=1e-15)


def test_smoothing_passes_over_what_is_missing():
    values = np.array([np.nan, 1.0, np.nan, 2.0])
    np.testing.assert_allclose(smooth(values), [np.nan, 1.0, 1.0, 1.625], rtol=1e-15)


def test_the_window_is_half_a_percent_of_a_long_run():
    """A step from 0 to 1 in the middle of 2,000 is 1 − .9^n after n steps: the window is 10."""
    smoothed = smooth(np.repeat([0.0, 1.0], 1000))
    np.testing.assert_allclose(smoothed[1000:1005], 1 - 0.9 ** np.arange(1, 6), rtol=1e-12)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_smoothed_curve_stays_within_its_values(values):
    smoothed = smooth(np.array(values))
    assert np.all(smoothed >= min(values) - 1e-9)
    assert np.all(smoothed <= max(values) + 1e-9)
    assert smoothed[0] == pytest.approx(values[0], rel=1e-12)


# --- the figure ---------------------------------------------------------------------------------------


def test_the_panels_hold_the_recorded_values(run):
    loaded = load_run(run)
    loss, accuracy, rate, norm, speed = panels(loaded)
    steps = range(1, 11)
    assert points(loss, alpha=0.3) == [(row["step"], row["loss"]) for row in METRICS]
    assert points(loss, marker="o") == [(0, 4.6), (5, 2.1), (10, 1.5)]
    assert points(loss, marker="D") == [(5, smooth(loaded.metrics["loss"])[4])]
    assert points(accuracy, marker="o", markerfacecolor="white") == [(step, 70.0) for step in (0, 5, 10)]
    assert points(accuracy, marker="o", markerfacecolor=curves.COLOURS[0]) == [
        (step, 40.0) for step in (0, 5, 10)
    ]
    assert points(rate, linewidth=1.4) == [(step, 1.0) for step in steps]
    assert rate.get_title("left") == "learning rate, ×10⁻³"
    assert points(norm, alpha=0.3) == [(step, 2.0) for step in steps]
    assert norm.get_yscale() == "log"
    assert points(speed, alpha=0.3) == [(step, 30_000.0) for step in steps]


def test_the_right_hand_axis_is_bits_per_byte_only_where_a_token_is_a_byte(tmp_path):
    """It is loss / ln 2; with tokens of several bytes, one such run is enough to leave it out."""
    of_bytes = load_run(write_run(tmp_path / "bytes"))
    words = load_run(write_run(tmp_path / "words", [row(1, 10.8, bpb=3.5), row(2, 9.0, bpb=3.0)]))
    unknown = load_run(write_run(tmp_path / "unknown", [row(1, 10.8, bpb=None)]))
    loss = panels(of_bytes)[0]
    (right,) = loss.child_axes
    right.figure.draw_without_rendering()
    np.testing.assert_allclose(right.get_ylim(), np.array(loss.get_ylim()) / math.log(2), rtol=1e-12)
    assert loss.get_title("right") == "bits per byte"
    for runs in ([words], [unknown], [of_bytes, words]):
        assert not panels(*runs)[0].child_axes
        assert panels(*runs)[0].get_title("right") == ""


def test_the_clip_norm_is_a_dashed_line_unless_clipping_is_off(tmp_path):
    off, low, high = (
        load_run(write_run(tmp_path / str(clip), **{"train.clip_norm": clip})) for clip in (0.0, 1.0, 2.5)
    )
    norm = panels(off, low, high)[3]
    dashed = {line.get_ydata()[0]: line.get_color() for line in norm.lines if line.is_dashed()}
    assert dashed == {1.0: curves.COLOURS[1], 2.5: curves.COLOURS[2]}
    assert [text.get_text() for text in norm.texts] == ["clip 1", "clip 2.5"]


def test_the_header_names_each_run_its_settings_and_final_figures(tmp_path):
    first = load_run(write_run(tmp_path / "first", **{"train.accumulation": 2, "optimizer.name": "adamw"}))
    second = load_run(write_run(tmp_path / "second", [row(1, 4.0, skipped=3)], []))
    figure = curves._figure([first, second], "A title")
    assert [text.get_text() for text in figure.texts] == [
        "A title",
        "first",
        f"train {smooth(first.metrics['loss'])[-1]:.3f} · validation 1.500 · 2.164 bits per byte",
        "gru-lm 1 × 192, 264,420 parameters · batch 32 × 2 × 64 tokens · adamw · wsd 0.005 → 0.0005"
        " · fp32 · 10 steps",
        "second",
        "train 4.000 · 5.771 bits per byte",
        "gru-lm 1 × 192 · batch 32 × 64 tokens · nadam · wsd 0.005 → 0.0005 · fp32 · 1 steps · 3 skipped",
    ]


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    runs = [load_run(write_run(tmp_path / parent / "run")) for parent in ("a", "b")]
    other = load_run(write_run(tmp_path / "c" / "other"))
    assert curves._names([*runs, other]) == ["a/run", "b/run", "other"]


def test_a_long_run_keeps_its_extremes_and_makes_a_small_file(tmp_path):
    losses = 2 + 0.1 * np.sin(np.arange(5000) ** 2)
    losses[[777, 3555]] = 9.0, 0.5
    loaded = load_run(write_run(tmp_path / "run", [row(i + 1, loss) for i, loss in enumerate(losses)]))
    drawn = points(panels(loaded)[0], alpha=0.3)
    assert len(drawn) <= 602
    assert {(1, losses[0]), (778, 9.0), (3556, 0.5), (5000, losses[-1])} <= set(drawn)
    assert set(drawn) <= set(enumerate(losses, 1))
    draw([loaded], tmp_path / "long.svg")
    assert (tmp_path / "long.svg").stat().st_size < 300_000


@pytest.mark.parametrize(
    ("metrics", "events"),
    [
        ([row(1, 4.6)], []),
        ([row(1, None), row(2, 4.6, grad_norm=0.0, lr=0.0)], [evaluation(2, 4.0) | {"top1": None}]),
        ([{"step": 1, "loss": 4.6}], [{"event": "evaluation", "step": 0}]),
    ],
)
def test_a_run_with_hardly_any_values_is_drawn(tmp_path, metrics, events):
    loaded = load_run(write_run(tmp_path / "run", metrics, events))
    draw([loaded], tmp_path / "curve.svg")
    assert [text.get_text() for text in panels(loaded)[1].texts] == ["no evaluation yet"]


def test_any_name_of_a_run_is_drawn(tmp_path):
    """L04: spaces, mathematics, scripts that the font lacks, an undecodable byte, control characters."""
    names = ["a b $\\frac$ _", "é日", "\udcff", "tab\tline\n", "n" * 200]
    runs = [load_run(write_run(tmp_path / name)) for name in names]
    draw(runs, tmp_path / "curve.svg", title="".join(names))
    assert curves._names(runs) == ["a b $\\frac$ _", "é日", "?", "tab?line?", "n" * 17 + "…" + "n" * 18]


# --- the file -----------------------------------------------------------------------------------------


def draw_in_two_circumstances(run, first, second, monkeypatch):
    """The second time under another name and date, and with other settings of matplotlib in place."""
    draw([load_run(run)], first)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    with matplotlib.rc_context({"lines.linewidth": 9, "svg.fonttype": "none", "axes.facecolor": "red"}):
        draw([load_run(run)], second)
    return first.read_bytes(), second.read_bytes()


def test_the_same_run_gives_the_same_bytes(tmp_path, run, monkeypatch):
    first, second = draw_in_two_circumstances(run, tmp_path / "1.svg", tmp_path / "2.svg", monkeypatch)
    assert first == second


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("PNG", b"\x89PNG"), ("pdf", b"%PDF")])
@pytest.mark.usefixtures("plain_figure")
def test_every_format_is_the_same_twice(tmp_path, run, monkeypatch, suffix, start):
    files = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
    first, second = draw_in_two_circumstances(run, *files, monkeypatch)
    assert first == second
    assert first.startswith(start)


@pytest.mark.usefixtures("plain_figure")
def test_drawing_replaces_the_figure_and_leaves_nothing_else(tmp_path, run):
    figure = tmp_path / "out" / "curve.svg"
    figure.parent.mkdir()
    figure.write_text("an older figure")
    draw([load_run(run)], figure)
    assert figure.read_text("utf-8").rstrip().endswith("</svg>")
    assert os.listdir(figure.parent) == ["curve.svg"]


@pytest.mark.usefixtures("plain_figure")
def test_a_figure_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, run):
    folder, file = tmp_path / "folder.svg", tmp_path / "file"
    folder.mkdir()
    file.touch()
    before = sorted(os.listdir(tmp_path))
    for output in (folder, file / "curve.svg", tmp_path / "missing" / "curve.svg"):
        with pytest.raises(UsageError, match=f"^{output}: cannot write the figure: "):
            draw([load_run(run)], output)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("name", ["curve.jpg", "curve", ".svg", "curve.svg.gz"])
def test_a_suffix_that_cannot_be_drawn_is_refused(tmp_path, run, name):
    with pytest.raises(UsageError, match=r"name a \.svg, \.png or \.pdf file") as error:
        draw([load_run(run)], tmp_path / name)
    assert error.value.exit_code == 2
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("count", [0, 8])
def test_no_run_or_more_than_there_are_colours_are_refused(tmp_path, run, count):
    with pytest.raises(UsageError, match=f"^{count} runs given; one figure holds 1 to 7"):
        draw([load_run(run)] * count, tmp_path / "curve.svg")


def test_without_matplotlib_the_extra_is_named(tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'gru-ref\[report\]'"):
        draw([load_run(run)], tmp_path / "curve.svg")


# --- the command --------------------------------------------------------------------------------------


def test_the_command_draws_and_prints_one_line(tmp_path, run, capsys, monkeypatch):
    monkeypatch.chdir(run)
    output = tmp_path / "curve.svg"
    assert cli.run(["plot", ".", str(run), "-o", str(output), "--title", "Two of one"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"wrote {output}\n"
    assert captured.err == ""
    assert output.exists()


def test_the_command_ends_with_2_and_one_line_on_a_mistake(tmp_path, run, capsys):
    for arguments in (
        ["plot", str(tmp_path / "missing"), "-o", str(tmp_path / "curve.svg")],
        ["plot", str(run), "-o", str(tmp_path / "curve.jpg")],
        ["plot", str(run)],
        ["plot", "-o", str(tmp_path / "curve.svg")],
    ):
        assert cli.run(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["run"]


def test_matplotlib_is_loaded_when_drawing_and_pyplot_never(tmp_path, run):
    script = (
        "import sys, gru_ref.cli.plot\n"
        "from gru_ref.report.curves import draw, load_run\n"
        f"loaded = load_run({str(run)!r})\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"draw([loaded], {str(tmp_path / 'curve.svg')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
