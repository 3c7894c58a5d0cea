"""Training that starts with the weights of a checkpoint: `train --init`."""

import dataclasses
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

from gru_ref import config as configuration
from gru_ref.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from gru_ref.checkpoint.find import newest_checkpoint
from gru_ref.checkpoint.restore import restore_model
from gru_ref.cli import run as run_command
from gru_ref.config import ModelConfig
from gru_ref.data import bpe
from gru_ref.errors import ConfigError, DataError, RunDirectoryError
from gru_ref.training import resume, train
from gru_ref.training.evaluation import evaluate
from gru_ref.training.trainer import Data

pytestmark = pytest.mark.usefixtures("short_samples")

KINDS = {
    "gru-lm": {"model.embedding": 5, "model.reset_after": False, "model.vocab_padding": 8},
    "gpt2": {"model.kind": "gpt2", "model.heads": 2, "model.context": 11, "model.bias": False},
}


@pytest.fixture(params=KINDS)
def base(request, tiny, tmp_path, monkeypatch):
    """A trained checkpoint of each kind, copied to where no run is; its configuration is `base.config`."""
    monkeypatch.chdir(tmp_path)
    changes = {**KINDS[request.param], "model.dropout": 0.1, "data.tokenizer": "bytes"}
    checkpoint = load_checkpoint(train(tiny(changes), "base").checkpoint)
    path = tmp_path / "base.h5"
    save_checkpoint(path, checkpoint)
    return SimpleNamespace(path=path, config=checkpoint.config, model=checkpoint.model)


def first_of(run):
    return load_checkpoint(run / "checkpoints" / "step-00000000.h5")


def test_a_run_starts_with_the_weights_the_model_and_the_tokenizer_of_a_checkpoint(base, tiny, rows):
    config = tiny({"optimizer.name": "adamw", "train.seed": 5, "model.hidden": 3})
    result = train(config, "run", init=base.path)
    first = first_of(result.path)
    assert all(np.array_equal(first.model[name], base.model[name]) for name in base.model)
    assert first.moments == {}
    assert (first.trainer["step"], first.trainer["tokens"], first.trainer["cursor"]) == (0, 0, 0)
    same_but_dropout = configuration.differences(
        first.config.replace("model", dropout=0.1), first.config.replace("model", **vars(base.config.model))
    )
    assert same_but_dropout == {}
    assert first.config.model.dropout == 0.0
    assert first.config.data.tokenizer == "bytes"
    assert first.config.optimizer.name == "adamw"
    assert result.finished
    last = load_checkpoint(result.checkpoint)
    assert any(not np.array_equal(last.model[name], base.model[name]) for name in base.model)
    (start,) = [row for row in rows(result.path, "events") if row["event"] == "start"]
    assert start["init"] == str(base.path)


def test_the_loss_before_training_is_the_checkpoints_and_no_ones_guess(base, tiny, rows, tmp_path, capsys):
    config = tiny({"train.steps": 1})
    train(config, "run", init=base.path)
    checkpoint = load_checkpoint(base.path)
    expected = evaluate(
        restore_model(checkpoint), Data(checkpoint.config).validation, batch_size=2, max_tokens=0
    ).loss
    (event,) = [row for row in rows(tmp_path / "run", "events") if row["event"] == "before_training"]
    assert event["loss"] == pytest.approx(expected, abs=1e-6)
    assert event["ln_vocab"] is None
    assert run_command(["train", "--init", "base.h5", "--data", "text.txt", "--steps", "1", *SHORT]) == 0
    shown = capsys.readouterr().out
    assert "starting with the weights of base.h5" in shown
    assert "untrained" not in shown


SHORT = ["--set=train.seq_len=8", "--set=train.batch_size=2", "--set=train.eval_every=0"]


