"""`gru-ref plan`: what a run will need and cost, before it starts (gru_ref/plan)."""

import json
from typing import TYPE_CHECKING, Any

import click

from gru_ref.cli._configuration import (
    Positive,
    check_file_name,
    dotted,
    named_options,
    set_option,
    with_length,
)

if TYPE_CHECKING:
    from gru_ref.config import Config

HERE = "here"
UNITS = {"MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}


class _Bytes(click.ParamType):
    """A number of bytes with its unit, as 26.4GB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        unit = next((unit for unit in UNITS if value.endswith(unit)), None)
        if unit is None:
            self.fail(f"{value!r} needs a unit of {', '.join(UNITS)}, as in 26.4GB", param, ctx)
        return UNITS[unit] * Positive().convert(value.removesuffix(unit), param, ctx)


@click.command("plan")
@click.argument("config_file", metavar="[CONFIG.toml]", required=False)
@click.option("--preset", metavar="NAME", help="default, gru-l3-v3a, gpt-16m or gpt2-124m.")
@click.option("--data", multiple=True, metavar="FILE", help="Text to train on, for the length in epochs.")
@click.option(
    "--device", default=HERE, metavar="NAME", show_default=True, help="Or a GPU, as l40s or a100-80gb."
)
@click.option("--precision", type=click.Choice(["fp32", "tf32", "fp16", "bf16"]), help="Of matrix products.")
@click.option("--efficiency", type=Positive(1), help="Share of the GPU's peak that products reach, 0 to 1.")
@click.option("--price-per-hour", type=Positive(), help="What the machine costs, for the price of the run.")
@click.option("--tokens", type=click.IntRange(1), help="Tokens of the whole run, instead of --steps.")
@click.option("--measured-tokens-per-second", type=Positive(), help="Of another engine, to compare.")
@click.option("--measured-memory", type=_Bytes(), help="Of another engine, to compare, as 26.4GB.")
@named_options(
    *("steps", "epochs", "batch_size", "seq_len", "accumulation", "segments"),
    *("tokenizer", "vocab", "kernels", "threads"),
)
@set_option
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
def command(
    config_file: str | None,
    preset: str | None,
    data: tuple[str, ...],
    device: str,
    precision: str | None,
    efficiency: float | None,
    price_per_hour: float | None,
    tokens: int | None,
    measured_tokens_per_second: float | None,
    measured_memory: float | None,
    assignments: tuple[str, ...],
    as_json: bool,
    **named: Any,
) -> None:
    """Predict memory, time and cost of a run, here or on a GPU.

    Here, a shortened step is timed, for a few seconds. On a GPU the step is computed from the peak and the
    bandwidth of the vendor's data sheet; nothing runs.
    """
    from gru_ref import config as configuration
    from gru_ref import plan

    check_file_name(config_file)
    others = {"data.files": data, "run.precision": None if precision == "tf32" else precision}
    options = dotted(named, others, assignments)
    config = configuration.load(preset=preset, file=config_file, options=options)
    gpu = None if device.lower() in (HERE, "cpu") else plan.device(device)
    if gpu is None and efficiency is not None:
        raise click.UsageError("--efficiency is the share of a GPU's peak: name one with --device")
    if gpu is None and precision == "tf32":
        raise click.UsageError("--precision tf32 is a GPU's: name one with --device, or choose another")
    if tokens is not None:
        config = _with_tokens(config, tokens, named)
    config, steps = with_length(config)
    figures = plan.summary(
        config,
        steps,
        gpu=gpu,
        precision=precision,
        share=efficiency,
        price_per_hour=price_per_hour,
        measured_tokens_per_second=measured_tokens_per_second,
        measured_memory=measured_memory,
    )
    if as_json:
        click.echo(json.dumps(figures, allow_nan=False))
    else:
        _print(figures)


def _with_tokens(config: "Config", tokens: int, named: dict[str, Any]) -> "Config":
    """As many steps as these tokens need."""
    from gru_ref.plan.speed import tokens_per_step

    for name in ("steps", "epochs"):
        if named[name] is not None:
            raise click.UsageError(f"--tokens and --{name} contradict each other; give one")
    return config.replace("train", steps=-(-tokens // tokens_per_step(config)), epochs=0.0)


def _print(figures: dict[str, Any]) -> None:
    """Each part in at most 80 columns."""
    from gru_ref.cli._terminal import console

    screen = console()
    for part in (_model, _memory, _flops, _device, _run, _fits, _measured):
        lines = part(figures)
        if lines:
            screen.print("\n".join([*lines, ""]), soft_wrap=True)


def _model(figures: dict[str, Any]) -> list[str]:
    model, step, n = figures["model"], figures["step"], figures["parameters"]
    return [
        f"{model['kind']}, {model['layers']} × {model['hidden']}, vocabulary {model['vocab_size']:,}: "
        f"{n:,} parameters ({n / 1e6:.1f} M)",
        f"a step: {step['accumulation']} × {step['batch_size']} windows of {step['seq_len']:,} = "
        f"{step['tokens']:,} tokens; K = {step['segments']}",
    ]


def _memory(figures: dict[str, Any]) -> list[str]:
    array, checkpoint = figures["array_bytes"], figures["checkpoint_bytes"]
    notes = {
        "activations": f"{figures['bytes']['activations'] / array:.2f} arrays (T, B, H) of fp32",
        "workspace": f"{figures['bytes']['workspace'] / array:.2f}",
    }
    rows = [_row(name, _size(n), notes.get(name, "")) for name, n in figures["bytes"].items()]
    return [
        "memory of a step",
        *rows,
        _row("together", _size(figures["total_bytes"])),
        _row("checkpoint", _size(checkpoint["at_step_0"]), "at step 0"),
        _row("", _size(checkpoint["later"]), f"later ({checkpoint['later'] / 2**20:,.1f} MiB)"),
    ]


def _flops(figures: dict[str, Any]) -> list[str]:
    parts = {**figures["flops_per_token"], "together": figures["total_flops_per_token"]}
    rows = [_row(name, f"{n / 1e6:,.1f} M") for name, n in parts.items()]
    return [
        "FLOPs a token",
        *rows,
        f"  {figures['formula']}",
        "  not counted: tables that are only looked up, and recomputation",
    ]


def _device(figures: dict[str, Any]) -> list[str]:
    device, speed = figures["device"], figures["speed"]
    name, precision = device["name"], device["precision"]
    if device["peak_flops_per_second"] is None:
        lines = [f"{name}: {device['memory']:.1f} GiB of memory available, products in {precision}"]
    else:
        peaks = ", ".join(f"{p} {peak:g}" for p, peak in device["peak"].items())
        lines = [
            f"{name}: {device['memory']:g} GiB, {device['bandwidth']:,} GB/s",
            f"  peak TFLOP/s: {peaks}",
        ]
    if speed is None:
        return [*lines, "  too large to time a step here"]
    share = speed["share_of_peak"]
    of_peak = "" if share is None else f", {_percent(share)} of the {precision} peak"
    return [
        *lines,
        f"  {speed['how']}",
        *(_row(part, _seconds(seconds)) for part, seconds in speed["parts"].items()),
        _row("a step", _seconds(speed["seconds_per_step"])),
        f"  {speed['tokens_per_second']:,.0f} tokens/s, {_rate(speed['flops_per_second'])}{of_peak}",
    ]


def _run(figures: dict[str, Any]) -> list[str]:
    from gru_ref.cli._terminal import clock

    run = figures["run"]
    if run is None:
        return []
    lines = [
        f"the run: {run['steps']:,} steps, {run['tokens'] / 1e6:,.1f} M tokens",
        _row("time", clock(run["seconds"]), "without validation and checkpoints"),
    ]
    if run["cost"] is not None:
        lines.append(_row("cost", f"{run['cost']:,.2f}", f"at {run['price_per_hour']:g} an hour"))
    return lines


def _fits(figures: dict[str, Any]) -> list[str]:
    name, batch_size = figures["device"]["name"], figures["step"]["batch_size"]
    rows = [
        f"  {row['segments']:>3}  {_size(row['bytes']):>12}  {'yes' if row['fits'] else 'no':>4}  "
        f"{row['largest_batch']:>13,}"
        for row in figures["fits"]
    ]
    return [
        f"segments K {name if name == HERE else f'on {name}'}, in {_size(figures['capacity_bytes'])}, "
        "9/10 of the memory",
        f"  {'K':>3}  {f'at batch {batch_size}':>12}  fits  largest batch",
        *rows,
        f"  {figures['verdict']}",
    ]


def _measured(figures: dict[str, Any]) -> list[str]:
    found, precision = figures["measured"], figures["device"]["precision"]
    lines = ["measured by another engine"] if found else []
    if "tokens_per_second" in found:
        lines.append(f"  {found['tokens_per_second']:,.0f} tokens/s are {_rate(found['flops_per_second'])}")
        if found["share_of_peak"] is not None:
            lines[-1] += f", {_percent(found['share_of_peak'])} of the {precision} peak"
        if found["share_of_prediction"] is not None:
            lines.append(f"    and {found['share_of_prediction']:.2f} times the prediction")
    if "bytes" in found:
        more = found["bytes_beyond_ours"]
        lines += [
            f"  {_size(found['bytes'])} are {_size(abs(more))} {'more' if more >= 0 else 'less'} than ours",
            f"    beside parameters, gradients and moments {found['arrays']:.2f} arrays (T, B, H), ours "
            f"{found['our_arrays']:.2f}",
        ]
    return lines


def _row(name: str, value: str, note: str = "") -> str:
    return f"  {name:24}{value:>12}{'  ' if note else ''}{note}"


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"


def _rate(per_second: float) -> str:
    return f"{per_second / 1e12:,.2f} TFLOP/s" if per_second >= 1e12 else f"{per_second / 1e9:,.1f} GFLOP/s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
