"""The curves of one or several runs as one figure: loss, accuracy, learning rate, gradient norm, throughput.

It reads config.toml, metrics.jsonl and events.jsonl of a run directory, during the run or after it. Not here:
checkpoints, and anything that changes a run directory. The same input gives the same bytes, so that a figure
can be kept under version control. matplotlib is imported only when a figure is drawn.
"""

import contextlib
import io
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gru_ref import config as configuration
from gru_ref.config import Config
from gru_ref.errors import RunDirectoryError, UsageError
from gru_ref.types import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS = ("loss", "bpb", "lr", "grad_norm", "tokens_per_second", "skipped")
EVALUATION = ("loss", "bpb", "top1", "top5")

# Okabe and Ito's colours, told apart with any colour vision; their yellow is too pale for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
INK, FAINT, GRID = "#333333", "#767676", "#E6E6E6"

WIDTH = 8.0  # inches: 576 pt, the 768 pixels of a README page
LEFT, RIGHT = 0.065, 0.935  # the panels' edges, as shares of the width
# What makes an SVG differ between two equal runs is its date and the random ids of its parts.
METADATA: dict[str, dict[str, str | None]] = {
    "svg": {"Creator": "gru-ref", "Date": None},
    "png": {"Software": "gru-ref"},
    "pdf": {"Creator": "gru-ref", "Producer": "gru-ref", "CreationDate": None},
}
STYLE = {
    "svg.hashsalt": "gru-ref",
    "svg.fonttype": "path",
    "font.size": 8.0,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": FAINT,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.xmargin": 0.0,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


@dataclass(frozen=True)
class RunCurves:
    """What a run directory has recorded so far. A value that was not recorded is NaN."""

    path: Path
    config: Config
    parameters: int | None  # of the model, where events.jsonl tells
    metrics: dict[str, Array]  # 'step' and METRICS: (R,) float64 each, one row a step, steps ascending
    evaluations: dict[str, Array]  # 'step' and EVALUATION: (N,) float64 each, steps ascending
    resumes: Array  # (K,) float64, the steps from which the run was resumed


def load_run(path: str | Path) -> RunCurves:
    """The curves of the run directory at `path`; a torn last line of a file is left out.

    Where a step was recorded twice, as after a resume, the last record counts. Raises RunDirectoryError where
    there is no run, no step yet, or a damaged file, and ConfigError where config.toml cannot be understood.
    """
    path = Path(os.path.abspath(path))
    if not (path / "config.toml").is_file():
        raise RunDirectoryError(
            f"{path}: no run here (no config.toml); give a directory that train --out wrote"
        )
    metrics = _table(path / "metrics.jsonl", _rows(path / "metrics.jsonl"), METRICS)
    if not np.isfinite(metrics["loss"]).any():
        raise RunDirectoryError(f"{path}: metrics.jsonl has no finished step yet; wait for the first one")
    events = _rows(path / "events.jsonl")
    kinds = {kind: [row for row in events if row.get("event") == kind] for kind in ("evaluation", "resume")}
    evaluations = _table(path / "events.jsonl", kinds["evaluation"], EVALUATION)
    # beyond the last step lie only those of a part that was lost before a resume
    reached = evaluations["step"] <= metrics["step"][-1]
    counts = [row["parameters"] for row in events if isinstance(row.get("parameters"), int)]
    return RunCurves(
        path=path,
        config=configuration.load(file=path / "config.toml"),
        parameters=counts[-1] if counts else None,
        metrics=metrics,
        evaluations={key: column[reached] for key, column in evaluations.items()},
        resumes=_table(path / "events.jsonl", kinds["resume"], ())["step"],
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a torn last line is left out, a file that is missing has none."""
    try:
        lines = path.read_bytes().rstrip().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot read it: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise RunDirectoryError(
                f"{path}: line {number} is not a JSON object; the file is damaged, mend it"
            )
    return rows


def _table(path: Path, rows: list[dict[str, Any]], keys: Sequence[str]) -> dict[str, Array]:
    """Columns 'step' and `keys` of the rows, ascending in the step; of rows with the same step the last."""
    columns = {}
    for key in ("step", *keys):
        values = [math.nan if row.get(key) is None else row[key] for row in rows]
        if not all(type(value) in (int, float) for value in values):
            raise RunDirectoryError(
                f"{path}: '{key}' is not a number in every line; the file is damaged, mend it"
            )
        columns[key] = np.array(values, np.float64)
    if np.isnan(columns["step"]).any():
        raise RunDirectoryError(f"{path}: 'step' is missing in a line; the file is damaged, mend it")
    _, from_the_end = np.unique(columns["step"][::-1], return_index=True)
    last = len(rows) - 1 - from_the_end
    return {key: column[last] for key, column in columns.items()}


def smooth(values: Array) -> Array:
    """Exponential moving average, corrected for its start: (R,) → (R,).

        s_t = β s_{t−1} + (1−β) v_t        smoothed_t = s_t / (1−β^t)        β = 1 − 1/window

    The window is 0.5 % of the run, and at least 2.5 steps (β = 0.6). A NaN is passed over, not counted in t.
    """
    beta = 1 - 1 / max(2.5, len(values) / 200)
    out = np.full(len(values), np.nan)
    total = weight = 0.0
    for i, value in enumerate(values):
        if math.isfinite(value):
            total = beta * total + (1 - beta) * value
            weight = beta * weight + (1 - beta)  # = 1 − β^t
        if weight:
            out[i] = total / weight
    return out


def draw(runs: Sequence[RunCurves], output: str | Path, *, title: str | None = None) -> None:
    """Draw the runs over each other and write the figure as SVG, PNG or PDF, by the suffix of `output`.

    A file that is already there is replaced once the new one is complete. Raises UsageError for another
    suffix, for no or too many runs, without matplotlib, and where the file cannot be written.
    """
    output = Path(output)
    kind = output.suffix.lower().removeprefix(".")
    if kind not in METADATA:
        raise UsageError(f"{output}: cannot draw '{output.suffix}'; name a .svg, .png or .pdf file")
    if not 1 <= len(runs) <= len(COLOURS):
        raise UsageError(f"{len(runs)} runs given; one figure holds 1 to {len(COLOURS)}")
    try:
        import matplotlib.style
    except ImportError:
        raise UsageError("drawing needs matplotlib; pip install 'gru-ref[report]'") from None
    buffer = io.BytesIO()
    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        # a run may be named in a script that the font lacks; a box in its place is no reason to complain
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        _figure(runs, title).savefig(buffer, format=kind, dpi=200, metadata=METADATA[kind])
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(buffer.getvalue())
        os.replace(temporary, output)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UsageError(f"{output}: cannot write the figure: {error.strerror}") from None


def _figure(runs: Sequence[RunCurves], title: str | None) -> "Figure":
    """Header, a wide panel for the loss, and four small ones below it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    header = 0.15 + 0.3 * bool(title) + 0.4 * len(runs)
    height = header + 6.6
    figure = Figure(figsize=(WIDTH, height))
    grid = figure.add_gridspec(
        3,
        2,
        height_ratios=(2.2, 1, 1),
        left=LEFT,
        right=RIGHT,
        bottom=0.42 / height,
        top=1 - (header + 0.3) / height,
        hspace=0.36,
        wspace=0.16,
    )
    loss, accuracy, rate, norm, speed = (
        figure.add_subplot(place) for place in (grid[0, :], grid[1, 0], grid[1, 1], grid[2, 0], grid[2, 1])
    )
    _header(figure, runs, title, height)
    _draw_loss(loss, runs)
    _draw_accuracy(accuracy, runs)
    _draw_learning_rate(rate, runs)
    _draw_gradient_norm(norm, runs)
    _draw_throughput(speed, runs)
    end = max(1.0, *(run.metrics["step"][-1] for run in runs))
    for axes in (loss, accuracy, rate, norm, speed):
        axes.set_xlim(0, end)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=(1, 2, 2.5, 5, 10)))
    for axes in (norm, speed):
        axes.set_xlabel("step")
    return figure