@pytest.mark.parametrize("stop", [0, 3])
def test_a_run_that_was_started_so_resumes_to_the_same_bytes(base, tiny, tmp_path, stop):
    """Killed after its first checkpoint too; the checkpoint it started with is not needed again."""
    config = tiny({"train.checkpoint_every": 1, "model.dropout": 0.2})
    straight = train(config, "straight", init=base.path).path
    train(config, "run", init=base.path, stop_at=stop or 1)
    if not stop:
        (tmp_path / "run" / "checkpoints" / "step-00000001.h5").unlink()
    base.path.unlink()
    assert resume("run").finished
    for step in range(7):
        name = f"step-{step:08d}.h5"
        assert (tmp_path / "run" / "checkpoints" / name).read_bytes() == (
            straight / "checkpoints" / name
        ).read_bytes()


def test_a_run_means_its_newest_checkpoint_and_is_left_alone(base, tiny, tmp_path):
    before = {path: path.read_bytes() for path in (tmp_path / "base").rglob("*") if path.is_file()}
    train(tiny(), "run", init="base")
    newest, first = load_checkpoint(newest_checkpoint("base")).model, first_of(tmp_path / "run").model
    assert all(np.array_equal(first[name], newest[name]) for name in newest)
    assert {path: path.read_bytes() for path in (tmp_path / "base").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("preset", configuration.preset_names())
def test_what_a_preset_says_of_the_model_gives_way(base, preset):
    config = configuration.load(
        preset=preset, init=base.config, options={"train.seq_len": 8, "model.dropout": 0.3}
    )
    model = dataclasses.replace(base.config.model, dropout=0.3)
    assert config.model == model
    assert config.train.steps == configuration.load(preset=preset).train.steps
    assert config.data.tokenizer == "bytes"


def test_what_the_user_says_of_the_model_must_be_what_the_checkpoint_is(base, tmp_path):
    """Every field; one that says the same, or nothing, is no contradiction."""
    short = {"train.seq_len": 8}
    for field in dataclasses.fields(ModelConfig):
        key, own = f"model.{field.name}", getattr(base.config.model, field.name)
        assert configuration.load(init=base.config, options={**short, key: own}).model.layers == 1
        if field.name == "dropout":
            continue
        other = not own if isinstance(own, bool) else own + 1 if isinstance(own, int) else "gpt2"
        if field.name == "kind" and own == "gpt2":
            other = "gru-lm"
        with pytest.raises(ConfigError, match=rf"{key} .*is not the checkpoint's: .*; leave it out"):
            configuration.load(init=base.config, options={**short, key: other})
    says_nothing = {"model.vocab_size": 0, "data.tokenizer": "auto", "data.vocab": ""}
    assert configuration.load(init=base.config, options=short | says_nothing).model.vocab_size == 257
    file = tmp_path / "a.toml"
    file.write_text("[model]\nhidden = 9\n")
    with pytest.raises(ConfigError, match=r"model\.hidden 9 is not the checkpoint's: 8; leave it out"):
        configuration.load(init=base.config, file=file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "model.layers=3"], "model.layers 3 is not the checkpoint's: 1; leave it out"),
        (["--tokenizer", "ascii100"], "data.tokenizer ascii100 is not the checkpoint's: bytes; leave it out"),
        (["--vocab", "voc"], "data.vocab voc is not the checkpoint's: 'bytes', which comes with it; leave"),
        (["--data", "other.h5"], "other.h5: was encoded with 'ascii100', not 'bytes'; encode the text with"),
        (["--init", "text.txt"], "text.txt: not a checkpoint"),
        (["--init", "none.h5"], "none.h5: does not exist"),
        (["--init", "empty"], "empty: holds no checkpoints/step-*.h5"),
        (["--resume", "base"], "--init cannot go with --resume"),
    ],
)
def test_what_does_not_fit_is_one_line_and_leaves_no_run(base, arguments, message, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert run_command(["encode", "text.txt", "-o", "other.h5"]) == 0
    options = ["--init", "base.h5", "--out", "run", *SHORT]
    if "--data" not in arguments:
        options += ["--data", "text.txt"]
    if "--resume" in arguments:
        options = ["--init", "base.h5"]
    capsys.readouterr()
    assert run_command(["train", *options, *arguments]) == 2 - (arguments[-1] == "text.txt")
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_outside_a_run_cannot_be_resumed_and_the_message_says_what_can(base, tmp_path):
    with pytest.raises(RunDirectoryError, match=r"base\.h5: lies in no run directory.* --init .*base\.h5"):
        resume(base.path, changes={"train.steps": 5})
    assert not (tmp_path.parent / "run.lock").exists()


def test_a_dry_run_describes_the_model_of_the_checkpoint(base, tmp_path, capsys):
    assert run_command(["train", "--init", "base.h5", "--data", "text.txt", "--dry-run", *SHORT]) == 0
    count = sum(array.size for array in base.model.values())
    assert f"{count:,} parameters" in capsys.readouterr().out


def test_standard_input_is_read_with_the_tokenizer_of_the_checkpoint(base, text, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text.read_bytes() + "ß".encode())))
    result = train(tiny({"data.files": ["-"]}), "run", init=base.path, stop_at=2)
    assert resume(result.path).finished
    data = load_checkpoint(newest_checkpoint("run")).data["train"]
    assert (data["tokenizer"], data["unknown"], data["tokens"]) == ("bytes", 0, 902)


