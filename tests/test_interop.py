"""Export and import: names, gate orders and layouts, against values written by hand and others' equations.

The whole GPT-2 against Hugging Face's is in test_parity_hf.py.
"""

import dataclasses
import importlib.util
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gru_ref import cli, load_config, ops, train
from gru_ref.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from gru_ref.checkpoint.layout import SCALARS, Checkpoint
from gru_ref.config import Config, ModelConfig
from gru_ref.data import bpe
from gru_ref.errors import UsageError
from gru_ref.interop.compare import compare
from gru_ref.interop.exchange import TARGETS, _way_out, export_checkpoint, import_file
from gru_ref.interop.gru_lm import swap_gates
from gru_ref.interop.tensor_files import read_tensors, write_tensors
from gru_ref.models import family, padded_vocab

st = pytest.importorskip("safetensors.numpy")
TRAINER = {path.removeprefix("/trainer/"): 0 for path in SCALARS if path.startswith("/trainer/")}
TRAINER["seed"] = Config().train.seed
SMALL = {"layers": 2, "hidden": 6, "embedding": 4, "vocab_size": 11}
GPT2_SHAPE = {"embedding": 0, "heads": 2, "context": 8, "tied": True}


_made = {}


def save(path, **model):
    """A checkpoint of a model with random weights, biases too; its weights. The same one is made once."""
    key = tuple(model.items())
    if key not in _made:
        weights = _save(path, **model)
        _made[key] = path.read_bytes(), weights
        path.with_name(path.name + ".md5").unlink()
    content, weights = _made[key]
    path.write_bytes(content)
    return weights


def _save(path, **model):
    config = Config().replace("model", **{**SMALL, **model}).replace("data", tokenizer="ids")
    config = config.replace("train", seq_len=config.model.context or config.train.seq_len)
    made = family(config.model.kind).Model(config.model, seed=3)
    made.initialise()
    save_checkpoint(path, Checkpoint(config, made.arena.param, {}, {"step": 0, "mu_product": 1.0}, TRAINER))
    return made.arena.param


def suffix(to):
    return TARGETS[to][1]


def run(capsys, *args):
    code = cli.run([str(arg) for arg in args])
    return (code, *capsys.readouterr())


def refused(capsys, *args):
    """The one line with which the command ends, which must leave no file behind."""
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("gru-ref: error: ")
    assert err.count("\n") == 1
    return err


# --- layouts written by hand --------------------------------------------------------------------------------


def by_hand(reset_after=True):
    """One layer, H = 1, I = 1, V = 2: every number tells where it belongs. Gates r, z, n are 1, 2, 3."""
    return {
        "embedding.weight": [[0.5], [0.25]],
        "gru.0.weight_ih": [[11], [12], [13]],
        "gru.0.weight_hh": [[21], [22], [23]],
        "gru.0.bias_ih": [31, 32, 33],
        "gru.0.bias_hh": [41, 42, 43] if reset_after else [0, 0, 0],
        "classifier.weight": [[51], [52]],
        "classifier.bias": [61, 62],
    }


def save_by_hand(path, reset_after=True):
    config = Config().replace("data", tokenizer="ids")
    config = config.replace("model", layers=1, hidden=1, embedding=1, vocab_size=2, reset_after=reset_after)
    weights = {name: np.array(value, np.float32) for name, value in by_hand(reset_after).items()}
    save_checkpoint(path, Checkpoint(config, weights, {}, {"step": 0, "mu_product": 1.0}, TRAINER))


TORCH = {
    "embedding.weight": [[0.5], [0.25]],
    "gru.weight_ih_l0": [[11], [12], [13]],
    "gru.weight_hh_l0": [[21], [22], [23]],
    "gru.bias_ih_l0": [31, 32, 33],
    "gru.bias_hh_l0": [41, 42, 43],
    "classifier.weight": [[51], [52]],
    "classifier.bias": [61, 62],
}
KERAS = {
    "embedding.embeddings": [[0.5], [0.25]],
    "gru.0.kernel": [[12, 11, 13]],
    "gru.0.recurrent_kernel": [[22, 21, 23]],
    "gru.0.bias": [[32, 31, 33], [42, 41, 43]],
    "classifier.kernel": [[51, 52]],
    "classifier.bias": [61, 62],
}


@pytest.mark.parametrize(
    ("to", "reset_after", "expected"),
    [
        ("torch", True, TORCH),
        ("keras", True, KERAS),
        ("keras", False, {**KERAS, "gru.0.bias": [32, 31, 33]}),
        ("safetensors", True, by_hand()),
        ("npz", False, by_hand(False)),
    ],
)
def test_names_and_gate_orders_of_each_layout(tmp_path, to, reset_after, expected):
    """N01: PyTorch's order is r, z, n with two biases, Keras's z, r, h with both biases in one array."""
    save_by_hand(tmp_path / "a.h5", reset_after)
    file = tmp_path / f"a{suffix(to)}"
    export_checkpoint(tmp_path / "a.h5", to, file)
    tensors = read_tensors(file).tensors
    assert {name: array.tolist() for name, array in tensors.items()} == expected
    assert {array.dtype for array in tensors.values()} == {np.dtype("<f4")}


@pytest.mark.parametrize(
    ("tensors", "reset_after"),
    [(TORCH, True), (KERAS, True), ({**KERAS, "gru.0.bias": [32, 31, 33]}, False)],
)
@pytest.mark.parametrize("container", [".safetensors", ".npz"])
def test_a_foreign_file_becomes_a_checkpoint_that_verifies(tmp_path, tensors, reset_after, container):
    file, output = tmp_path / f"foreign{container}", tmp_path / "made.h5"
    arrays = {name: np.array(value, np.float32) for name, value in tensors.items()}
    st.save_file(arrays, file) if container == ".safetensors" else np.savez(file, **arrays)
    facts = import_file(file, "gru-lm", output)
    loaded = load_checkpoint(output)
    assert {name: array.tolist() for name, array in loaded.model.items()} == by_hand(reset_after)
    assert loaded.config.model.reset_after is reset_after
    assert (loaded.config.model.vocab_size, loaded.config.data.tokenizer) == (2, "ids")
    assert (loaded.optimizer, loaded.moments) == ({"step": 0, "mu_product": 1.0}, {})
    assert set(loaded.trainer.values()) == {0, loaded.config.train.seed}
    assert facts["notices"] == []
    # values as large as these are damage to `verify`; everything else about the file must be right
    assert all("out of range" in problem for problem in verify_checkpoint(output).problems)


