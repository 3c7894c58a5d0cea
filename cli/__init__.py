"""The command line: `gru-ref COMMAND`. Each file of this folder is a command, loaded when it is asked for.

A command's file defines `command`, imports only click at its top, and raises the family of gru_ref/errors.py;
here, in one place, an error becomes one line on standard error and an exit code.
"""

import contextlib
import functools
import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Sequence

import click

from gru_ref.errors import GruRefError
from gru_ref.version import __version__


class _Commands(click.Group):
    """The folder is the list of commands: `a_b.py` is a-b, `import_.py` is import, a word of Python's."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._modules())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        modules = self._modules()
        if cmd_name not in modules:
            import difflib  # for mistakes only, so that --help need not wait for it

            near = difflib.get_close_matches(cmd_name, modules, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(modules))}"
            raise click.UsageError(f"no command '{cmd_name}'; {hint}")
        command: click.Command = importlib.import_module(f"gru_ref.cli.{modules[cmd_name]}").command
        return command

    @staticmethod
    @functools.cache
    def _modules() -> dict[str, str]:
        """Each command's name with that of its file."""
        names = (module.name for module in pkgutil.iter_modules(__path__))
        return {name.rstrip("_").replace("_", "-"): name for name in names if not name.startswith("_")}


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="gru-ref")
def cli() -> None:
    """Train and verify recurrent language models on a from-scratch reference engine."""


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code: 0 good, 1 failed, 2 wrong usage or input, 128+n on signal n."""
    _make_streams_tolerant()
    warnings.showwarning = lambda message, *_, **__: click.echo(f"gru-ref: warning: {message}", err=True)
    code = run(sys.argv[1:] if args is None else args)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _after_broken_pipe()
    sys.exit(code)


def run(args: Sequence[str]) -> int:
    """Run a command and return its exit code; errors are printed as one line."""
    try:
        result = cli.main(list(args), prog_name="gru-ref", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except GruRefError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", 130)
    except BrokenPipeError:
        return _after_broken_pipe()
    except SystemExit as end:  # click and rich exit with 1 where the reader of the output went away
        return _after_broken_pipe() if end.code in (1, None) else int(end.code)
    except OSError as error:  # of the output, on a full disk say; files have errors of their own
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}", 1)
    except MemoryError as error:
        return _fail(f"out of memory: {error}", 1)
    except Exception as error:  # a fault of ours: not swallowed, but one line that can be reported
        if os.environ.get("GRU_REF_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(f"internal error, please report it (GRU_REF_TRACEBACK=1 shows where): {what}", 1)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    with contextlib.suppress(OSError):  # nobody reads it; the exit code says it too
        click.echo(f"gru-ref: error: {line}", err=True)
    return code


def _make_streams_tolerant() -> None:
    """No output may fail for a character that the terminal's encoding lacks, nothing for a closed stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # started with <&- or >&-
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif name != "stdin" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _after_broken_pipe() -> int:
    """The reader went away: leave quietly, and let the interpreter's last flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