@pytest.fixture
def of_gpt2(tiny, text, tmp_path, monkeypatch):
    """of_gpt2(vocab) is an untrained gpt2 on raw ids or with a vocabulary, as `import` makes them."""
    monkeypatch.chdir(tmp_path)

    def make(vocab):
        tokenizer = {"data.vocab": "vocab"} if vocab else {"data.tokenizer": "ids", "model.vocab_size": 300}
        np.tile(np.arange(300, dtype="<u2"), 4).tofile("ids.bin")
        if vocab:
            pytest.importorskip("tokenizers")
            (tmp_path / "vocab").mkdir()
            definition = bpe.train([text.read_bytes()], 262).definition()
            ids = {token: number for number, token in enumerate(definition["tokens"])}
            (tmp_path / "vocab" / "vocab.json").write_text(json.dumps(ids))
            (tmp_path / "vocab" / "merges.txt").write_text("\n".join(definition["merges"]), "utf-8")
        files = [str(text) if vocab else "ids.bin"]
        config = tiny({"model.kind": "gpt2", "data.files": files, **tokenizer})
        save_checkpoint("base.h5", first_of(train(config, "base").path))

    return make


def test_a_vocabulary_comes_with_the_checkpoint(of_gpt2, tiny, text, tmp_path):
    of_gpt2(vocab=True)
    for path in (tmp_path / "vocab").iterdir():
        path.unlink()
    result = train(tiny(), "run", init="base.h5", stop_at=3)
    assert resume(result.path).finished
    checkpoint = load_checkpoint(newest_checkpoint("run"))
    assert (checkpoint.config.data.tokenizer, checkpoint.config.data.vocab) == ("bpe", "")
    assert checkpoint.tokenizer == load_checkpoint("base.h5").tokenizer
    assert checkpoint.data["train"]["tokens"] < len(text.read_bytes())
    assert verify_checkpoint(newest_checkpoint("run")).problems == []
    assert run_command(["encode", "text.txt", "-o", "other.h5", "--train-bpe", "261"]) == 0
    with pytest.raises(DataError, match=r"other\.h5: was encoded with another vocabulary for 'bpe'"):
        train(tiny({"data.files": ["other.h5"]}), "again", init="base.h5")


def test_a_model_of_raw_ids_takes_raw_ids_only(of_gpt2, tiny):
    of_gpt2(vocab=False)
    assert train(tiny({"data.files": ["ids.bin"]}), "run", init="base.h5").finished
    with pytest.raises(DataError, match=r"text\.txt: is text, .* or import the weights"):
        train(tiny(), "again", init="base.h5")


def test_without_a_configuration_the_default_preset_trains_it(base, monkeypatch):
    short = configuration.load(options={"train.steps": 1, "train.seq_len": 8, "train.eval_tokens": 10})
    monkeypatch.setattr(configuration, "load", lambda: short)
    assert first_of(train(None, "run", init=base.path).path).config.model.hidden == 8