@pytest.mark.parametrize(("reset_after", "expected"), [(True, 0.7356506108), (False, 0.6956355648)])
def test_the_scalar_cell_gives_its_value_after_an_import_from_keras(tmp_path, reset_after, expected):
    """N01. The biases of the 2014 form are one in Keras: b_in + b_hid = -0.1."""
    bias = [[0.05, 0.1, 0.2], [0, 0, -0.3]] if reset_after else [0.05, 0.1, -0.1]
    tensors = {
        "embedding.embeddings": [[0.5]],
        "gru.0.kernel": [[-0.2, 0.3, 0.7]],
        "gru.0.recurrent_kernel": [[0.6, -0.4, 0.9]],
        "gru.0.bias": bias,
        "classifier.kernel": [[1]],
        "classifier.bias": [0],
    }
    np.savez(tmp_path / "k.npz", **{name: np.array(value, np.float32) for name, value in tensors.items()})
    import_file(tmp_path / "k.npz", "gru-lm", tmp_path / "k.h5")
    p = {name: a.astype(np.float64) for name, a in load_checkpoint(tmp_path / "k.h5").model.items()}
    layer = [p[f"gru.0.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    y, _ = ops.gru.forward(np.full((1, 1, 1), 0.5), np.full((1, 1), 0.8), *layer, reset_after=reset_after)
    assert y.item() == pytest.approx(expected, abs=5e-8)


# --- round trips --------------------------------------------------------------------------------------------

MODELS = {
    "untied": {},
    "tied": {"tied": True, "embedding": 6},
    "one layer": {"layers": 1, "embedding": 0},
}


@pytest.mark.parametrize("to", ["torch", "keras", "safetensors", "npz"])
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_round_trip_keeps_every_bit_and_the_whole_configuration(tmp_path, to, model):
    weights = save(tmp_path / "a.h5", **model)
    file, output = tmp_path / f"a{suffix(to)}", tmp_path / "b.h5"
    export_checkpoint(tmp_path / "a.h5", to, file)
    import_file(file, "gru-lm", output)
    loaded = load_checkpoint(output)
    assert loaded.config == load_checkpoint(tmp_path / "a.h5").config
    assert list(loaded.model) == list(weights)
    assert all(loaded.model[name].tobytes() == weights[name].tobytes() for name in weights)
    assert verify_checkpoint(output).problems == []
    export_checkpoint(output, to, tmp_path / f"again{suffix(to)}")
    assert (tmp_path / f"again{suffix(to)}").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("to", ["torch", "keras"])
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_round_trip_without_our_metadata_keeps_every_bit(tmp_path, to, model):
    weights = save(tmp_path / "a.h5", **model)
    file, bare = tmp_path / f"a{suffix(to)}", tmp_path / f"bare{suffix(to)}"
    export_checkpoint(tmp_path / "a.h5", to, file)
    write_tensors(bare, read_tensors(file).tensors, {})
    facts = import_file(bare, "gru-lm", tmp_path / "b.h5")
    loaded = load_checkpoint(tmp_path / "b.h5")
    assert loaded.config.model.tied is model.get("tied", False)
    assert ("tied" in " ".join(facts["notices"])) is loaded.config.model.tied
    assert all(loaded.model[name].tobytes() == weights[name].tobytes() for name in weights)


@pytest.mark.parametrize("to", ["torch", "keras", "safetensors"])
def test_rows_beyond_the_vocabulary_stay_here_and_come_back_as_zeros(tmp_path, to):
    save(tmp_path / "a.h5", vocab_padding=8)
    checkpoint = load_checkpoint(tmp_path / "a.h5")
    weights = checkpoint.model
    for name, array in weights.items():
        array[11 if "gru" not in name else len(array) :] = 0.5  # an older gru-ref drew numbers for them
    save_checkpoint(tmp_path / "a.h5", checkpoint)
    file = tmp_path / f"a{suffix(to)}"
    export_checkpoint(tmp_path / "a.h5", to, file)
    rows = 16 if to == "safetensors" else 11
    assert read_tensors(file).tensors["classifier.bias"].shape == (rows,)
    import_file(file, "gru-lm", tmp_path / "b.h5")
    loaded = load_checkpoint(tmp_path / "b.h5").model
    for name, array in weights.items():
        assert np.array_equal(
            loaded[name][:rows] if "gru" not in name else loaded[name],
            array[: len(loaded[name])] if rows == 16 or "gru" in name else array[:11],
        )
    assert loaded["embedding.weight"].shape == (16, 4)
    assert loaded["embedding.weight"][11:].any() == (to == "safetensors")


@pytest.mark.parametrize(("kind", "to"), [("gru-lm", "torch"), ("gru-lm", "keras"), ("gpt2", "hf-gpt2")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_run_with_a_padded_vocabulary_comes_back_bit_by_bit(tmp_path, kind, to, tied):
    """The rows that pad it begin at zero, and neither a gradient nor weight decay moves them."""
    options = {"model.kind": kind, "model.layers": 1, "model.hidden": 8, "model.embedding": 0}
    options |= {"model.tied": tied, "model.vocab_padding": 64, "train.steps": 3, "train.seq_len": 8}
    options |= {"optimizer.name": "adamw", "optimizer.weight_decay": 0.1, "train.label_smoothing": 0.1}
    options |= {"train.batch_size": 2, "train.eval_every": 0, "train.eval_tokens": 50}
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog.\n" * 9)
    options |= {"data.files": [str(tmp_path / "text.txt")], "run.threads": 1}
    train(load_config(options=options), tmp_path / "run")
    export_checkpoint(tmp_path / "run", to, tmp_path / f"a{suffix(to)}")
    settings = {"model.vocab_padding": 64} if to == "hf-gpt2" else {}
    import_file(tmp_path / f"a{suffix(to)}", kind, tmp_path / "b.h5", settings=settings)
    assert load_checkpoint(tmp_path / "b.h5").model["embedding.weight"].shape == (128, 8)
    assert compare(tmp_path / "run", tmp_path / "b.h5").identical


def test_two_biases_become_one_only_where_their_sum_is_exact(tmp_path, capsys):
    save(tmp_path / "a.h5", reset_after=False)
    err = refused(capsys, "export", tmp_path / "a.h5", "--to", "keras", "-o", tmp_path / "a.npz")
    assert "a.h5: gru.0: Keras has one bias" in err
    assert "not exact" in err
    checkpoint = load_checkpoint(tmp_path / "a.h5")
    for layer in range(2):
        checkpoint.model[f"gru.{layer}.bias_ih"][:] = np.arange(18) / 8
        checkpoint.model[f"gru.{layer}.bias_hh"][:] = 0.5
    save_checkpoint(tmp_path / "b.h5", checkpoint)
    export_checkpoint(tmp_path / "b.h5", "keras", tmp_path / "b.npz")
    assert np.array_equal(
        read_tensors(tmp_path / "b.npz").tensors["gru.1.bias"],
        swap_gates(np.arange(18, dtype="<f4") / 8 + 0.5),
    )


def test_a_negative_zero_survives_the_sum_of_biases(tmp_path):
    save(tmp_path / "a.h5", reset_after=False)
    checkpoint = load_checkpoint(tmp_path / "a.h5")
    for layer in range(2):
        checkpoint.model[f"gru.{layer}.bias_ih"][:] = -0.0
        checkpoint.model[f"gru.{layer}.bias_hh"][:] = 0
    save_checkpoint(tmp_path / "a.h5", checkpoint)
    export_checkpoint(tmp_path / "a.h5", "keras", tmp_path / "a.npz")
    assert np.signbit(read_tensors(tmp_path / "a.npz").tensors["gru.0.bias"]).all()


def test_a_trained_run_is_exported_by_its_newest_checkpoint(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    save(tmp_path / "run" / "checkpoints" / "step-00000000.h5")
    facts = export_checkpoint(tmp_path / "run", "torch", tmp_path / "a.safetensors")
    assert facts["checkpoint"].endswith("step-00000000.h5")
    assert facts["numbers"] == sum(a.size for a in read_tensors(tmp_path / "a.safetensors").tensors.values())


# --- against other programs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_torch_computes_the_same_logits_from_an_export(tmp_path, model):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    class GRUModel(torch.nn.Module):
        def __init__(self, vocab, embedding, hidden, layers, tied):
            super().__init__()
            self.embedding = torch.nn.Embedding(vocab, embedding)
            self.gru = torch.nn.GRU(embedding, hidden, layers)
            self.classifier = torch.nn.Linear(hidden, vocab)
            if tied:
                self.classifier.weight = self.embedding.weight

        def forward(self, ids):
            return self.classifier(self.gru(self.embedding(ids))[0])

    save(tmp_path / "a.h5", **model)
    export_checkpoint(tmp_path / "a.h5", "torch", tmp_path / "a.safetensors")
    config = load_checkpoint(tmp_path / "a.h5").config.model
    theirs = GRUModel(11, config.embedding or 6, 6, config.layers, config.tied)
    theirs.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=True)
    ids = np.random.default_rng(0).integers(0, 11, (7, 3))
    ours = family("gru-lm").Model(config)
    for name, array in load_checkpoint(tmp_path / "a.h5").model.items():
        ours.arena.param[name][...] = array
    logits, _, _ = ours.forward(ids)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)).numpy()
    assert np.abs(logits - expected).max() <= 1e-6

    # and back: a state dict that torch wrote
    st.save_file(
        {name: array.numpy() for name, array in theirs.state_dict().items()}, tmp_path / "t.safetensors"
    )
    import_file(tmp_path / "t.safetensors", "gru-lm", tmp_path / "t.h5")
    back = load_checkpoint(tmp_path / "t.h5").model
    assert all(np.array_equal(back[name], array) for name, array in ours.arena.param.items())


def keras_gru(x, kernel, recurrent_kernel, bias):
    """One layer as the documentation of keras.layers.GRU has it: z, r, h, and h_t = z·h + (1 − z)·hh."""
    sigmoid = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    reset_after = bias.ndim == 2
    H = len(recurrent_kernel)
    h, outputs = np.zeros((x.shape[1], H)), []
    for x_t in x:
        x_z, x_r, x_h = np.split(x_t @ kernel + (bias[0] if reset_after else bias), 3, axis=1)
        if reset_after:
            h_z, h_r, h_h = np.split(h @ recurrent_kernel + bias[1], 3, axis=1)
            z, r = sigmoid(x_z + h_z), sigmoid(x_r + h_r)
            hh = np.tanh(x_h + r * h_h)
        else:
            z = sigmoid(x_z + h @ recurrent_kernel[:, :H])
            r = sigmoid(x_r + h @ recurrent_kernel[:, H : 2 * H])
            hh = np.tanh(x_h + (r * h) @ recurrent_kernel[:, 2 * H :])
        h = z * h + (1 - z) * hh
        outputs.append(h)
    return np.stack(outputs)


@pytest.mark.parametrize("reset_after", [True, False])
def test_the_equations_of_keras_give_the_same_logits(tmp_path, reset_after):
    save(tmp_path / "a.h5", reset_after=reset_after)
    checkpoint = load_checkpoint(tmp_path / "a.h5")
    if not reset_after:
        for layer in range(2):
            checkpoint.model[f"gru.{layer}.bias_hh"][:] = 0
        save_checkpoint(tmp_path / "a.h5", checkpoint)
    export_checkpoint(tmp_path / "a.h5", "keras", tmp_path / "a.npz")
    file = {
        name: array.astype(np.float64) for name, array in read_tensors(tmp_path / "a.npz").tensors.items()
    }
    ids = np.random.default_rng(0).integers(0, 11, (7, 3))
    x = file["embedding.embeddings"][ids]
    for layer in range(2):
        x = keras_gru(x, *(file[f"gru.{layer}.{name}"] for name in ("kernel", "recurrent_kernel", "bias")))
    expected = x @ file["classifier.kernel"] + file["classifier.bias"]
    model = family("gru-lm").Model(checkpoint.config.model, dtype=np.float64)
    for name, array in checkpoint.model.items():
        model.arena.param[name][...] = array
    logits, _, _ = model.forward(ids)
    assert np.abs(logits - expected).max() <= 1e-12


# --- what is refused ----------------------------------------------------------------------------------------


class Sentinel:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def pickles(folder):
    bomb = Sentinel(folder / "sentinel")
    (folder / "plain.pkl").write_bytes(pickle.dumps({"w": bomb}))
    (folder / "old.bin").write_bytes(pickle.dumps({"w": bomb}, protocol=0))
    (folder / "weights.safetensors").write_bytes(pickle.dumps({"w": bomb}))
    (folder / "odd.pth").write_bytes(b"anything")
    np.savez(folder / "object.npz", **{"gru.0.weight_hh": np.array([bomb], object)})
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bomb))
        archive.writestr("archive/data/0", b"1234")
    return sorted(path for path in folder.iterdir())