def _header(figure: "Figure", runs: Sequence[RunCurves], title: str | None, height: float) -> None:
    """The title; then for each run its colour, name and final figures, and under them its settings."""
    from matplotlib.lines import Line2D

    y = height - 0.15
    if title:
        figure.text(LEFT, y / height, _printable(title), size=12, weight="bold", va="top")
        y -= 0.3
    for run, name, colour in zip(runs, _names(runs), COLOURS, strict=False):
        line = [(y - 0.065) / height] * 2
        figure.add_artist(Line2D([LEFT, LEFT + 0.03], line, color=colour, linewidth=2.5))
        figure.text(LEFT + 0.04, y / height, name, size=9.5, weight="bold", va="top")
        figure.text(RIGHT, y / height, _results(run), size=8.5, va="top", ha="right")
        figure.text(LEFT + 0.04, (y - 0.18) / height, _settings(run), size=7.2, color=FAINT, va="top")
        y -= 0.4


def _names(runs: Sequence[RunCurves]) -> list[str]:
    """Directory names, with the parent's where two are the same."""
    names = [run.path.name for run in runs]
    unique = [
        name if names.count(name) == 1 else f"{run.path.parent.name}/{name}"
        for name, run in zip(names, runs, strict=True)
    ]
    return [_printable(name if len(name) <= 36 else name[:17] + "…" + name[-18:]) for name in unique]


