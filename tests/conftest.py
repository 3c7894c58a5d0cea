"""What the tests of training share: a small text, a small configuration, and ways to look at a run."""

import json

import pytest
from hypothesis import settings

from gru_ref import config as configuration
from gru_ref.checkpoint import verify_checkpoint
from gru_ref.checkpoint.find import checkpoints_of
from gru_ref.training.trainer import Trainer

# The same examples every time, and none fails because the machine was busy.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")

TEXT = b"the quick brown fox jumps over the lazy dog.\n" * 20

# 100 tokens of one sentence are learned in a few steps, and a step takes a millisecond.
TINY = {
    "data.val_fraction": 0.1,
    "model.layers": 1,
    "model.hidden": 8,
    "model.embedding": 0,
    "run.threads": 1,
    "schedule.lr": 2e-2,
    "schedule.min_lr": 2e-3,
    "train.batch_size": 2,
    "train.checkpoint_every": 0,
    "train.eval_every": 0,
    "train.seq_len": 8,
    "train.steps": 6,
}


@pytest.fixture
def text(tmp_path):
    """A file of 900 bytes."""
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def tiny(text):
    """tiny({'train.steps': 5}) is a small configuration with these changes."""

    def make(changes=None):
        return configuration.load(options={**TINY, "data.files": [str(text)], **(changes or {})})

    return make


@pytest.fixture
def tiny_options(text):
    """The same as options of the command line."""
    assignments = [f"--set={key}={value}" for key, value in TINY.items() if key != "train.steps"]
    return ["--data", str(text), "--steps", str(TINY["train.steps"]), *assignments]


@pytest.fixture
def short_samples(monkeypatch):
    """Samples of 5 tokens: two of 200 would be most of the time of a small run."""
    monkeypatch.setattr(Trainer.sample, "__defaults__", (5,))


@pytest.fixture
def rows():
    """rows(run) are the rows of its metrics, rows(run, 'events') those of another log; all valid JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    def read(run, name="metrics"):
        lines = (run / f"{name}.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line, parse_constant=refuse) for line in lines]

    return read


@pytest.fixture
def timeless(rows):
    """The rows of a log without what the clock decides and without the directory's name."""
    volatile = {"seconds", "tokens_per_second", "time", "path", "run"}

    def read(run, name="metrics"):
        return [{k: v for k, v in row.items() if k not in volatile} for row in rows(run, name)]

    return read


@pytest.fixture
def all_verify():
    """Every checkpoint of a run verifies, there is at least one, and no temporary file lies about."""

    def check(run):
        checkpoints = checkpoints_of(run)
        assert checkpoints
        for path in checkpoints:
            assert verify_checkpoint(path).problems == []
        assert not list(run.rglob(".*"))
        return [int(path.stem.removeprefix("step-")) for path in checkpoints]

    return check
