"""`gru-ref bench`: the benchmarks of gru_ref.bench, each in a process of its own, and their table."""

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from gru_ref.cli._configuration import Positive

if TYPE_CHECKING:
    from gru_ref.bench._settings import Settings


@click.command("bench")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "show_list", is_flag=True, help="Show the benchmarks and leave.")
@click.option("--all", "with_long", is_flag=True, help="Also those that take minutes.")
@click.option(
    "--seconds",
    type=Positive(86_400),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Time for each comparison; at least three rounds are measured.",
)
@click.option("--repeats", type=click.IntRange(1), metavar="N", help="Rounds of each comparison instead.")
@click.option(
    "--threads", type=click.IntRange(1, 4096), metavar="N", help="Of each side; default: 2 where there are."
)
@click.option(
    "--kernels",
    type=click.Choice(["numpy", "numba"]),
    default="numba",
    show_default=True,
    help="Ours: the definitions or their compiled twins.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--markdown", is_flag=True, help="Print everything as Markdown.")
@click.option("--in-this-process", is_flag=True, hidden=True)
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[str, ...],
    show_list: bool,
    with_long: bool,
    seconds: float,
    repeats: int | None,
    threads: int | None,
    kernels: str,
    as_json: bool,
    markdown: bool,
    in_this_process: bool,
) -> None:
    """Measure this machine: training steps, sampling, encoding, the optimizer, start-up.

    Ours and a peer run by turns in the same process, and the ratio is taken round by round. Peers that need
    PyTorch or a compiler are measured where there is one. Without names, all but the long benchmarks run.
    A missed bar is a result: the exit code is 1 only where a measurement failed.
    """
    from gru_ref import bench
    from gru_ref.bench import _machine
    from gru_ref.bench._settings import Settings
    from gru_ref.cli._terminal import signals_end_it
    from gru_ref.errors import UsageError
    from gru_ref.threads import available_cores

    if as_json and markdown:
        raise UsageError("--json and --markdown contradict each other; give one")
    for name in names:
        bench.find(name)
    if show_list:
        _print_list(as_json)
        return
    chosen = names or [name for name in bench.names() if with_long or not bench.is_long(name)]
    settings = Settings(threads or min(2, available_cores()), kernels, seconds, repeats or 0)
    report: dict[str, Any] = {
        "machine": _machine.facts(settings.threads),
        "settings": vars(settings),
        "removed_variables": sorted(set(bench.REMOVED) & os.environ.keys()),
        "benchmarks": {},
        "failed": {},
    }
    show = _print_nothing if as_json else _print_markdown if markdown else _print_plain
    show(report, None)
    for name in chosen:
        if in_this_process:
            with signals_end_it():
                report["benchmarks"][name] = bench.run(name, settings)
        else:
            click.echo(f"gru-ref: measuring {name}: {bench.summary(name)}", err=True)
            _measure(name, settings, report)
        show(report, name)
    if as_json:
        click.echo(json.dumps(report))
    ctx.exit(1 if report["failed"] else 0)


def _print_list(as_json: bool) -> None:
    from gru_ref import bench

    names = bench.names()
    if as_json:
        rows = [{"name": n, "long": bench.is_long(n), "summary": bench.summary(n)} for n in names]
        click.echo(json.dumps(rows))
        return
    for name in names:
        long = "with --all: " if bench.is_long(name) else ""
        click.echo(f"{name:<{max(map(len, names))}}  {long}{bench.summary(name)}")


def _measure(name: str, settings: "Settings", report: dict[str, Any]) -> None:
    """Run a benchmark in a process of its own and add its rows, or why it failed, to the report."""
    from gru_ref import bench

    # -P: the folder that the user happens to stand in is not searched for modules
    command = [sys.executable, "-P", "-m", "gru_ref.cli", "bench", name, "--in-this-process", "--json"]
    command += [f"--threads={settings.threads}", f"--kernels={settings.kernels}"]
    command += [f"--repeats={settings.repeats}"] if settings.repeats else [f"--seconds={settings.seconds}"]
    code, out, err = _run(command, bench.measuring_environment())
    if code == 0:
        report["benchmarks"][name] = json.loads(out)["benchmarks"][name]
        return
    last = (err.splitlines() or [f"ended with exit code {code}"])[-1]
    report["failed"][name] = last.removeprefix("gru-ref: error: ")
    click.echo(f"gru-ref: {name} failed: {report['failed'][name]}", err=True)


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors; what ends this process ends that one, and those that it started."""
    import subprocess

    from gru_ref.cli._terminal import signals_end_it

    with (
        signals_end_it(),
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        try:
            out, err = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
        return process.returncode, out, err


# --- what is shown: first the machine (name None), then a benchmark's rows as soon as they are there --------


def _print_nothing(report: dict[str, Any], name: str | None) -> None:
    """JSON is printed once, at the end."""


def _print_markdown(report: dict[str, Any], name: str | None) -> None:
    if name is None:
        for line in _facts(report):
            click.echo(f"- {line}")
        click.echo("\n| work | measured | median [quartiles] | bar | | seconds a call, and more |")
        click.echo("|---|---|---|---|---|---|")
        return
    for row in report["benchmarks"].get(name, []):
        click.echo(f"| {' | '.join(_cells(row))} |")


def _print_plain(report: dict[str, Any], name: str | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from gru_ref.cli._terminal import console

    if name is None:
        for line in _facts(report):
            click.echo(line)
        return
    table = Table(box=None, pad_edge=False, title=name, title_justify="left", show_header=False)
    for row in report["benchmarks"].get(name, []):
        style = {True: "green", False: "red", None: ""}[row["met"]]
        table.add_row(*(Text(cell, style if i == 4 else "") for i, cell in enumerate(_cells(row))))
    console().print(table)


def _facts(report: dict[str, Any]) -> list[str]:
    m, s = report["machine"], report["settings"]
    versions = ", ".join(f"{name} {m[name] or 'not installed'}" for name in ("numpy", "numba", "torch"))
    length = f"{s['repeats']} rounds" if s["repeats"] else f"{s['seconds']:g} s"
    lines = [
        f"{m['date']}, gru-ref {m['gru_ref']}, kernels {s['kernels']}, {length} a comparison",
        f"{m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['system']}, load {m['load_average']}",
        f"{m['threads']} threads each; BLAS {', '.join(m['blas']) or 'unknown'}",
        f"Python {m['python']}, {versions}",
    ]
    if report["removed_variables"]:
        lines.append(f"set here, removed for the measurement: {', '.join(report['removed_variables'])}")
    return lines


def _cells(row: dict[str, Any]) -> list[str]:
    """Work, quantity, value, bar, verdict, and what else is known."""
    unit, value = row["unit"], row["value"]
    shown = "not measured"
    if value:
        shown = f"{_number(value['median'])} {unit} [{_number(value['low'])}–{_number(value['high'])}]"
    bar = "–" if row["bar"] is None else f"{'≤' if row['at_most'] else '≥'} {row['bar']:g} {unit}"
    verdict = {True: "met", False: "missed", None: ""}[row["met"]]
    more = [f"{name} {_time(spread['median'])}" for name, spread in row["sides"].items()]
    return [row["work"], row["quantity"], shown, bar, verdict, "; ".join([*more, row["note"]]).strip("; ")]


def _number(x: float) -> str:
    """Three digits, and no exponent."""
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