def test_pickles_are_refused_and_never_run(tmp_path, capsys):
    """C03: whatever the file is called."""
    (tmp_path / "in").mkdir()
    files = pickles(tmp_path / "in")
    assert len(files) == 6
    for file in files:
        err = refused(capsys, "import", file, "--as", "gru-lm", "-o", tmp_path / "x.h5")
        assert f"{file}: " in err
        assert "pickle" in err
        assert "docs/exchange.md" in err
        assert "pickle" in refused(capsys, "diff", file, file)
    assert sorted((tmp_path / "in").iterdir()) == files
    assert not (tmp_path / "x.h5").exists()


def test_a_file_of_torch_save_is_refused(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    torch.save({"gru.weight_hh_l0": torch.ones(3, 1)}, tmp_path / "model.pt")
    err = refused(capsys, "import", tmp_path / "model.pt", "--as", "gru-lm", "-o", tmp_path / "x.h5")
    assert "a PyTorch file with a pickle inside" in err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "neither a safetensors nor an npz file"),
        (b"some text, much like a README file", "neither a safetensors nor an npz file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file; a gru-ref checkpoint needs no import"),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'", "a single .npy array"),
        (b"\x20\0\0\0\0\0\0\0{" + bytes(40), "not a sound safetensors file"),
        (b"PK\x03\x04" + bytes(40), "not a sound npz file"),
    ],
)
def test_a_file_of_another_format_is_refused_with_its_name(tmp_path, capsys, content, reason):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    err = refused(capsys, "import", file, "--as", "gru-lm", "-o", tmp_path / "x.h5")
    assert f"{file}: {reason}" in err


def test_a_damaged_file_is_refused_or_read_as_it_was(tmp_path):
    """C01 for these formats: cut and spliced files end in UsageError, never in another exception."""
    save(tmp_path / "a.h5")
    for to in ("torch", "keras"):
        file = tmp_path / f"a{suffix(to)}"
        export_checkpoint(tmp_path / "a.h5", to, file)
        good, whole = file.read_bytes(), read_tensors(file).tensors
        rng = np.random.default_rng(0)
        for cut in (1, 8, 96, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:cut])
            with pytest.raises(UsageError):
                read_tensors(file)
        for position in rng.integers(0, len(good), 150):
            changed = bytearray(good)
            changed[position] ^= 1 << rng.integers(0, 8)
            file.write_bytes(changed)
            try:
                read = read_tensors(file)
            except UsageError:
                continue
            if to == "keras":  # a zip has a checksum of everything but its own structure
                assert all(np.array_equal(read.tensors[name], whole[name]) for name in read.tensors)


