"""The README's commands run as they are printed, but for fewer steps."""

import re
import shlex
from pathlib import Path

import pytest

from gru_ref.cli import run as run_command

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
SECTION = README.partition("## Train on your text")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^gru-ref (.*?)(?:  +#.*)?$", SECTION, re.MULTILINE)
(GPT2,) = re.findall(r"`(--set model\.kind=gpt2[^`]*)`", SECTION)
TEXT = "Once upon a time there was a text of a few words, and it was read again. " * 100

pytestmark = pytest.mark.usefixtures("short_samples")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_that_train_on_a_text_run_one_after_another(capsys):
    pytest.importorskip("matplotlib")
    assert len(COMMANDS) >= 7
    for command in COMMANDS:
        arguments = shlex.split(re.sub(r"--steps \d+", "--steps 2", command))
        assert run_command(arguments) == 0, capsys.readouterr().err


def test_a_gpt2_trains_by_the_options_that_the_readme_gives(capsys):
    """Over the default preset, which is a GRU's: what that says of a GRU alone does not stand in the way."""
    few = ["--data", "book.txt", "--steps", "2", "--out", "gpt"]
    assert run_command(["train", *few, *shlex.split(GPT2)]) == 0, capsys.readouterr().err
    assert "model: gpt2, 1 × 192" in capsys.readouterr().out