def _printable(text: str) -> str:
    """Undecodable bytes and control characters as question marks."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _settings(run: RunCurves) -> str:
    model, train, schedule = run.config.model, run.config.train, run.config.schedule
    accumulated = f" × {train.accumulation}" if train.accumulation > 1 else ""
    end = "" if schedule.name == "constant" else f" → {schedule.min_lr:g}"
    done = run.metrics["step"][np.isfinite(run.metrics["loss"])][-1]
    parts = [
        f"{model.kind} {model.layers} × {model.hidden}",
        f"batch {train.batch_size}{accumulated} × {train.seq_len} tokens",
        run.config.optimizer.name,
        f"{schedule.name} {schedule.lr:g}{end}",
        run.config.run.precision,
        f"{done:,.0f} steps",
    ]
    if run.parameters is not None:
        millions = run.parameters / 1e6
        parts[0] += f", {millions:.1f} M parameters" if millions >= 1 else f", {run.parameters:,} parameters"
    if run.metrics["skipped"][-1] > 0:
        parts.append(f"{run.metrics['skipped'][-1]:.0f} skipped")
    return " · ".join(parts)


def _results(run: RunCurves) -> str:
    """The last figures: training loss (smoothed), validation loss, bits per byte of the latter if any."""
    parts = [f"train {smooth(run.metrics['loss'])[-1]:.3f}"]
    bpb = smooth(run.metrics["bpb"])
    losses = run.evaluations["loss"]
    if np.isfinite(losses).any():
        parts.append(f"validation {losses[np.isfinite(losses)][-1]:.3f}")
        bpb = run.evaluations["bpb"]
    if np.isfinite(bpb).any():
        parts.append(f"{bpb[np.isfinite(bpb)][-1]:.3f} bits per byte")
    return " · ".join(parts)


def _line(axes: "Axes", x: Array, y: Array, **style: Any) -> None:
    """A line through the known values; a long one through the lowest and highest of each of 300 spans.

    At this width that looks the same, and a run of any length makes a small file.
    """
    keep = np.flatnonzero(np.isfinite(y))
    if len(keep) > 600:
        ends = [(span[y[span].argmin()], span[y[span].argmax()]) for span in np.array_split(keep, 300)]
        keep = np.unique([*np.ravel(ends), keep[0], keep[-1]])
    axes.plot(x[keep], y[keep], marker="." if len(keep) == 1 else None, **style)


def _every_step(axes: "Axes", run: RunCurves, key: str, colour: str) -> None:
    """Each step thin and pale, and above those of all runs the smoothed curve."""
    steps, values = run.metrics["step"], run.metrics[key]
    _line(axes, steps, values, color=colour, linewidth=0.5, alpha=0.3, zorder=1.5)
    _line(axes, steps, smooth(values), color=colour, linewidth=1.4)


def _points(axes: "Axes", x: Array, y: Array, colour: str, face: str) -> None:
    """Measurements as dots, joined."""
    axes.plot(x, y, color=colour, linewidth=0.8, linestyle="--")
    axes.plot(x, y, "o", color=face, markeredgecolor=colour, markersize=3.5, clip_on=False, zorder=3)


def _draw_loss(axes: "Axes", runs: Sequence[RunCurves]) -> None:
    from matplotlib.lines import Line2D

    axes.set_title("loss, nats per token")
    for run, colour in zip(runs, COLOURS, strict=False):
        steps = run.metrics["step"]
        _every_step(axes, run, "loss", colour)
        _points(axes, run.evaluations["step"], run.evaluations["loss"], colour, face=colour)
        resumed = run.resumes[(steps[0] <= run.resumes) & (run.resumes <= steps[-1])]
        heights = np.interp(resumed, steps, smooth(run.metrics["loss"]))
        axes.plot(resumed, heights, "D", color="white", markeredgecolor=colour, markersize=5, zorder=4)
    _log_scale(axes)
    if all(_tokens_are_bytes(run) for run in runs):
        bits = axes.secondary_yaxis(
            "right", functions=(partial(mul, 1 / math.log(2)), partial(mul, math.log(2)))
        )
        _plain_ticks(bits.yaxis, *(limit / math.log(2) for limit in axes.get_ylim()))
        axes.set_title("bits per byte", loc="right")
    keys = [
        Line2D([], [], color=FAINT, linewidth=0.6, alpha=0.5, label="training, every step"),
        Line2D([], [], color=FAINT, linewidth=1.4, label="training, smoothed"),
        Line2D(
            [], [], color=FAINT, linewidth=0.8, linestyle="--", marker="o", markersize=4, label="validation"
        ),
    ]
    if any(run.resumes.size for run in runs):
        keys.append(Line2D([], [], color=FAINT, linewidth=0, marker="D", mfc="white", label="resumed"))
    axes.legend(handles=keys, loc="upper right", frameon=False, labelcolor=FAINT)


def _tokens_are_bytes(run: RunCurves) -> bool:
    """Whether loss / ln 2 is the bits per byte, so that one curve has both scales."""
    loss, bpb = run.metrics["loss"], run.metrics["bpb"]
    known = np.isfinite(loss) & np.isfinite(bpb)
    return bool(known.any()) and np.allclose(loss[known] / math.log(2), bpb[known], rtol=5e-3)


def _draw_accuracy(axes: "Axes", runs: Sequence[RunCurves]) -> None:
    axes.set_title("validation top-1 ● and top-5 ○, %")
    axes.set_ylim(0, 100)
    for run, colour in zip(runs, COLOURS, strict=False):
        steps = run.evaluations["step"]
        _points(axes, steps, 100 * run.evaluations["top5"], colour, face="white")
        _points(axes, steps, 100 * run.evaluations["top1"], colour, face=colour)
    if not any(np.isfinite(run.evaluations["top1"]).any() for run in runs):
        axes.text(0.5, 0.5, "no evaluation yet", transform=axes.transAxes, ha="center", color=FAINT)


def _draw_learning_rate(axes: "Axes", runs: Sequence[RunCurves]) -> None:
    """In units of a power of ten, which the title names: no offset in a corner."""
    peak = max(float(np.nan_to_num(run.metrics["lr"]).max()) for run in runs)
    exponent = math.floor(math.log10(peak)) if peak > 0 else 0
    axes.set_title(f"learning rate, ×10{str(exponent).translate(SUPERSCRIPT)}")
    for run, colour in zip(runs, COLOURS, strict=False):
        _line(axes, run.metrics["step"], run.metrics["lr"] / 10.0**exponent, color=colour, linewidth=1.4)
    axes.set_ylim(bottom=0)


def _draw_gradient_norm(axes: "Axes", runs: Sequence[RunCurves]) -> None:
    """The clip norm that only one of several runs has is drawn in its colour."""
    axes.set_title("gradient norm before clipping")
    clips: dict[float, str] = {}
    for run, colour in zip(runs, COLOURS, strict=False):
        _every_step(axes, run, "grad_norm", colour)
        clip = run.config.train.clip_norm
        clips[clip] = INK if clip in clips or len(runs) == 1 else colour
    for clip, colour in clips.items():
        if clip:
            axes.axhline(clip, color=colour, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
            at = ("axes fraction", "data")
            axes.annotate(f"clip {clip:g}", (1, clip), (-3, 2), at, "offset points", ha="right", color=colour)
    _log_scale(axes)


def _draw_throughput(axes: "Axes", runs: Sequence[RunCurves]) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_title("tokens per second")
    for run, colour in zip(runs, COLOURS, strict=False):
        _every_step(axes, run, "tokens_per_second", colour)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _log_scale(axes: "Axes") -> None:
    axes.set_yscale("log", nonpositive="mask")
    _plain_ticks(axes.yaxis, *axes.get_ylim())


def _plain_ticks(axis: Any, low: float, high: float) -> None:
    """Ticks at round numbers, written plainly: a decade or less needs more of them than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis.set_major_locator(
        MaxNLocator(8, steps=(1, 2, 2.5, 5, 10)) if high / low < 8 else LogLocator(subs=(1, 2, 5))
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