@pytest.mark.parametrize(("offset", "value"), [(8, 1), (10, 14)], ids=["encrypted", "lzma"])
def test_a_zip_that_no_npz_is_ends_in_one_line(tmp_path, offset, value):
    np.savez(tmp_path / "x.npz", w=np.ones(3))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[content.index(b"PK\x01\x02") + offset] = value  # in the archive's directory
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(UsageError, match=r"x.npz: not an? (sound )?npz file"):
        read_tensors(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }", "do not hold"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", "a pickle"),
        ("{'descr': '<c8', 'fortran_order': False, 'shape': (1,), }", "dtype complex64"),
        ("{'descr': '|S8', 'fortran_order': False, 'shape': (1,), }", "expected plain numbers"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", "do not hold"),
        ("__import__('os')", "not a sound npz file"),
    ],
)
def test_an_npz_member_is_judged_by_its_header(tmp_path, header, reason):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        text = header.encode().ljust(117) + b"\n"
        archive.writestr("w.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8))
    with pytest.raises(UsageError, match=reason):
        read_tensors(tmp_path / "x.npz")


def altered(tmp_path, changes):
    """A state dict of torch's with some tensors changed (None takes one away), without our metadata."""
    weights = save(tmp_path / "a.h5")
    tensors = {re.sub(r"gru\.(\d)\.(\w+)", r"gru.\2_l\1", name): a.copy() for name, a in weights.items()}
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors.get(name))
    file = tmp_path / "altered.npz"
    np.savez(file, **tensors)
    return file


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"gru.bias_hh_l1": None},
            "missing gru.bias_hh_l1; where the model has no such bias, write zeros (docs/exchange.md)",
        ),
        ({"classifier.weight": None}, "missing classifier.weight\n"),
        ({"classifier.weight": None, "gru.bias_ih_l0": None}, "missing gru.bias_ih_l0, classifier.weight"),
        ({"embedding.weight": None}, "missing embedding.weight"),
        ({"zzz": lambda _: np.ones(3, "f4")}, "not expected zzz"),
        ({"gru.weight_ih_l0_reverse": lambda _: np.ones(3, "f4")}, "not expected gru.weight_ih_l0_reverse"),
        ({"gru.bias_hh_l1": lambda a: a[:1]}, "gru.bias_hh_l1: shape (1,), expected (18,)"),
        ({"gru.weight_ih_l0": lambda a: a.T}, "gru.weight_ih_l0: shape (4, 18), expected (18, 4)"),
        ({"gru.bias_hh_l1": lambda a: a[0]}, "gru.bias_hh_l1: shape (), expected (18,)"),
        ({"gru.bias_hh_l1": lambda a: a[:0]}, "gru.bias_hh_l1: shape (0,), expected (18,)"),
        ({"gru.weight_hh_l1": lambda a: a[:, None]}, "gru.weight_hh_l1: shape (18, 1, 6), expected (18, 6)"),
        ({"classifier.weight": lambda a: a[:-1]}, "classifier.weight: shape (10, 6), expected (11, 6)"),
        ({"classifier.bias": lambda a: a.astype("i4")}, "classifier.bias: dtype int32, expected float32"),
        ({"classifier.bias": lambda a: a + np.float32(np.nan)}, "classifier.bias: 11 NaN and 0 Inf"),
        (
            {"classifier.bias": lambda a: a.astype("f8") * 1e300},
            "classifier.bias: 11 values are too large for float32, which ends at 3.4e38, the first at [0]",
        ),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(tmp_path, capsys, changes, reason):
    """C02 and C03: nothing is broadcast, nothing left out in silence."""
    file = altered(tmp_path, changes)
    err = refused(capsys, "import", file, "--as", "gru-lm", "-o", tmp_path / "x.h5")
    assert f"{file}: {reason}" in err
    assert not (tmp_path / "x.h5").exists()


@pytest.mark.parametrize(
    ("dtype", "notice"),
    [
        ("<f8", "11 tensors of float64 became float32, exactly"),
        (">f4", "11 tensors of big-endian float32 became float32, exactly"),
        ("<f2", "11 tensors of float16 became float32, exactly"),
    ],
)
def test_another_dtype_is_cast_with_a_notice(tmp_path, capsys, dtype, notice):
    """C03: exactly where the values allow it, and the notice says so."""
    save(tmp_path / "a.h5")
    export_checkpoint(tmp_path / "a.h5", "torch", tmp_path / "a.safetensors")
    tensors = {n: a.astype(dtype) for n, a in read_tensors(tmp_path / "a.safetensors").tensors.items()}
    np.savez(tmp_path / "b.npz", **tensors)
    code, _, err = run(capsys, "import", tmp_path / "b.npz", "--as", "gru-lm", "-o", tmp_path / "b.h5")
    assert (code, err) == (0, f"gru-ref: notice: {notice}\n")
    loaded = load_checkpoint(tmp_path / "b.h5").model["classifier.bias"]
    assert np.array_equal(loaded, tensors["classifier.bias"].astype("<f4"))
    assert loaded.dtype == np.dtype("<f4")


def test_rounded_values_are_counted_and_measured(tmp_path):
    file = altered(tmp_path, {"classifier.bias": lambda a: np.arange(11) + 2.0**-30})
    facts = import_file(file, "gru-lm", tmp_path / "x.h5")
    assert facts["notices"] == [
        "1 tensor of float64 became float32, 1 of them rounded, by at most 9.3e-10 of a value"
    ]


def test_bfloat16_is_read_exactly(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save(tmp_path / "a.h5")
    export_checkpoint(tmp_path / "a.h5", "torch", tmp_path / "a.safetensors")
    tensors = {
        n: torch.from_numpy(a.copy()).bfloat16()
        for n, a in read_tensors(tmp_path / "a.safetensors").tensors.items()
    }
    save_file(tensors, tmp_path / "b.safetensors")
    facts = import_file(tmp_path / "b.safetensors", "gru-lm", tmp_path / "b.h5")
    assert facts["notices"] == ["11 tensors of bfloat16 became float32, exactly"]
    loaded = load_checkpoint(tmp_path / "b.h5").model
    assert np.array_equal(loaded["gru.1.weight_hh"], tensors["gru.weight_hh_l1"].float().numpy())


def test_a_tied_classifier_must_be_the_embedding(tmp_path):
    save(tmp_path / "a.h5", tied=True, embedding=6)
    export_checkpoint(tmp_path / "a.h5", "torch", tmp_path / "a.safetensors")
    content = read_tensors(tmp_path / "a.safetensors")
    content.tensors["classifier.weight"] = content.tensors["classifier.weight"] + 1
    write_tensors(tmp_path / "b.safetensors", content.tensors, content.metadata)
    with pytest.raises(UsageError, match=r"classifier.weight differs from the embedding.weight"):
        import_file(tmp_path / "b.safetensors", "gru-lm", tmp_path / "b.h5")
    del content.tensors["classifier.weight"]  # what safetensors' save_model leaves out
    write_tensors(tmp_path / "c.safetensors", content.tensors, {})
    with pytest.raises(UsageError, match=r"missing classifier.weight"):
        import_file(tmp_path / "c.safetensors", "gru-lm", tmp_path / "c.h5")
    facts = import_file(
        tmp_path / "c.safetensors", "gru-lm", tmp_path / "c.h5", settings={"model.tied": "true"}
    )
    assert facts["model"]["tied"] is True


# --- settings and names -------------------------------------------------------------------------------------


def test_what_a_file_does_not_tell_must_be_set(tmp_path, capsys):
    weights = save(tmp_path / "a.h5", reset_after=False)
    np.savez(tmp_path / "own.npz", **weights)
    arguments = ("import", tmp_path / "own.npz", "--as", "gru-lm", "-o", tmp_path / "b.h5")
    assert "own.npz: does not tell model.reset_after; give it with --set" in refused(capsys, *arguments)
    code, out, _ = run(capsys, *arguments, "--set", "model.reset_after=false", "--json")
    assert code == 0
    assert json.loads(out)["model"]["reset_after"] is False


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("model.hiden=3", "unknown key 'model.hiden'; did you mean 'model.hidden'?"),
        ("model.layers=3", "missing gru.weight_ih_l2"),
        ("model.layers", "write it with a ="),
        ("data.tokenizer=ascii100", "11 rows for the 100 tokens of tokenizer 'ascii100'; they do not"),
        ("schedule.min_lr=1", "schedule.min_lr 1 is above schedule.lr"),
    ],
)
def test_a_setting_that_contradicts_the_file_is_refused(tmp_path, capsys, setting, reason):
    file = altered(tmp_path, {})
    err = refused(capsys, "import", file, "--as", "gru-lm", "-o", tmp_path / "x.h5", "--set", setting)
    assert reason in err


