"""`gru-ref eval`: figures that can be checked by hand, and what it refuses (N11)."""

import gzip
import json
import math
import os
import pty
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from gru_ref import cli, random
from gru_ref.checkpoint import load_checkpoint, save_checkpoint
from gru_ref.checkpoint.layout import SCALARS, Checkpoint
from gru_ref.checkpoint.restore import restore_model
from gru_ref.config import Config
from gru_ref.data.corpus import encode_files, load_corpus
from gru_ref.data.windows import Windows
from gru_ref.models.gru_lm import GRULM
from gru_ref.ops.cross_entropy import IGNORE
from gru_ref.training.evaluation import evaluate

VOCAB = {"ascii100": 100, "bytes": 257, "ids": 12}
TEXT = b"The quick brown fox\njumps over the lazy dog. " * 9 + b"end"


def new_model(tokenizer, initialise=True):
    model = GRULM(Config().replace("model", layers=1, hidden=8, vocab_size=VOCAB[tokenizer]).model)
    if initialise:
        model.initialise()
    return model


def save(path, model, tokenizer, seq_len=16):
    path.parent.mkdir(parents=True, exist_ok=True)
    config = Config().replace("data", tokenizer=tokenizer).replace("train", seq_len=seq_len, batch_size=4)
    trainer = {name.rpartition("/")[2]: 0 for name in SCALARS if name.startswith("/trainer/")}
    trainer["seed"] = Config().train.seed
    optimizer = {"step": 0, "mu_product": 1.0}
    checkpoint = Checkpoint(replace(config, model=model.config), model.arena.param, {}, optimizer, trainer)
    save_checkpoint(path, checkpoint)
    return str(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """An untrained model for each tokenizer, and those with zero weights: all tokens equally likely."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {name: save(folder / f"{name}.h5", new_model(name), name) for name in VOCAB}
    for name in VOCAB:
        made[f"uniform {name}"] = save(folder / f"uniform-{name}.h5", new_model(name, False), name)
    return made


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return str(path)


@pytest.fixture
def evaluation(capsys):
    """Run `gru-ref eval` in this process: (exit code, standard output, standard error)."""

    def call(*args):
        code = cli.run(["eval", *args])
        return (code, *capsys.readouterr())

    return call


def figures(result):
    code, out, _ = result
    assert code == 0
    return json.loads(out)


# Figures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokenizer", "bpb"), [("ascii100", math.log2(100)), ("bytes", math.log2(257))])
def test_a_uniform_model_needs_log2_of_the_vocabulary_for_every_byte(
    evaluation, checkpoints, text, tokenizer, bpb
):
    """N11: 6.643856 bits for 100 tokens, computed in float32, hence 1e-6. All but one byte is predicted."""
    result = figures(evaluation(checkpoints[f"uniform {tokenizer}"], "--data", text, "--json"))
    assert result["bpb"] == pytest.approx(bpb, abs=1e-6)
    assert result["loss"] == pytest.approx(bpb * math.log(2), abs=1e-6)
    assert result["tokens"] == result["bytes"] == len(TEXT) - 1
    assert result["unknown"] == 0


def test_top_1_and_top_5_of_a_uniform_model_are_the_lowest_ids(evaluation, checkpoints, tmp_path):
    """Equal logits rank by id: the top five are pad, unk, bos, eos and newline, 3 of these 7 targets."""
    path = tmp_path / "text"
    path.write_bytes(b"ab\ncd\xc3\xa9e")
    code, out, err = evaluation(checkpoints["uniform ascii100"], "--data", str(path), "--json")
    result = figures((code, out, err))
    assert (result["top1"], result["top5"], result["unknown"]) == (0, 3 / 7, 2)
    assert err == (
        "gru-ref: 2 of 8 tokens are bytes that tokenizer 'ascii100' does not know; they count as its unknown "
        "token\n"
    )


def test_a_separator_between_documents_is_a_token_of_no_bytes(evaluation, checkpoints, tmp_path):
    """N11: 8 targets cost log2 100 bits each, and BPB divides by the 7 of them that are text."""
    files = []
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"xyz.")
        files += ["--data", str(tmp_path / name)]
    result = figures(evaluation(checkpoints["uniform ascii100"], *files, "--json"))
    assert (result["tokens"], result["bytes"]) == (8, 7)
    assert result["bpb"] == pytest.approx(math.log2(100) * 8 / 7, abs=1e-6)


@pytest.mark.parametrize("tokenizer", ["ascii100", "bytes"])
def test_the_figures_are_those_of_a_plain_loop_over_the_text(evaluation, checkpoints, text, tokenizer):
    """Every window of 16 from the zero state, in float64, target by target."""
    checkpoint = load_checkpoint(checkpoints[tokenizer])
    model = restore_model(checkpoint, dtype=np.float64)
    ids = load_corpus([text], tokenizer).tokens.astype(int)
    nats, hits1, hits5 = 0.0, 0, 0
    for start in range(0, len(ids) - 1, 16):
        window = ids[start : start + 17]
        logits, _, _ = model.forward(window[:-1, None])
        for z, target in zip(logits[:, 0], window[1:], strict=True):
            nats += math.log(np.exp(z).sum()) - z[target]
            best = np.argsort(-z, kind="stable")[:5].tolist()
            hits1 += target == best[0]
            hits5 += target in best
    count = len(ids) - 1
    result = figures(evaluation(checkpoints[tokenizer], "--data", text, "--json"))
    assert result["loss"] == pytest.approx(nats / count, rel=1e-6)
    assert result["bpb"] == pytest.approx(nats / count / math.log(2), rel=1e-6)
    assert (result["top1"], result["top5"]) == (hits1 / count, hits5 / count)
    assert result["seq_len"] == 16
    assert result["tokens_per_second"] == pytest.approx(count / result["seconds"])


def test_one_text_cut_in_1_3_or_7_batches_has_the_same_figures_to_1e_12():
    """N11: float64; the last batch and the last window are partial."""
    model = GRULM(Config().replace("model", layers=2, hidden=8, vocab_size=100).model, dtype=np.float64)
    model.initialise()
    tokens = random.bits(21 * 16 - 3, seed=1, stream=random.SAMPLING).astype(np.int64) % 100
    windows = Windows(tokens, 16, seed=1)
    assert len(windows) == 21
    assert np.count_nonzero(windows.batch(np.array([20]))[1] == IGNORE) == 4
    token_bytes = np.ones(100, np.int64)
    results = [
        evaluate(model, windows, batch_size=size, token_bytes=token_bytes).to_dict()
        for size in (21, 8, 7, 3, 1)
    ]
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-12, abs=0)


@pytest.mark.parametrize("batch_size", ["1", "5", "1000"])
def test_the_batch_size_changes_no_figure_but_the_time(evaluation, checkpoints, text, batch_size):
    args = [checkpoints["ascii100"], "--data", text, "--json"]
    expected, result = (figures(evaluation(*args, *more)) for more in ([], ["--batch-size", batch_size]))
    exact, rounded = ("tokens", "bytes", "unknown", "top1", "top5", "seq_len"), ("loss", "bpb")
    assert [result[name] for name in exact] == [expected[name] for name in exact]
    assert [result[name] for name in rounded] == pytest.approx([expected[name] for name in rounded], rel=1e-6)


def test_the_window_length_is_the_one_asked_for_and_at_most_the_text(evaluation, checkpoints, text):
    """A text of one window has the same loss whatever longer length is asked for."""
    args = [checkpoints["ascii100"], "--data", text, "--json", "--seq-len"]
    short, whole, longer = (figures(evaluation(*args, T)) for T in ("2", str(len(TEXT) - 1), "100000"))
    assert short["seq_len"] == 2
    assert short["loss"] != whole["loss"]
    assert whole["seq_len"] == longer["seq_len"] == len(TEXT) - 1
    assert whole["loss"] == longer["loss"]
    assert short["tokens"] == whole["tokens"] == len(TEXT) - 1


@pytest.mark.parametrize("data", [b"ab", b"a longer text, shorter than a window"])
def test_a_text_shorter_than_a_window_is_evaluated(evaluation, tmp_path, data):
    path = save(tmp_path / "long.h5", new_model("ascii100", False), "ascii100", seq_len=128)
    (tmp_path / "text").write_bytes(data)
    result = figures(evaluation(path, "--data", str(tmp_path / "text"), "--json"))
    assert result["tokens"] == len(data) - 1
    assert result["bpb"] == pytest.approx(math.log2(100), abs=1e-6)


def test_compressed_and_encoded_texts_have_the_same_figures(evaluation, checkpoints, text, tmp_path):
    (tmp_path / "text.gz").write_bytes(gzip.compress(TEXT))
    encode_files([text], tmp_path / "text.h5", "ascii100")
    results = [
        figures(evaluation(checkpoints["ascii100"], "--data", str(path), "--json"))
        for path in (text, tmp_path / "text.gz", tmp_path / "text.h5")
    ]
    assert len({(r["loss"], r["bpb"], r["top1"], r["top5"], r["tokens"]) for r in results}) == 1


def test_token_ids_have_no_bytes_and_no_bpb(evaluation, checkpoints, tmp_path):
    path = str(tmp_path / "tokens.bin")
    (np.arange(50, dtype="<u2") % 12).tofile(path)
    result = figures(evaluation(checkpoints["uniform ids"], "--data", path, "--json"))
    assert (result["bpb"], result["bytes"], result["tokens"]) == (None, None, 49)
    assert result["loss"] == pytest.approx(math.log(12), abs=1e-6)
    table = dict(
        line.split(maxsplit=1) for line in evaluation(checkpoints["ids"], "--data", path)[1].splitlines()
    )
    assert table["BPB"] == table["bytes"] == "-"


def test_both_kernel_sets_agree(evaluation, checkpoints, text):
    args = [checkpoints["ascii100"], "--data", text, "--json", "--kernels"]
    numpy_loss, numba_loss = (figures(evaluation(*args, name))["loss"] for name in ("numpy", "numba"))
    assert numba_loss == pytest.approx(numpy_loss, rel=1e-5)


# What is shown ---------------------------------------------------------------------------------------------


def test_the_table_has_one_aligned_figure_a_line(evaluation, tmp_path, text):
    run = tmp_path / "run"
    newest = save(run / "checkpoints" / "step-00000010.h5", new_model("ascii100", False), "ascii100")
    save(run / "checkpoints" / "step-00000002.h5", new_model("ascii100"), "ascii100")
    code, out, err = evaluation(str(run), "--data", text)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[:8] == [
        f"checkpoint  {newest}",
        "loss        4.605170 nats a token",
        "BPB         6.643856 bits a byte",
        "top-1       0.00%",
        f"top-5       {9 / 407:.2%}",
        "tokens      407",
        "bytes       407",
        "unknown     0",
    ]
    assert lines[8].startswith("time        ")
    assert lines[8].endswith(" tokens/s")
    assert len(lines) == 9


def test_the_bar_is_for_a_terminal_alone(checkpoints, text):
    """L04: no carriage return and no escape sequence elsewhere."""
    command = [sys.executable, "-m", "gru_ref.cli", "eval", checkpoints["ascii100"], "--data", text]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "FORCE_COLOR": "1"}, check=True)
    assert done.stderr == b""
    assert b"\r" not in done.stdout
    assert b"\x1b" not in done.stdout
    reader, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, env=environment, check=True)
    os.close(terminal)
    shown = os.read(reader, 100_000)
    os.close(reader)
    assert b"eval" in shown
    assert done.stdout.count(b"\n") == 9


# What is refused -------------------------------------------------------------------------------------------


def test_data_is_required(evaluation, checkpoints):
    code, out, err = evaluation(checkpoints["ascii100"])
    assert (code, out) == (2, "")
    assert err == (
        "gru-ref: error: --data is missing: name the text to evaluate, as in --data held-out.txt\n"
    )


def test_a_text_without_a_target_is_refused(evaluation, checkpoints, tmp_path):
    (tmp_path / "one").write_bytes(b"a")
    code, out, err = evaluation(checkpoints["ascii100"], "--data", str(tmp_path / "one"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "at least 2 are needed" in err


def test_a_corpus_of_another_tokenizer_is_refused(evaluation, checkpoints, text, tmp_path):
    corpus = tmp_path / "text.h5"
    encode_files([text], corpus, "bytes")
    code, out, err = evaluation(checkpoints["ascii100"], "--data", str(corpus))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(corpus) in err
    assert "'bytes'" in err


@pytest.mark.parametrize(
    "args",
    [
        ["--seq-len", "0"],
        ["--batch-size", "0"],
        ["--batch-size", "-1"],
        ["--kernels", "cuda"],
        ["--data", "missing.txt"],
    ],
)
def test_wrong_options_are_one_line(evaluation, checkpoints, text, args):
    code, out, err = evaluation(checkpoints["ascii100"], "--data", text, *args)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_loss_that_is_not_finite_is_one_line_and_exit_code_1(evaluation, tmp_path, text):
    model = new_model("ascii100")
    model.arena.param["classifier.bias"][:] = 3e38
    model.arena.param["classifier.weight"][:] = 3e38
    model.arena.param["gru.0.bias_ih"][16:] = 9
    path = save(tmp_path / "huge.h5", model, "ascii100")
    code, out, err = evaluation(path, "--data", text)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"{path}: the loss on this text is nan" in err
