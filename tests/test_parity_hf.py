"""GPT-2 against Hugging Face's, moved over by export and import: logits, loss and every gradient."""

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from gru_ref import cli
from gru_ref.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from gru_ref.checkpoint.layout import SCALARS, Checkpoint
from gru_ref.checkpoint.restore import restore_model
from gru_ref.config import Config
from gru_ref.data import bpe
from gru_ref.errors import UsageError
from gru_ref.interop.compare import compare
from gru_ref.interop.exchange import export_checkpoint, family, import_file
from gru_ref.interop.rules import pack
from gru_ref.interop.tensor_files import read_tensors, write_tensors
from gru_ref.models.gpt2 import GPT2
from gru_ref.ops import cross_entropy

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what others' imports warn of is not ours
    transformers = pytest.importorskip("transformers")

SHAPE = {"n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 9, "vocab_size": 13}
TRAINER = {path.removeprefix("/trainer/"): 0 for path in SCALARS if path.startswith("/trainer/")}
TRAINER["seed"] = Config().train.seed


def theirs(**changes):
    """A model of Hugging Face's with random weights everywhere, biases and gains too."""
    config = transformers.GPT2Config(
        **{**SHAPE, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager", **changes}
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            draws = torch.randn(p.shape, generator=generator) * 0.3
            p.copy_(1 + draws if ".ln_" in name and name.endswith("weight") else draws)
    return model


def save_pretrained(model, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)


def from_pretrained(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def batch():
    """ids and targets (T, B): tokens repeat, and the last target is not counted."""
    rng = np.random.default_rng(1)
    ids, targets = rng.integers(0, 13, (2, 9, 4))
    targets[-1, 0] = cross_entropy.IGNORE
    return ids, targets


def run_theirs(model, ids, targets):
    """logits (T, B, V), the mean loss, and the gradient of every parameter under its name."""
    model.zero_grad()
    logits = model(input_ids=torch.from_numpy(ids.T.copy())).logits
    flat = torch.from_numpy(targets.T.copy()).reshape(-1)
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), flat, ignore_index=cross_entropy.IGNORE
    )
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return logits.detach().numpy().swapaxes(0, 1), loss.item(), gradients


def run_ours(model, ids, targets):
    model.arena.grads[...] = 0
    logits, _, cache = model.forward(ids)
    rows = logits.reshape(-1, logits.shape[-1])
    V = model.config.vocab_size
    losses, loss_cache = cross_entropy.forward(rows, targets.reshape(-1), vocab_size=V)
    count = (targets != cross_entropy.IGNORE).sum()
    dlogits, _ = cross_entropy.backward(np.full(len(losses), 1 / count, logits.dtype), loss_cache)
    model.backward(dlogits.reshape(logits.shape), cache)
    return logits[..., :V], losses.astype(np.float64).sum() / count, model.arena.grad


def relative(a, b):
    return np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
@pytest.mark.parametrize("padding", [1, 8])
def test_logits_loss_and_every_gradient_are_theirs(tmp_path, dtype, tolerance, changes, padding):
    model = theirs(**changes)
    save_pretrained(model, tmp_path / "hf")
    settings = {"model.vocab_padding": padding}
    import_file(tmp_path / "hf", "gpt2", tmp_path / "a.h5", settings=settings)
    assert verify_checkpoint(tmp_path / "a.h5").problems == []
    checkpoint = load_checkpoint(tmp_path / "a.h5")
    ours = restore_model(checkpoint, dtype=dtype)
    model = model.to(getattr(torch, dtype))
    ids, targets = batch()
    logits, loss, gradients = run_ours(ours, ids, targets)
    expected_logits, expected_loss, expected_gradients = run_theirs(model, ids, targets)
    assert relative(logits, expected_logits) <= tolerance
    assert abs(loss - expected_loss) <= tolerance * abs(expected_loss)
    # gradients have the layout of their weights
    config = Config().replace("model", **vars(checkpoint.config.model) | {"vocab_padding": 1}).model
    V = config.vocab_size
    cropped = {
        n: g[:V] if n in ("embedding.weight", "classifier.weight") else g for n, g in gradients.items()
    }
    packed = pack(family("gpt2").rules("hf-gpt2", config), cropped)
    assert packed.keys() == expected_gradients.keys()
    for name, gradient in packed.items():
        assert relative(gradient, expected_gradients[name]) <= tolerance, name
    if padding > 1:
        assert not gradients["embedding.weight"][V:].any()


def save_ours(path, **model):
    """A checkpoint of ours in which no bias is zero and no gain one."""
    shape = {"layers": 2, "hidden": 12, "heads": 3, "context": 9, "vocab_size": 13, "tied": True}
    config = Config().replace("model", kind="gpt2", **shape | model).replace("train", seq_len=9)
    config = config.replace("data", tokenizer="ids")
    weights = GPT2(config.model).arena
    weights.params[...] = np.random.default_rng(2).standard_normal(weights.size) / 3
    checkpoint = Checkpoint(config, weights.param, {}, {"step": 0, "mu_product": 1.0}, TRAINER)
    save_checkpoint(path, checkpoint)
    return weights.param


@pytest.mark.parametrize("model", [{}, {"tied": False}, {"bias": False}], ids=["tied", "untied", "no bias"])
def test_an_export_loads_as_pretrained_and_comes_back_bit_by_bit(tmp_path, model):
    weights = save_ours(tmp_path / "a.h5", **model)
    export_checkpoint(tmp_path / "a.h5", "hf-gpt2", tmp_path / "hf")
    loaded = from_pretrained(tmp_path / "hf")
    ids, _ = batch()
    ours = restore_model(load_checkpoint(tmp_path / "a.h5"))
    with torch.no_grad():
        expected = loaded(input_ids=torch.from_numpy(ids.T.copy())).logits.numpy().swapaxes(0, 1)
    assert relative(ours.forward(ids)[0], expected) <= 1e-6
    settings = {"model.bias": "false"} if model.get("bias") is False else {}
    import_file(tmp_path / "hf" / "model.safetensors", "gpt2", tmp_path / "b.h5", settings=settings)
    save_pretrained(loaded, tmp_path / "theirs")
    import_file(tmp_path / "theirs", "gpt2", tmp_path / "c.h5", settings=settings)
    for name in ("b.h5", "c.h5"):
        back = load_checkpoint(tmp_path / name)
        assert back.config.model == load_checkpoint(tmp_path / "a.h5").config.model
        assert all(back.model[name].tobytes() == weights[name].tobytes() for name in weights)
    result = compare(tmp_path / "a.h5", tmp_path / "hf")
    assert result.identical is (not settings)


def test_the_program_of_the_page_runs(tmp_path, monkeypatch):
    """docs/exchange.md: an export loads, and what is saved again comes back."""
    page = Path(__file__).resolve().parent.parent / "docs" / "exchange.md"
    (program,) = re.findall(r"```python\n([^`]*transformers[^`]*)```", page.read_text("utf-8"))
    save_ours(tmp_path / "a.h5")
    monkeypatch.chdir(tmp_path)
    export_checkpoint("a.h5", "hf-gpt2", "gpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(program, "exchange.md", "exec"), {})
    assert compare("a.h5", "gpt-again").identical


def test_names_are_read_with_and_without_the_prefix_and_masks_are_left_out(tmp_path):
    """The files that OpenAI's weights are distributed in have no prefix, and hold the causal masks."""
    weights = save_ours(tmp_path / "a.h5")
    export_checkpoint(tmp_path / "a.h5", "hf-gpt2", tmp_path / "hf")
    tensors = read_tensors(tmp_path / "hf" / "model.safetensors").tensors
    assert "lm_head.weight" not in tensors
    bare = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    bare |= {f"h.{i}.attn.bias": np.ones((1, 1, 9, 9), np.uint8) for i in range(2)}
    bare |= {"h.0.attn.masked_bias": np.float32(-1e4), "lm_head.weight": weights["embedding.weight"]}
    (tmp_path / "bare").mkdir()
    write_tensors(tmp_path / "bare" / "w.safetensors", bare, {})
    with pytest.raises(UsageError, match=r"w.safetensors: does not tell model.heads; give it with --set"):
        import_file(tmp_path / "bare" / "w.safetensors", "gpt2", tmp_path / "b.h5")
    settings = {"model.heads": "3"}
    import_file(tmp_path / "bare" / "w.safetensors", "gpt2", tmp_path / "b.h5", settings=settings)
    back = load_checkpoint(tmp_path / "b.h5")
    assert back.config.model == load_checkpoint(tmp_path / "a.h5").config.model
    assert all(np.array_equal(back.model[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation_function": "relu"}, "activation_function is 'relu'; a gpt2 here has 'gelu_new'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ({"n_inner": 20}, "n_inner is 20"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"model_type": "gptj"}, "model_type is 'gptj'"),
        ({"n_layer": 3}, "missing transformer.h.2.ln_1.weight"),
        ({"n_embd": 24}, r"transformer.wte.weight: shape \(13, 12\), expected \(13, 24\)"),
        ({"n_head": 5}, "model.safetensors and config.json: model.heads 5 must divide model.hidden 12"),
        (
            {"vocab_size": 70000},
            "model.safetensors and config.json: a vocabulary of 70,000 cannot be imported",
        ),
        ({"vocab_size": 14}, r"transformer.wte.weight: shape \(13, 12\), expected \(14, 12\)"),
        ({"vocab_size": "13"}, None),
        ({"n_layer": [2]}, "model.safetensors and config.json: model.layers must be a whole number"),
        ([], "not a JSON object"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, changes, reason):
    save_ours(tmp_path / "a.h5")
    export_checkpoint(tmp_path / "a.h5", "hf-gpt2", tmp_path / "hf")
    beside = tmp_path / "hf" / "config.json"
    values = json.loads(beside.read_text()) | changes if isinstance(changes, dict) else changes
    beside.write_text(json.dumps(values))
    if reason is None:
        import_file(tmp_path / "hf", "gpt2", tmp_path / "b.h5")
        return
    with pytest.raises(UsageError, match=reason):
        import_file(tmp_path / "hf", "gpt2", tmp_path / "b.h5")
    assert not (tmp_path / "b.h5").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_they_padded_comes_in_with_its_tokenizer(tmp_path, capsys, tied):
    """nanoGPT's weights have 50,304 rows for 50,257 tokens, as has a pad_to_multiple_of of theirs."""
    definition = {
        "tokens": [*bpe.ALPHABET, "Ġt", "he", "Ġthe", "<|endoftext|>"],
        "merges": ["Ġ t", "h e", "Ġt he"],
    }
    (tmp_path / "voc").mkdir()
    tokens = {token: number for number, token in enumerate(definition["tokens"])}
    (tmp_path / "voc" / "vocab.json").write_text(json.dumps(tokens))
    (tmp_path / "voc" / "merges.txt").write_text("\n".join(definition["merges"]))
    model = theirs(vocab_size=320, tie_word_embeddings=tied)
    save_pretrained(model, tmp_path / "padv")
    arguments = ["import", str(tmp_path / "padv"), "--as", "gpt2", "-o", str(tmp_path / "a.h5")]
    arguments += ["--set", f"data.vocab={tmp_path / 'voc'}"]
    assert cli.run(arguments) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path / 'padv'}/model.safetensors: has 320 rows for the 260 tokens of tokenizer 'bpe'" in err
    way = "--set model.vocab_size=260 --set model.vocab_padding=64"
    assert err.endswith(f"; where the others only pad the vocabulary, say {way}\n")
    assert cli.run([*arguments, *way.split()]) == 0
    assert "rows 260 to 319 only pad the vocabulary: zeros took their place" in capsys.readouterr().err
    checkpoint = load_checkpoint(tmp_path / "a.h5")
    assert (checkpoint.tokenizer, verify_checkpoint(tmp_path / "a.h5").problems) == (definition, [])
    assert not checkpoint.model["embedding.weight"][260:].any()
    ids, _ = batch()
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids.T.copy())).logits.numpy().swapaxes(0, 1)[..., :260]
    assert relative(restore_model(checkpoint).forward(ids)[0], expected) <= 1e-5
    assert compare(tmp_path / "a.h5", tmp_path / "padv").identical
    export_checkpoint(tmp_path / "a.h5", "hf-gpt2", tmp_path / "out")
    settings = {"model.vocab_padding": 64, "data.vocab": str(tmp_path / "out")}
    import_file(tmp_path / "out", "gpt2", tmp_path / "b.h5", settings=settings)
    assert compare(tmp_path / "a.h5", tmp_path / "b.h5").identical
    for kind in (transformers.GPT2TokenizerFast, transformers.AutoTokenizer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = kind.from_pretrained(tmp_path / "out")
        text = "it's the end, isn't the été 漢字\n\n  \tthen"
        assert loaded(text)["input_ids"] == bpe.BPE(definition).encode(text.encode()).tolist()


def test_weights_that_they_spread_over_several_files_come_in(tmp_path):
    model = theirs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    save_pretrained(model, tmp_path / "whole")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    assert not (tmp_path / "hf" / "model.safetensors").exists()
    for name in ("hf", "whole"):
        import_file(tmp_path / name, "gpt2", tmp_path / f"{name}.h5")
    assert compare(tmp_path / "hf.h5", tmp_path / "whole.h5").identical
    assert compare(tmp_path / "hf", tmp_path / "whole").identical


def test_dropout_travels_and_several_become_none_with_a_notice(tmp_path):
    save_ours(tmp_path / "a.h5", dropout=0.25)
    export_checkpoint(tmp_path / "a.h5", "hf-gpt2", tmp_path / "hf")
    beside = tmp_path / "hf" / "config.json"
    values = json.loads(beside.read_text())
    assert [values[key] for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")] == [0.25] * 3
    facts = import_file(tmp_path / "hf", "gpt2", tmp_path / "b.h5")
    assert (facts["model"]["dropout"], facts["notices"]) == (0.25, [])
    beside.write_text(json.dumps(values | {"attn_pdrop": 0.0}))
    facts = import_file(tmp_path / "hf", "gpt2", tmp_path / "c.h5")
    assert facts["model"]["dropout"] == 0.0
    assert "several dropouts" in facts["notices"][0]


def test_our_own_names_keep_padding_and_configuration(tmp_path):
    weights = save_ours(tmp_path / "a.h5", vocab_padding=8, dropout=0.1)
    for to, file in (("safetensors", "a.safetensors"), ("npz", "a.npz")):
        export_checkpoint(tmp_path / "a.h5", to, tmp_path / file)
        import_file(tmp_path / file, "gpt2", tmp_path / f"{to}.h5")
        back = load_checkpoint(tmp_path / f"{to}.h5")
        assert back.config == load_checkpoint(tmp_path / "a.h5").config
        assert all(back.model[name].tobytes() == weights[name].tobytes() for name in weights)


def test_an_imported_gpt2_samples_and_evaluates_from_the_command_line(tmp_path, capsys):
    save_pretrained(theirs(), tmp_path / "hf")
    output = str(tmp_path / "a.h5")
    assert cli.run(["import", str(tmp_path / "hf"), "--as", "gpt2", "-o", output]) == 0
    assert cli.run(["verify", "--quiet", output]) == 0
    capsys.readouterr()
    assert cli.run(["sample", output, "--prompt", "1 2 3", "-n", "12", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ids"]) == 12
    np.random.default_rng(0).integers(0, 13, 50).astype("<u2").tofile(tmp_path / "tokens.bin")
    assert cli.run(["eval", output, "--data", str(tmp_path / "tokens.bin"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 49