def test_a_vocabulary_travels_with_the_file_or_is_given(tmp_path, capsys):
    definition = {"tokens": [*bpe.ALPHABET, "Ġt", "he", "Ġthe"], "merges": ["Ġ t", "h e", "Ġt he"]}
    save(tmp_path / "a.h5", vocab_size=259)
    checkpoint = load_checkpoint(tmp_path / "a.h5")
    config = checkpoint.config.replace("data", tokenizer="bpe")
    save_checkpoint(tmp_path / "b.h5", dataclasses.replace(checkpoint, config=config, tokenizer=definition))
    for to in ("torch", "keras"):
        file = tmp_path / f"b{suffix(to)}"
        export_checkpoint(tmp_path / "b.h5", to, file)
        import_file(file, "gru-lm", tmp_path / f"{to}.h5")
        back = load_checkpoint(tmp_path / f"{to}.h5")
        assert (back.tokenizer, back.config) == (definition, config)

    bare, folder = tmp_path / "bare.safetensors", tmp_path / "vocab"
    write_tensors(bare, read_tensors(tmp_path / "b.safetensors").tensors, {})
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(definition["tokens"])}))
    (folder / "merges.txt").write_text("\n".join(definition["merges"]))
    arguments = ("import", bare, "--as", "gru-lm", "-o", tmp_path / "c.h5")
    assert run(capsys, *arguments, "--set", f"data.vocab={folder}")[0] == 0
    assert load_checkpoint(tmp_path / "c.h5").tokenizer == definition
    assert run(capsys, "verify", "--quiet", tmp_path / "c.h5")[0] == 0
    arguments = ("import", altered(tmp_path, {}), "--as", "gru-lm", "-o", tmp_path / "d.h5")
    err = refused(capsys, *arguments, "--set", f"data.vocab={folder}")
    assert (
        "altered.npz: has 11 rows for the 259 tokens of tokenizer 'bpe'; they do not belong together" in err
    )
    assert "needs a vocabulary" in refused(capsys, *arguments, "--set", "data.tokenizer=bpe")


def test_a_run_in_fp16_comes_back_with_its_loss_scale(tmp_path):
    save(tmp_path / "a.h5")
    checkpoint = load_checkpoint(tmp_path / "a.h5")
    config = checkpoint.config.replace("run", precision="fp16").replace("optimizer", name="adamw")
    trainer = checkpoint.trainer | {"loss_scale": 4.0, "loss_scale_good_steps": 7}
    changed = dataclasses.replace(checkpoint, config=config, trainer=trainer, optimizer={"step": 0})
    save_checkpoint(tmp_path / "b.h5", changed)
    export_checkpoint(tmp_path / "b.h5", "npz", tmp_path / "b.npz")
    import_file(tmp_path / "b.npz", "gru-lm", tmp_path / "c.h5")
    back = load_checkpoint(tmp_path / "c.h5")
    assert (back.config, back.optimizer) == (config, {"step": 0})
    assert back.trainer["loss_scale"] == config.train.loss_scale


def test_other_beginnings_of_names_are_renamed(tmp_path, capsys):
    file = altered(tmp_path, {})
    tensors = read_tensors(file).tensors
    swap = {"embedding.": "module.emb.", "gru.": "module.rnn.", "classifier.": "module.fc."}
    foreign = {
        next(new + n[len(old) :] for old, new in swap.items() if n.startswith(old)): a
        for n, a in tensors.items()
    }
    np.savez(tmp_path / "foreign.npz", **foreign)
    arguments = ("import", tmp_path / "foreign.npz", "--as", "gru-lm", "-o", tmp_path / "b.h5")
    err = refused(capsys, *arguments)
    assert "not a gru-lm in a known layout; it holds module.emb.weight" in err
    assert "--rename OLD=NEW" in err
    assert "no tensor's name begins with 'rnn.'" in refused(capsys, *arguments, "--rename", "rnn.=gru.")
    both = ("--rename", "module.emb.=w.", "--rename", "module.fc.=w.")
    assert "two tensors would have one name" in refused(capsys, *arguments, *both)
    renames = [word for old, new in swap.items() for word in ("--rename", f"{new}={old}")]
    assert run(capsys, *arguments, *renames)[0] == 0
    assert np.array_equal(
        load_checkpoint(tmp_path / "b.h5").model["gru.1.bias_hh"], tensors["gru.bias_hh_l1"]
    )


def test_the_bare_state_dict_of_a_gru_is_refused_and_its_names_can_be_renamed(tmp_path, capsys):
    """docs/exchange.md: without embedding and classifier it is no language model."""
    tensors = read_tensors(altered(tmp_path, {})).tensors
    bare = {name.removeprefix("gru."): array for name, array in tensors.items()}
    inner = {name: array for name, array in bare.items() if "_l" in name}
    renames = ("--rename", "weight_=gru.weight_", "--rename", "bias_=gru.bias_")
    for file, content in (("inner.npz", inner), ("bare.npz", bare)):
        np.savez(tmp_path / file, **content)
        arguments = ("import", tmp_path / file, "--as", "gru-lm", "-o", tmp_path / "b.h5")
        assert "not a gru-lm in a known layout; it holds bias_hh_l0" in refused(capsys, *arguments)
    arguments = ("import", tmp_path / "inner.npz", "--as", "gru-lm", "-o", tmp_path / "b.h5")
    err = refused(capsys, *arguments, *renames)
    assert "inner.npz: missing embedding.weight, classifier.weight, classifier.bias" in err
    arguments = ("import", tmp_path / "bare.npz", "--as", "gru-lm", "-o", tmp_path / "b.h5")
    assert run(capsys, *arguments, *renames)[0] == 0
    assert compare(tmp_path / "a.h5", tmp_path / "b.h5").identical


