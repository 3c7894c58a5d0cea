"""Runs of GPT-2 by the trainer, the checkpoints and the commands of the GRU (N03, N07, N11, R01, S03)."""

import dataclasses
import json
import tracemalloc

import h5py
import numpy as np
import pytest

from gru_ref import cli, plan, verify_checkpoint
from gru_ref import config as configuration
from gru_ref.checkpoint import load_checkpoint, save_checkpoint
from gru_ref.checkpoint.restore import restore_model
from gru_ref.config import Config, ModelConfig
from gru_ref.errors import CheckpointError, ConfigError
from gru_ref.generate import generate
from gru_ref.models.gpt2 import GPT2
from gru_ref.ops.cross_entropy import IGNORE
from gru_ref.training import resume, train
from gru_ref.training.evaluation import evaluate
from gru_ref.training.optimizer import Optimizer
from gru_ref.training.step import accumulate, train_step
from gru_ref.training.trainer import Trainer

A = 70  # the id of "a" in ascii100
TEXT = b"the quick brown fox jumps over the lazy dog.\n" * 20
TINY = {
    "data.val_fraction": 0.1,
    "model.kind": "gpt2",
    "model.layers": 2,
    "model.hidden": 8,
    "model.embedding": 0,
    "model.heads": 2,
    "model.tied": True,
    "model.vocab_padding": 64,
    "optimizer.name": "adamw",
    "optimizer.weight_decay": 0.1,
    "run.threads": 1,
    "schedule.lr": 1e-2,
    "schedule.min_lr": 1e-3,
    "train.batch_size": 2,
    "train.checkpoint_every": 0,
    "train.eval_every": 0,
    "train.seq_len": 8,
    "train.steps": 4,
}


@pytest.fixture
def tiny(tmp_path):
    """tiny({'train.steps': 5}) is a small configuration with these changes."""
    (tmp_path / "text.txt").write_bytes(TEXT)

    def make(changes=None):
        return configuration.load(
            options={**TINY, "data.files": [str(tmp_path / "text.txt")], **(changes or {})}
        )

    return make


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(Trainer.sample, "__defaults__", (5,))


def checkpoint_at(run, step):
    return run / "checkpoints" / f"step-{step:08d}.h5"