def test_a_model_of_another_kind_is_refused(tmp_path, capsys):
    save(tmp_path / "a.h5")
    out = ("-o", tmp_path / "out")
    assert "kind gru-lm cannot be laid out as hf-gpt2" in refused(
        capsys, "export", tmp_path / "a.h5", "--to", "hf-gpt2", *out
    )
    save(tmp_path / "b.h5", reset_after=False)
    out = ("-o", tmp_path / "b.safetensors")
    assert "has no reset_after=false" in refused(capsys, "export", tmp_path / "b.h5", "--to", "torch", *out)
    export_checkpoint(tmp_path / "a.h5", "torch", tmp_path / "a.safetensors")
    arguments = ("--as", "gpt2", "-o", tmp_path / "x.h5")
    assert "not a gpt2 in a known layout" in refused(capsys, "import", tmp_path / "a.safetensors", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_hostile_configuration_in_the_metadata_is_refused(tmp_path):
    file = altered(tmp_path, {})
    tensors = read_tensors(file).tensors
    for metadata, reason in (
        ({"config": 1}, "not a JSON object"),
        ({"config": {"model": {"layers": 10**9}}}, "model.layers must be at least 1 and at most"),
        ({"config": {"model": {"kind": "../x"}}}, "model.kind must be one of"),
        ({"config": {"model": {"kind": "gpt2"}}}, "it is a gpt2; import it --as gpt2"),
        (
            {"config": {"model": {"hidden": 2**20, "layers": 10_000, "vocab_size": 11}}},
            "missing gru.weight_ih_l2",
        ),
    ):
        write_tensors(tmp_path / "b.npz", tensors, metadata, overwrite=True)
        with pytest.raises(UsageError, match=reason):
            import_file(tmp_path / "b.npz", "gru-lm", tmp_path / "x.h5")


# --- a vocabulary that another program padded ---------------------------------------------------------------


def padded_file(tmp_path, to):
    """A foreign file with 16 rows for 11 tokens, the others full of noise; the weights it should give."""
    save(tmp_path / "a.h5", vocab_padding=8)
    export_checkpoint(tmp_path / "a.h5", to, tmp_path / f"whole{suffix(to)}")
    tensors = read_tensors(tmp_path / f"whole{suffix(to)}").tensors
    rng = np.random.default_rng(0)

    def longer(a):
        return np.concatenate([a, rng.standard_normal((5, *a.shape[1:])).astype("<f4")])

    for name in ("embedding.weight", "embedding.embeddings", "classifier.weight", "classifier.bias"):
        if name in tensors:
            tensors[name] = longer(tensors[name])
    if to == "keras":
        tensors["classifier.kernel"] = longer(tensors["classifier.kernel"].T).T
    np.savez(tmp_path / "padded.npz", **tensors)
    return tmp_path / "padded.npz", load_checkpoint(tmp_path / "a.h5").model


@pytest.mark.parametrize("to", ["torch", "keras"])
def test_rows_that_pad_a_foreign_vocabulary_are_left_out_when_the_settings_say_so(tmp_path, capsys, to):
    file, expected = padded_file(tmp_path, to)
    settings = ("--set", "model.vocab_size=11", "--set", "model.vocab_padding=8")
    code, _, err = run(capsys, "import", file, "--as", "gru-lm", "-o", tmp_path / "b.h5", *settings)
    assert (code, err) == (
        0,
        "gru-ref: notice: rows 11 to 15 only pad the vocabulary: zeros took their place\n",
    )
    back = load_checkpoint(tmp_path / "b.h5")
    assert (back.config.model.vocab_size, back.config.model.vocab_padding) == (11, 8)
    assert all(np.array_equal(back.model[name], array) for name, array in expected.items())
    for pair in ((tmp_path / "b.h5", file), (file, tmp_path / "b.h5")):
        result = compare(*pair)
        assert result.identical
        assert "rows from 11 on only pad the vocabulary of one of them; not compared" in result.notes


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            ["model.vocab_size=11"],
            "has 16 rows for 11 tokens; where the others only pad the vocabulary, say ",
        ),
        (["model.vocab_size=11", "model.vocab_padding=7"], "has 16 rows for 11 tokens"),
        (["model.vocab_size=17"], "embedding.weight: shape (16, 4), expected (17, 4)"),
    ],
)
def test_a_number_of_rows_that_nothing_explains_is_refused_with_a_way_out(tmp_path, capsys, settings, reason):
    """Nor are rows cut off in silence: the padding must give the number that is there."""
    file, _ = padded_file(tmp_path, "torch")
    options = [word for setting in settings for word in ("--set", setting)]
    arguments = ("import", file, "--as", "gru-lm", "-o", tmp_path / "b.h5")
    err = refused(capsys, *arguments, *options)
    assert f"{file}: " in err
    assert reason in err
    if "say" in reason:  # the way out is one
        way = re.search(r"say (--set \S+) (--set \S+)\n", err)
        assert run(capsys, *arguments, *way[1].split(), *way[2].split())[0] == 0
    assert run(capsys, *arguments, "--force", "--set", "model.vocab_size=0")[0] == 0  # as the file says
    assert load_checkpoint(tmp_path / "b.h5").config.model.vocab_size == 16


@pytest.mark.parametrize(
    ("vocab_size", "rows", "padding"),
    [(50257, 50304, 64), (1000, 1024, 32), (11, 16, 8), (11, 17, 17), (3, 4, 2), (1, 65536, 65536)],
)
def test_the_way_out_names_a_padding_that_gives_these_rows(vocab_size, rows, padding):
    assert f"model.vocab_padding={padding}" in _way_out(vocab_size, rows)
    assert padded_vocab(ModelConfig(vocab_size=vocab_size, vocab_padding=padding)) == rows


def test_a_vocabulary_beyond_uint16_is_refused_with_the_reason(tmp_path, capsys):
    tensors = {name: np.array(value, "<f4") for name, value in TORCH.items()}
    rows = np.ones((2**16 + 1, 1), "<f4")
    tensors |= {"embedding.weight": rows, "classifier.weight": -rows, "classifier.bias": rows[:, 0]}
    np.savez(tmp_path / "x.npz", **tensors)
    err = refused(capsys, "import", tmp_path / "x.npz", "--as", "gru-lm", "-o", tmp_path / "x.h5")
    assert "x.npz: a vocabulary of 65,537 cannot be imported: token ids are uint16 here" in err


# --- the vocabulary of a bpe, outward -----------------------------------------------------------------------

BOOK = "It's the end, isn't it? 12 345 été\u00a0漢字 \n\n  the  end\tof the <|endoftext|> [x] " * 20


def save_with_bpe(tmp_path, kind, special=("<|endoftext|>", "[x]", "END")):
    """A checkpoint whose vocabulary has two merges and special tokens of every look."""
    tokens = [*special[:1], *bpe.ALPHABET, "Ġt", *special[1:], "he", "Ġthe"]
    definition = {"tokens": tokens, "merges": ["Ġ t", "h e", "Ġt he"]}
    save(tmp_path / "plain.h5", kind=kind, vocab_size=len(tokens), **({} if kind == "gru-lm" else GPT2_SHAPE))
    checkpoint = load_checkpoint(tmp_path / "plain.h5")
    config = checkpoint.config.replace("data", tokenizer="bpe")
    save_checkpoint(tmp_path / "a.h5", dataclasses.replace(checkpoint, config=config, tokenizer=definition))
    return bpe.BPE(definition)