def rows(run, name="metrics"):
    volatile = {"seconds", "tokens_per_second"}
    lines = (run / f"{name}.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in volatile} for line in lines]


# --- training -----------------------------------------------------------------------------------------------

RUNS = {
    "adamw": {"model.dropout": 0.3, "train.accumulation": 2},
    "nadam, untied": {"optimizer.name": "nadam", "model.tied": False, "model.bias": False},
    "bf16": {"run.precision": "bf16", "model.context": 20},
    "fp16": {"run.precision": "fp16", "train.loss_scale_growth": 2, "model.dropout": 0.3},
}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("stops", [[1], [2, 3]])
def test_stopped_and_resumed_equals_never_stopped(tiny, tmp_path, kind, stops):
    """R01: 1 + 3, 2 + 1 + 1; the checkpoint's bytes and every row."""
    config = tiny(RUNS[kind])
    straight, run = tmp_path / "straight", tmp_path / "run"
    train(config, straight)
    train(config, run, stop_at=stops[0])
    for stop in [*stops[1:], 0]:
        result = resume(run, stop_at=stop)
    assert result.finished
    assert checkpoint_at(run, 4).read_bytes() == checkpoint_at(straight, 4).read_bytes()
    assert rows(run) == rows(straight)
    assert rows(run, "samples") == rows(straight, "samples")
    assert verify_checkpoint(result.checkpoint).problems == []


@pytest.mark.parametrize(
    "changes", [{}, {"model.tied": False}, {"model.dropout": 0.1}, {"model.bias": False}]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_lowers_the_loss(tiny, tmp_path, changes, precision):
    options = {"train.steps": 40, "train.batch_size": 8, "run.precision": precision, **changes}
    result = train(tiny(options), tmp_path / "run")
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert np.mean(losses[-5:]) < losses[0] - 1
    assert result.evaluation.loss < losses[0] - 1
    (before,) = [row for row in rows(tmp_path / "run", "events") if row["event"] == "before_training"]
    assert before["loss"] == pytest.approx(before["ln_vocab"], abs=0.1)


def test_a_tied_head_is_one_parameter_with_one_moment_and_stays_the_embedding(tiny, tmp_path):
    """N03: one dataset each, and the head equal to the embedding bit for bit, after 3 steps of one token."""
    (tmp_path / "text.txt").write_bytes(b"a" * 300)
    train(tiny({"train.steps": 3, "data.val_fraction": 0}), tmp_path / "run")
    path = checkpoint_at(tmp_path / "run", 3)
    with h5py.File(path) as file:
        names = [name for group in ("model", "optimizer/m", "optimizer/v") for name in file[group]]
    assert names.count("embedding.weight") == 3
    assert not any("classifier" in name for name in names)
    model = restore_model(load_checkpoint(path))
    logits, _, (*_, classifier_cache) = model.forward(np.array([[A]]))
    head = classifier_cache[1]
    assert np.array_equal(head, model.arena.param["embedding.weight"][:100])
    assert np.shares_memory(head, model.arena.params)
    initial = load_checkpoint(checkpoint_at(tmp_path / "run", 0)).model["embedding.weight"]
    assert not np.any(head[A] == initial[A])
    assert logits[0, 0].argmax() == A


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_only_matrices_decay_and_each_of_them_once(tied, bias):
    """N07: zero gradients, so decay alone moves a weight; the norms' gains stay at 1 to the last bit."""
    model_config = ModelConfig(
        kind="gpt2", layers=2, hidden=8, heads=2, context=5, vocab_size=11, tied=tied, bias=bias
    )
    model = GPT2(model_config)
    model.initialise()
    model.arena.params += np.float32(0.5)
    before = {name: w.copy() for name, w in model.arena.param.items()}
    optimizer = Optimizer(configuration.OptimizerConfig(name="adamw", weight_decay=0.1), model.ops)
    ids = np.ones((5, 2), int)
    train_step(model, optimizer, [(ids, np.full_like(ids, IGNORE))], lr=0.01)
    for name, w in model.arena.param.items():
        factor = np.float32(1 - 0.01 * 0.1) if w.ndim == 2 else 1
        assert np.array_equal(w, before[name] * factor), name
    rows = {row.name: row.decayed for row in plan.parameters(Config(model=model_config))}
    assert {name for name, decayed in rows.items() if not decayed} == {
        name for name in rows if name.endswith("bias") or ".ln_" in name or name.startswith("ln_f")
    }


def test_micro_batches_add_up_to_the_whole_batch():
    """One divisor for all: the number of counted targets in the step."""
    model_config = ModelConfig(kind="gpt2", layers=2, hidden=8, heads=2, context=6, vocab_size=11, tied=True)
    whole, parts = (GPT2(model_config, dtype=np.float64) for _ in range(2))
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, 11, (2, 6, 5))
    targets[:4, 0] = IGNORE
    for model in (whole, parts):
        model.initialise()
    expected = accumulate(whole, [(ids, targets)], micro_step=1)
    cut = [(ids[:, :2], targets[:, :2]), (ids[:, 2:], targets[:, 2:])]
    loss, tokens, state = accumulate(parts, cut, micro_step=1)
    assert (tokens, state) == (expected[1], None)
    assert loss == pytest.approx(expected[0], rel=1e-14)
    np.testing.assert_allclose(parts.arena.grads, whole.arena.grads, rtol=0, atol=1e-14)


@pytest.mark.parametrize("seq_len", [1, 5, 8])
def test_a_loss_does_not_depend_on_the_batches_it_is_taken_in(tiny, seq_len):
    """N11: 1, 3 and 7 windows at a time, in float64, with a partial last window."""
    trainer = Trainer.start(tiny())
    model = GPT2(trainer.model.config, dtype=np.float64)
    model.arena.params[...] = 10 * trainer.model.arena.params
    windows = trainer.data.train
    windows = type(windows)(windows.tokens[:101], seq_len, seed=0)
    n_bytes = trainer.data.token_bytes
    first, *others = [evaluate(model, windows, batch_size=B, token_bytes=n_bytes) for B in (1, 3, 7)]
    assert first.tokens == 100
    for figure in others:
        assert figure.tokens == 100
        assert figure.loss == pytest.approx(first.loss, rel=1e-12)
        assert figure.bpb == pytest.approx(first.bpb, rel=1e-12)


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary(tiny):
    """N11: 95 + 5 symbols are log2 100 = 6.6439 bits each, of 64-fold padded rows too."""
    trainer = Trainer.start(tiny())
    trainer.model.arena.params[...] = 0
    evaluation = evaluate(
        trainer.model, trainer.data.train, batch_size=4, token_bytes=trainer.data.token_bytes
    )
    assert evaluation.bpb == pytest.approx(6.643856, abs=1e-5)


# --- configuration ------------------------------------------------------------------------------------------


def test_the_context_is_the_window_unless_it_is_said_to_be_longer(tiny):
    assert tiny().model.context == 8
    assert tiny({"model.context": 12}).model.context == 12
    with pytest.raises(ConfigError, match=r"train\.seq_len 8 is longer than model\.context 7"):
        tiny({"model.context": 7})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.carry_state": True}, r"train\.carry_state is for recurrent models"),
        ({"model.heads": 3}, r"model\.heads 3 must divide model\.hidden 8"),
        ({"model.embedding": 4}, r"model\.embedding is of gru-lm and not of gpt2"),
        ({"model.kind": "gru-lm"}, r"model\.heads is of gpt2 and not of gru-lm; set it to 4, or"),
        ({"model.kind": "gru-lm", "model.heads": 4, "model.bias": False}, r"model\.bias is of .* to true"),
        ({"train.loss_scale": 1000.0}, r"train\.loss_scale must be a power of two"),
        ({"train.loss_scale": 0.5}, r"train\.loss_scale must be at least 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tiny, changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny(changes)


def test_a_checkpoint_whose_config_no_model_can_have_is_refused(tiny, tmp_path):
    train(tiny({"train.steps": 1}), tmp_path / "run")
    checkpoint = load_checkpoint(checkpoint_at(tmp_path / "run", 1))
    path = tmp_path / "broken.h5"
    save_checkpoint(path, dataclasses.replace(checkpoint, config=checkpoint.config.replace("model", heads=3)))
    problem = "model.heads 3 must divide model.hidden 8"
    with pytest.raises(CheckpointError, match=problem):
        load_checkpoint(path)
    assert verify_checkpoint(path).problems == [problem]
    longer = dataclasses.replace(checkpoint, config=checkpoint.config.replace("model", context=9))
    with pytest.raises(CheckpointError, match=r"position\.weight: found .*\(8, 8\), expected .*\(9, 8\)"):
        save_checkpoint(path, longer)


SHAPES = {
    "activations dominate": {"layers": 2, "hidden": 64, "heads": 4, "vocab_size": 100, "tied": True},
    "logits dominate": {"layers": 1, "hidden": 16, "heads": 1, "vocab_size": 1000, "vocab_padding": 64},
    "longer than a block of keys": {"layers": 2, "hidden": 64, "heads": 2, "vocab_size": 100},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_predicted_memory_of_a_step_is_what_it_allocates(shape):
    T, B = (128, 8) if "longer" in shape else (64, 16)
    config = Config().replace("model", kind="gpt2", context=T, **SHAPES[shape])
    config = config.replace("train", seq_len=T, batch_size=B)
    ids = np.zeros((T, B), np.int64)
    tracemalloc.start()
    model = GPT2(config.model)
    model.initialise()
    optimizer = Optimizer(config.optimizer, model.ops)
    for step in range(2):
        if step:
            tracemalloc.reset_peak()
        train_step(model, optimizer, [(ids, ids)], lr=1e-3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(plan.memory(config).values()) == pytest.approx(peak, rel=0.05)


# --- the command line ---------------------------------------------------------------------------------------


@pytest.fixture
def run_path(tiny, tmp_path):
    train(tiny({"train.steps": 3}), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("length", [7, 8, 9, 80])
def test_a_prompt_beyond_the_context_is_cropped_with_a_notice(run_path, capfd, length):
    """S03: prompts of context − 1, context, context + 1 and 10 × context, and text of 5 times that."""
    prompt = ("the lazy dog jumps " * 5)[:length]
    assert cli.run(["sample", str(run_path), "--prompt", prompt, "-n", "40", "--json"]) == 0
    out, err = capfd.readouterr()
    model = restore_model(load_checkpoint(checkpoint_at(run_path, 3)))
    facts = json.loads(out)
    assert facts["ids"] == list(generate(model, facts["prompt_ids"][-8:], 40))
    assert len(facts["ids"]) == 40
    notice = f"the prompt has {length} tokens and the model looks back on 8: it reads the last ones"
    assert err == (f"gru-ref: {notice}\n" if length > 8 else "")


def test_the_figures_of_a_longer_window_than_the_context_are_refused(run_path, tmp_path, capfd):
    command = ["eval", str(run_path), "--data", str(tmp_path / "text.txt"), "--json"]
    assert cli.run([*command, "--seq-len", "9"]) == 2
    assert "--seq-len 9 is more than the 8 tokens the model looks back on" in capfd.readouterr().err
    assert cli.run([*command, "--seq-len", "8"]) == 0
    assert json.loads(capfd.readouterr().out)["tokens"] == len(TEXT) - 1


def test_the_table_of_a_dry_run_says_which_parameters_decay(tiny, tmp_path, capfd, monkeypatch):
    """N07: for this kind of model too."""
    monkeypatch.setenv("COLUMNS", "120")
    options = [f"--set={key}={value}" for key, value in TINY.items()]
    assert cli.run(["train", "--dry-run", "--data", str(tmp_path / "text.txt"), *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    rows = [line.strip("│ ").split() for line in lines if ".weight" in line or ".bias" in line]
    decay = {row[0]: row[-1] == "0.1" for row in rows}
    assert decay["embedding.weight"]
    assert decay["block.1.mlp.proj.weight"]
    assert not decay["block.1.ln_1.weight"]
    assert not decay["ln_f.weight"]
    assert not decay["block.0.mlp.fc.bias"]


def test_the_run_and_its_checkpoints_say_which_model_it_is(run_path, tmp_path, capfd):
    assert cli.run(["verify", str(run_path)]) == 0
    assert configuration.load(file=run_path / "config.toml").model.kind == "gpt2"
    model = load_checkpoint(checkpoint_at(run_path, 3)).config.model
    assert (model.kind, model.context, model.vocab_size) == ("gpt2", 8, 100)
    assert type(Trainer.start(configuration.load(file=run_path / "config.toml")).model) is GPT2
    capfd.readouterr()