@pytest.mark.parametrize(
    ("kind", "to", "output", "vocabulary"),
    [
        ("gpt2", "hf-gpt2", "gpt", "gpt/tokenizer.json"),
        ("gpt2", "hf-gpt2", "gpt.safetensors", "tokenizer.json"),
        ("gru-lm", "torch", "a.safetensors", "a.safetensors.tokenizer.json"),
        ("gru-lm", "keras", "a.npz", "a.npz.tokenizer.json"),
    ],
)
def test_the_vocabulary_goes_out_beside_the_weights(tmp_path, capsys, kind, to, output, vocabulary):
    """And our own --vocab reads it back to the same ids; so does the tokenizers library."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = save_with_bpe(tmp_path, kind)
    arguments = ("export", tmp_path / "a.h5", "--to", to, "-o", tmp_path / output)
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    assert json.loads(out)["files"][-1] == str(tmp_path / vocabulary)
    assert bpe.load(str(tmp_path / vocabulary)).fingerprint() == tokenizer.fingerprint()
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / vocabulary))
    plain, special = BOOK.replace("<|endoftext|>", "").replace("[x]", ""), tokenizer.with_special_tokens()
    assert theirs.encode(plain).ids == tokenizer.encode(plain.encode()).tolist()
    assert theirs.decode(theirs.encode(plain).ids) == plain
    assert theirs.encode(BOOK + "END").ids == special.encode((BOOK + "END").encode()).tolist()
    (tmp_path / output).unlink() if (tmp_path / output).is_file() else None
    first = (tmp_path / vocabulary).read_bytes()
    assert "already exists" in refused(capsys, *arguments)
    assert run(capsys, *arguments, "--force")[0] == 0
    assert (tmp_path / vocabulary).read_bytes() == first


@pytest.mark.parametrize("to", ["safetensors", "npz"])
def test_our_own_files_hold_the_vocabulary_inside(tmp_path, to):
    save_with_bpe(tmp_path, "gru-lm")
    facts = export_checkpoint(tmp_path / "a.h5", to, tmp_path / f"b{suffix(to)}")
    assert facts["files"] == [str(tmp_path / f"b{suffix(to)}")]


# --- several files, and what their index may say ------------------------------------------------------------


def sharded(tmp_path, changes=None):
    """A folder of Hugging Face's, with the tensors in two files; {} of the weights."""
    save(tmp_path / "a.h5", kind="gpt2", **GPT2_SHAPE)
    export_checkpoint(tmp_path / "a.h5", "hf-gpt2", tmp_path / "hf")
    whole = tmp_path / "hf" / "model.safetensors"
    tensors = read_tensors(whole).tensors
    whole.unlink()
    homes = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(homes.values()):
        st.save_file(
            {n: np.ascontiguousarray(tensors[n]) for n in homes if homes[n] == file}, tmp_path / "hf" / file
        )
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": homes}))
    return tmp_path / "hf", index, homes


def test_a_model_in_several_files_is_read_by_its_index(tmp_path, capsys):
    folder, _, _ = sharded(tmp_path)
    assert run(capsys, "import", folder, "--as", "gpt2", "-o", tmp_path / "b.h5")[0] == 0
    assert compare(tmp_path / "a.h5", tmp_path / "b.h5").identical
    assert compare(tmp_path / "a.h5", folder).identical


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda homes, name: "not json", "cannot be read: "),
        (lambda homes, name: "[]", "not a JSON object"),
        (lambda homes, name: {"weight_map": 3}, "has no weight_map of names and files"),
        (lambda homes, name: {"weight_map": {name: 3}}, "has no weight_map of names and files"),
        (
            lambda homes, name: {"weight_map": {name: "../a.safetensors"}},
            "is not the name of a safetensors file",
        ),
        (lambda homes, name: {"weight_map": {name: "/etc/passwd"}}, "is not the name of a safetensors file"),
        (
            lambda homes, name: {"weight_map": {name: "a\0.safetensors"}},
            "is not the name of a safetensors file",
        ),
        (lambda homes, name: {"weight_map": {name: "pytorch_model.bin"}}, "is not the name of a safetensors"),
        (
            lambda homes, name: {"weight_map": homes | {"w": homes[name]}},
            "lacks w, which model.safetensors.index",
        ),
        (
            lambda homes, name: {"weight_map": homes | {"w": "no.safetensors"}},
            "no.safetensors: cannot be read",
        ),
        (
            lambda homes, name: {"weight_map": {n: f for n, f in homes.items() if n != name}},
            "does not say that transformer.wte.weight is in model-",
        ),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, capsys, change, reason):
    folder, index, homes = sharded(tmp_path)
    value = change(homes, "transformer.wte.weight")
    index.write_text(value if isinstance(value, str) else json.dumps(value))
    err = refused(capsys, "import", folder, "--as", "gpt2", "-o", tmp_path / "b.h5")
    assert str(folder) in err
    assert reason in err


# --- names and metadata that were made to confuse -----------------------------------------------------------


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 400, "99999", "٣", "²", "-1", "00"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gru-lm", "gru.weight_hh_l{}"),
        ("gru-lm", "gru.{}.recurrent_kernel"),
        ("gru-lm", "gru.{}.weight_hh"),
        ("gpt2", "block.{}.ln_1.weight"),
        ("gpt2", "transformer.h.{}.ln_1.weight"),
        ("gpt2", "h.{}.ln_1.weight"),
        ("gpt2", "h.{}.attn.bias"),
    ],
)
def test_a_layer_is_numbered_by_a_few_plain_digits(tmp_path, capsys, kind, name, digits):
    """Alone or beside a sound file, an odd number ends in one line of a length that can be read."""
    file, tensor = tmp_path / "x.safetensors", {name.format(digits): np.ones((3, 1), "<f4")}
    for tensors in (tensor, {n: np.array(v, "<f4") for n, v in TORCH.items()} | tensor):
        st.save_file(tensors, file)
        err = refused(capsys, "import", file, "--as", kind, "-o", tmp_path / "x.h5")
        assert f"{file}: " in err
        assert len(err) < 1000 + len(str(file))
        assert cli.run(["diff", str(file), str(file)]) == (0 if len(digits) < 5000 else 2)
        capsys.readouterr()


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"data": 7}, "the data in its metadata is not a JSON object"),
        ({"data": ["a"]}, "the data in its metadata is not a JSON object"),
        ('{"data": {"x": 1e999}}', "its gru-ref metadata is not a JSON object"),
        ({"tokenizer": 7}, "the vocabulary is not an object of 'tokens' and 'merges'"),
        ({"tokenizer": {"tokens": ["a", "a"], "merges": []}}, "the vocabulary has a token twice"),
        ({"tokenizer": {"tokens": [*bpe.ALPHABET], "merges": []}}, "has 257 rows for the 256 tokens"),
        ({"config": {"schedule": {"min_lr": 1.0}}}, "schedule.min_lr 1 is above schedule.lr"),
        ({"config": {"model": {"heads": 7}}}, "model.heads is of gpt2 and not of gru-lm"),
        ({"config": {"data": {"tokenizer": "auto"}}}, "unknown tokenizer 'auto'"),
    ],
)
def test_metadata_that_cannot_be_names_the_file_that_holds_it(tmp_path, capsys, metadata, reason):
    """The input, not the output, and not the part alone."""
    save(tmp_path / "a.h5", vocab_size=257)
    export_checkpoint(tmp_path / "a.h5", "npz", tmp_path / "a.npz")
    content = read_tensors(tmp_path / "a.npz")
    sound = content.metadata
    sound["config"]["data"]["tokenizer"] = "bpe" if "tokenizer" in metadata else "ids"
    if isinstance(metadata, dict) and "config" in metadata:
        ((table, values),) = metadata["config"].items()
        metadata = {"config": sound["config"] | {table: sound["config"][table] | values}}
    text = metadata if isinstance(metadata, str) else json.dumps(sound | metadata)
    np.savez(tmp_path / "x.npz", **content.tensors, __metadata__=np.frombuffer(text.encode(), np.uint8))
    err = refused(capsys, "import", tmp_path / "x.npz", "--as", "gru-lm", "-o", tmp_path / "x.h5")
    assert f"{tmp_path / 'x.npz'}: {reason}" in err


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["torch", "keras"])
def test_a_file_is_replaced_only_when_asked_and_always_with_the_same_bytes(tmp_path, capsys, to):
    save(tmp_path / "a.h5")
    file = tmp_path / f"a{suffix(to)}"
    arguments = ("export", tmp_path / "a.h5", "--to", to, "-o", file)
    assert run(capsys, *arguments)[0] == 0
    first = file.read_bytes()
    file.write_bytes(b"mine")
    assert "already exists" in refused(capsys, *arguments)
    assert file.read_bytes() == b"mine"
    assert run(capsys, *arguments, "--force")[0] == 0
    assert file.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", file.name]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("export", "a.h5", "--to", "torch", "-o", "a.pt"), "a.pt: torch is written as .safetensors"),
        (("export", "a.h5", "--to", "npz", "-o", "folder"), "folder: npz is written as .npz"),
        (("export", "none.h5", "--to", "npz", "-o", "a.npz"), "none.h5: does not exist"),
        (("export", "a.h5", "--to", "npz", "-o", "folder.npz"), "folder.npz: is a folder"),
        (("import", "a.npz", "--as", "gru-lm", "-o", "a.bin"), "a.bin: a checkpoint is written as .h5"),
        (("import", "a.npz", "--as", "gru-lm", "-o", "a.h5"), "a.h5: already exists"),
        (("import", "none.npz", "--as", "gru-lm", "-o", "b.h5"), "none.npz: cannot be read: No such file"),
        (("import", "folder", "--as", "gru-lm", "-o", "b.h5"), "folder: holds no model.safetensors"),
        (("import", "/dev/null", "--as", "gru-lm", "-o", "b.h5"), "/dev/null: not a regular file"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path, capsys, monkeypatch, command, reason):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a.h5")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.npz").mkdir()
    assert reason in refused(capsys, *command)


@pytest.mark.parametrize(
    ("output", "command"),
    [
        ("o.npz", ("export", "a.h5", "--to", "npz")),
        ("o.safetensors", ("export", "a.h5", "--to", "torch")),
        ("o.npz", ("golden", "--op", "linear")),
        ("o.h5", ("import", "in.npz", "--as", "gru-lm")),
        ("o.h5", ("encode", "text.txt")),
    ],
)
def test_what_a_killed_process_left_of_a_file_goes_when_the_file_is_written_again(
    tmp_path, capsys, monkeypatch, output, command
):
    """And nothing else: neither a live process's, nor another file's, nor a file that only looks alike."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a.h5")
    export_checkpoint("a.h5", "npz", "in.npz")
    Path("text.txt").write_text("text")
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    gone = int(dead.stdout)
    stale = [f".{output}.{gone}.tmp", *([f".{output}.md5.{gone}.tmp"] if command[0] == "import" else [])]
    others = [
        f".{output}.{os.getppid()}.tmp",
        f".x{output}.{gone}.tmp",
        f"{output}.{gone}.tmp",
        f".{output}.x.tmp",
    ]
    before = {path.name for path in tmp_path.iterdir()}
    for name in (*stale, *others):
        Path(name).write_bytes(b"half")
    assert run(capsys, *command, "-o", output)[0] == 0
    after = {path.name for path in tmp_path.iterdir()} - {f"{output}.md5"}
    assert after == before | {output, *others}


@pytest.mark.parametrize("to", ["torch", "keras"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, to):
    save(tmp_path / "a.h5", hidden=64)
    file = tmp_path / f"a{suffix(to)}"
    file.write_bytes(b"old")

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = subprocess.run(
        [sys.executable, "-m", "gru_ref.cli", "export", "a.h5", "--to", to, "-o", file.name, "--force"],
        cwd=tmp_path,
        preexec_fn=limited,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"gru-ref: error: {file.name}: cannot be written: File too large\n",
    )
    assert file.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", file.name]


def test_without_safetensors_one_line_says_what_to_install(tmp_path, capsys, monkeypatch):
    save(tmp_path / "a.h5")
    export_checkpoint(tmp_path / "a.h5", "torch", tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    hint = "pip install 'gru-ref[interop]'"
    assert hint in refused(
        capsys, "import", tmp_path / "a.safetensors", "--as", "gru-lm", "-o", tmp_path / "b.h5"
    )
    assert hint in refused(
        capsys, "export", tmp_path / "a.h5", "--to", "torch", "-o", tmp_path / "b.safetensors"
    )
    assert run(capsys, "export", tmp_path / "a.h5", "--to", "npz", "-o", tmp_path / "b.npz")[0] == 0


def test_a_transposed_view_is_written_as_it_reads(tmp_path):
    """The library would write the memory behind it."""
    a = np.arange(6, dtype="<f4").reshape(2, 3)
    write_tensors(tmp_path / "a.safetensors", {"w": a.T, "s": a[:, 1], "scalar": np.float32(3)}, {})
    read = read_tensors(tmp_path / "a.safetensors").tensors
    assert read["w"].tolist() == a.T.tolist()
    assert read["s"].tolist() == [1, 4]
    assert read["scalar"].shape == ()


def test_an_imported_checkpoint_samples_and_evaluates(tmp_path, capsys):
    save(tmp_path / "a.h5", vocab_size=100)
    checkpoint = load_checkpoint(tmp_path / "a.h5")
    config = checkpoint.config.replace("data", tokenizer="ascii100")
    save_checkpoint(tmp_path / "a.h5", dataclasses.replace(checkpoint, config=config))
    export_checkpoint(tmp_path / "a.h5", "torch", tmp_path / "a.safetensors")
    bare = tmp_path / "bare.safetensors"
    write_tensors(bare, read_tensors(tmp_path / "a.safetensors").tensors, {})
    setting = ("--set", "data.tokenizer=ascii100")
    assert run(capsys, "import", bare, "--as", "gru-lm", "-o", tmp_path / "b.h5", *setting)[0] == 0
    assert run(capsys, "verify", "--quiet", tmp_path / "b.h5")[0] == 0
    (tmp_path / "text.txt").write_bytes(b"a few words " * 9)
    answers = []
    for name in ("a.h5", "b.h5"):
        code, sample, _ = run(capsys, "sample", tmp_path / name, "-n", "20", "--seed", "4")
        assert code == 0
        code, out, _ = run(capsys, "eval", tmp_path / name, "--data", tmp_path / "text.txt", "--json")
        assert code == 0
        answers.append((sample, json.loads(out)["loss"]))
    assert answers[0] == answers[1]


def test_import_is_a_command_although_python_reserves_the_word(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    commands = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert {"diff", "export", "golden", "import"} <= set(commands)
    assert run(capsys, "import_", "x")[0] == 2


def test_the_programs_of_the_page_run(tmp_path, monkeypatch):
    """docs/exchange.md: those for PyTorch in its order, that for Keras where it is installed."""
    torch = pytest.importorskip("torch")
    page = Path(__file__).resolve().parent.parent / "docs" / "exchange.md"
    programs = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len(programs) == 6
    save(tmp_path / "a.h5", layers=1, hidden=192, embedding=64, vocab_size=100)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    export_checkpoint("a.h5", "torch", "book.safetensors")
    export_checkpoint("a.h5", "keras", "book.npz")
    names = {}
    for program in programs:
        if "import keras" in program and importlib.util.find_spec("keras") is None:
            continue
        if "torch.load" in program:
            torch.save(names["model"].state_dict(), "mine.pt")
        if "transformers" not in program:  # test_parity_hf.py
            exec(compile(program, "exchange.md", "exec"), names)
        if "class GRUModel" in program:  # weights that lie in memory as a transpose, as after surgery
            with torch.no_grad():
                for parameter in names["model"].parameters():
                    if parameter.ndim == 2:
                        parameter.data = parameter.data.T.contiguous().T
    for file in [
        path
        for path in ("mine.safetensors", "parts.safetensors", "mine-too.safetensors", "mine.npz")
        if Path(path).exists()
    ]:
        import_file(file, "gru-lm", f"{file}.h5")
        assert compare("a.h5", f"{file}.h5").identical
