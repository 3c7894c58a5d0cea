"""The GPT-2 model: its parameters, its first loss, its cache of keys and values, its gradients, its text."""

import dataclasses
import hashlib
import inspect
import math

import numpy as np
import pytest

from gru_ref import GPT2, GRULM, Backend, config
from gru_ref.config import ModelConfig
from gru_ref.errors import ConfigError
from gru_ref.generate import generate
from gru_ref.models import LanguageModel, padded_vocab, parameter_shapes
from gru_ref.ops import cross_entropy

SMALL = ModelConfig(
    kind="gpt2",
    layers=2,
    hidden=12,
    heads=3,
    context=8,
    vocab_size=11,
    vocab_padding=8,
    dropout=0.3,
    tied=True,
)
UNTIED = dataclasses.replace(SMALL, tied=False)
WITHOUT_BIAS = dataclasses.replace(SMALL, bias=False)


def build(model_config=SMALL, seed=1, dtype=np.float64, noise=0.3, **options):
    """A model whose weights, gains and offsets all differ from their first values, which hide faults."""
    model = GPT2(model_config, seed=seed, dtype=dtype, **options)
    model.initialise()
    model.arena.params += noise * np.random.default_rng(seed).standard_normal(model.arena.size)
    return model


def batch(model, T=5, B=4, seed=0):
    """ids, and targets of which some are ignored."""
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(0, model.config.vocab_size, (2, T, B))
    targets[rng.random((T, B)) < 0.2] = cross_entropy.IGNORE
    return ids, targets


def accumulate(model, ids, targets, count=10, state=None, dropout_step=None):
    """Add the gradient of Σ loss / count to the arena; the sum of the losses."""
    logits, _, cache = model.forward(ids, state, dropout_step=dropout_step)
    losses, loss_cache = cross_entropy.forward(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), vocab_size=model.config.vocab_size
    )
    dlogits, _ = cross_entropy.backward(np.full(ids.size, 1 / count), loss_cache)
    model.backward(dlogits.reshape(logits.shape), cache)
    return losses.sum(dtype=np.float64)


def count_parameters(model_config):
    return sum(math.prod(shape) for shape in parameter_shapes(model_config).values())


# --- parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "parameters", "megabytes"),
    [("gpt-16m", 16_102_912, (64.4, 193.3)), ("gpt2-124m", 123_886_080, (495.6, 1486.8))],
)
def test_the_presets_have_the_parameters_and_the_payload_of_the_write_up(preset, parameters, megabytes):
    """Weights at step 0; weights, m and v later. The write-up's sizes are of whole files: 0.1 MB more."""
    loaded = config.load(preset=preset)
    model, train = loaded.model, loaded.train
    assert padded_vocab(model) == 50304
    assert model.context == train.seq_len == 256
    assert count_parameters(model) == parameters
    for n_bytes, expected in zip((4 * parameters, 12 * parameters), megabytes, strict=True):
        assert expected - 0.2 < n_bytes / 1e6 <= expected + 0.05
    assert (train.batch_size, train.accumulation, train.steps, train.clip_norm) == (32, 1, 3000, 1.0)
    schedule = loaded.schedule
    assert (loaded.optimizer.name, schedule.name, schedule.min_lr) == ("adamw", "cosine", 1e-4)
    assert loaded.run.precision == "bf16"


@pytest.mark.parametrize("model_config", [SMALL, UNTIED, WITHOUT_BIAS])
def test_parameters_are_counted_by_the_formula_and_a_tied_matrix_once(model_config):
    P, C, L = 16, 12, 2
    expected = P * C + 8 * C + L * (12 * C * C + 13 * C) + 2 * C
    expected += 0 if model_config.tied else P * C
    expected -= 0 if model_config.bias else L * 11 * C + C
    assert count_parameters(model_config) == expected == GPT2(model_config).arena.size


def test_every_parameter_has_a_name_that_says_where_it_is():
    block = ["ln_1", "attention.qkv", "attention.proj", "ln_2", "mlp.fc", "mlp.proj"]
    affine = [f"block.{layer}.{name}" for layer in range(2) for name in block] + ["ln_f"]
    weights = ["embedding.weight", "position.weight", *(f"{name}.weight" for name in affine)]
    assert set(parameter_shapes(SMALL)) == {*weights, *(f"{name}.bias" for name in affine)}
    assert set(parameter_shapes(WITHOUT_BIAS)) == set(weights)
    assert parameter_shapes(UNTIED).keys() - parameter_shapes(SMALL).keys() == {"classifier.weight"}


def test_weight_decay_reaches_every_matrix_and_no_gain_or_offset():
    """N07: the decayed slice of the arena, written to. Gains are vectors, though called weights."""
    arena = GPT2(UNTIED).arena
    arena.params[arena.decayed] = 1
    for name, parameter in arena.param.items():
        is_matrix = name.endswith("weight") and ".ln_" not in name and not name.startswith("ln_f")
        assert np.all(parameter == is_matrix), name


def test_initial_weights_are_those_of_gpt2_and_a_function_of_the_seed():
    """N(0, 0.02), those into the residual stream N(0, 0.02/√2L); gains 1, offsets 0."""
    wide = dataclasses.replace(UNTIED, hidden=96, context=64, vocab_size=99, vocab_padding=1, layers=8)
    first, again, other = (build(wide, seed, noise=0).arena for seed in (1, 1, 2))
    assert first.params.tobytes() == again.params.tobytes()
    for name, w in first.param.items():
        if w.ndim == 1:
            assert np.all(w == name.endswith("weight")), name
            continue
        std = 0.02 / 4 if name.endswith("proj.weight") else 0.02
        assert w.std() == pytest.approx(std, rel=0.05), name
        assert abs(w.mean()) < 5 * std / math.sqrt(w.size), name
        assert not np.any(w == other.param[name]), name


@pytest.mark.parametrize("model_config", [SMALL, UNTIED])
def test_rows_that_pad_the_vocabulary_start_at_zero_and_change_no_other_draw(model_config):
    """Those of the positions pad nothing, though there are more of them than tokens."""
    unpadded = build(dataclasses.replace(model_config, vocab_size=16, context=32), noise=0).arena.param
    padded = build(dataclasses.replace(model_config, context=32), noise=0).arena.param
    for name, parameter in padded.items():
        rows = 11 if name in ("embedding.weight", "classifier.weight") else len(parameter)
        assert np.array_equal(parameter[:rows], unpadded[name][:rows]), name
        assert not parameter[rows:].any(), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("layers", "hidden", "V"), [(1, 32, 100), (6, 128, 257), (2, 64, 5000)])
def test_the_first_loss_is_close_to_the_logarithm_of_the_vocabulary(layers, hidden, V, tied):
    model_config = ModelConfig(
        kind="gpt2", layers=layers, hidden=hidden, heads=4, vocab_size=V, tied=tied, context=16
    )
    model = build(model_config, dtype=np.float32, noise=0)
    ids = np.random.default_rng(0).integers(0, V, (17, 16))
    logits, _, _ = model.forward(ids[:-1])
    losses, _ = cross_entropy.forward(logits.reshape(-1, V), ids[1:].reshape(-1))
    assert abs(losses.mean() - math.log(V)) < 0.1


def test_both_families_have_the_same_methods():
    """One trainer for both: what it calls is in the protocol, with the same arguments."""

    def methods(cls):
        names = [name for name, _ in inspect.getmembers(cls) if not name.startswith("_")]
        return {
            name: list(inspect.signature(getattr(cls, name)).parameters)
            for name in names
            if inspect.isfunction(getattr(cls, name))
        }

    assert methods(GPT2) == methods(GRULM) == methods(LanguageModel)
    assert inspect.signature(GPT2) == inspect.signature(GRULM)
    assert (build().context, GRULM(ModelConfig(vocab_size=3)).context) == (8, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "model.heads 5 must divide model.hidden 12"),
        ({"context": 0}, "model.context must be at least 1"),
        ({"vocab_size": 0}, "model.vocab_size must be at least 1"),
        ({"embedding": 6}, "model.embedding is of gru-lm and not of gpt2; set it to 0"),
        ({"reset_after": False}, "model.reset_after is of gru-lm and not of gpt2; set it to true"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        GPT2(dataclasses.replace(SMALL, **change))


# --- forward ------------------------------------------------------------------------------------------------


def test_a_token_depends_on_those_before_it_and_on_no_other():
    model = build()
    ids, _ = batch(model, T=8)
    logits, _, _ = model.forward(ids)
    for t in range(8):
        moved = ids.copy()
        moved[t] = (moved[t] + 1) % 11
        changed = np.any(model.forward(moved)[0] != logits, axis=(1, 2))
        assert np.array_equal(changed, np.arange(8) >= t)


def test_the_same_token_means_another_thing_at_another_position():
    logits, _, _ = build().forward(np.full((3, 1), 5))
    assert not np.allclose(logits[0], logits[1])
    assert not np.allclose(logits[1], logits[2])


@pytest.mark.parametrize("model_config", [SMALL, UNTIED, WITHOUT_BIAS])
def test_the_cache_of_keys_and_values_changes_nothing(model_config):
    """A sequence in one go equals the same one in parts, token by token included, up to the context."""
    model = build(model_config)
    ids, _ = batch(model, T=8)
    whole, last, _ = model.forward(ids, model.initial_state(4))
    assert np.array_equal(model.forward(ids)[0], whole)
    for cuts in ([3], [1, 2, 6], [1, 2, 3, 4, 5, 6, 7]):
        state, parts = None, []
        for part in np.split(ids, cuts):
            logits, state, _ = model.forward(part, state)
            parts.append(logits)
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-13)
        np.testing.assert_allclose(state, last, rtol=0, atol=1e-14)
    assert last.shape == (2, 2, 8, 4, 3, 4)


def test_two_ways_on_from_one_state_leave_it_and_each_other_alone():
    """States share memory, which is never written where another state has its keys."""
    model = build()
    ids, _ = batch(model, T=8)
    _, state, _ = model.forward(ids[:2])
    _, state, _ = model.forward(ids[2:3], state)
    before = state.copy()
    tokens = [ids[3:4], (ids[3:4] + 1) % model.config.vocab_size, ids[4:6]]
    ways = [model.forward(part, state) for part in tokens]
    assert np.array_equal(state, before)
    for part, (logits, longer, _) in zip(tokens, ways, strict=True):
        again_logits, again, _ = model.forward(part, before.copy())
        assert np.array_equal(logits, again_logits)
        assert np.array_equal(longer, again)


def test_a_token_more_copies_no_keys_and_values():
    model = build()
    ids, _ = batch(model, T=8)
    state, places = None, []
    for t in range(8):
        _, state, _ = model.forward(ids[t : t + 1], state)
        places.append(state.ctypes.data)
    assert len(set(places)) == 3  # room for 1, then 4, then 8, the context


def test_a_sequence_beyond_the_context_is_refused():
    """S03: not a row of the table that is not there."""
    model = build()
    ids, _ = batch(model, T=9)
    with pytest.raises(ValueError, match=r"0 \+ 9 tokens are more than the model's context, 8"):
        model.forward(ids)
    _, state, _ = model.forward(ids[:8])
    with pytest.raises(ValueError, match=r"8 \+ 1 tokens"):
        model.forward(ids[8:], state)


@pytest.mark.parametrize("dropout_step", [None, 3])
def test_forward_and_backward_leave_ids_state_and_weights_as_they_are(dropout_step):
    """N02: hashed before and after."""
    model = build()
    ids, targets = batch(model)
    _, state, _ = model.forward(ids[:2])
    arrays = (ids, targets, state, model.arena.params)
    before = [hashlib.sha256(a.tobytes()).digest() for a in arrays]
    accumulate(model, ids, targets, state=state, dropout_step=dropout_step)
    assert [hashlib.sha256(a.tobytes()).digest() for a in arrays] == before


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_model_computes_in_the_type_of_its_arena(dtype):
    model = build(dtype=dtype)
    ids, targets = batch(model)
    logits, state, _ = model.forward(ids.astype(np.uint16))
    accumulate(model, ids, targets, dropout_step=1)
    assert logits.shape == (5, 4, 11)
    assert logits.dtype == state.dtype == model.initial_state(4).dtype == model.arena.grads.dtype == dtype


# --- dropout and precision ----------------------------------------------------------------------------------


def test_evaluation_twice_gives_the_same_bits_whatever_the_dropout():
    """N02: without a dropout_step there is none, however large the rate."""
    model, without = build(), build(dataclasses.replace(SMALL, dropout=0.0))
    ids, _ = batch(model)
    first, again, plain = (m.forward(ids)[0].tobytes() for m in (model, model, without))
    assert first == again == plain


def test_loss_and_gradients_with_dropout_repeat_to_the_last_bit():
    """N10: masks are a function of seed and micro-batch, and backward draws those of forward again."""
    ids, targets = batch(build())
    results = []
    for seed, step in ((1, 4), (1, 4), (1, 5), (2, 4)):
        model = build(seed=seed)
        model.arena.params[...] = build().arena.params
        loss = accumulate(model, ids, targets, dropout_step=step)
        results.append((loss, model.arena.grads.tobytes()))
    assert results[0] == results[1]
    assert len({loss for loss, _ in results}) == 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_place_gets_a_mask_of_its_own_and_every_product_the_models_precision(precision):
    """N10: masks by (seed, micro-batch, layer). The operations report what they are called with."""
    model = build(seed=5, dtype=np.float32, precision=precision)
    model.ops = Backend("numpy")
    calls = []

    def report(op):
        functions = getattr(model.ops, op)
        forward = functions.forward

        def reporting(*args, **kwargs):
            calls.append((op, inspect.signature(forward).bind(*args, **kwargs).arguments))
            return forward(*args, **kwargs)

        functions.forward = reporting

    for op in ("attention_blocked", "dropout", "linear"):
        report(op)
    model.forward(batch(model)[0], dropout_step=4)
    block = ["linear", "attention_blocked", "linear", "dropout", "linear", "linear", "dropout"]
    assert [op for op, _ in calls] == ["dropout", *block, *block, "linear"]
    assert {a["precision"] for op, a in calls if op != "dropout"} == {precision}
    masks = [
        (a["p"] if op == "dropout" else a["dropout"], a["seed"], a["step"], a["layer"])
        for op, a in calls
        if op != "linear"
    ]
    assert masks == [(0.3, 5, 4, layer) for layer in range(7)]


@pytest.mark.parametrize(("precision", "least", "most"), [("fp16", 1e-4, 5e-3), ("bf16", 1e-3, 4e-2)])
def test_mixed_precision_rounds_products_and_keeps_fp32_results(precision, least, most):
    exact, mixed = (build(dtype=np.float32, precision=p) for p in ("fp32", precision))
    ids, targets = batch(exact)
    for model in (exact, mixed):
        accumulate(model, ids, targets)
    assert mixed.arena.grads.dtype == np.float32
    difference = np.linalg.norm(mixed.arena.grads - exact.arena.grads) / np.linalg.norm(exact.arena.grads)
    assert least < difference < most


# --- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_step", [None, 2])
def test_gradients_accumulate(dropout_step):
    """The same micro-batch twice is twice the gradient, bit for bit: nothing is overwritten."""
    once, twice = build(UNTIED), build(UNTIED)
    ids, targets = batch(once)
    accumulate(once, ids, targets, dropout_step=dropout_step)
    for _ in range(2):
        accumulate(twice, ids, targets, dropout_step=dropout_step)
    assert np.array_equal(twice.arena.grads, 2 * once.arena.grads)


@pytest.mark.parametrize("model_config", [SMALL, UNTIED, WITHOUT_BIAS])
def test_two_micro_batches_add_up_to_the_joined_batch(model_config):
    joined, parted = build(model_config), build(model_config)
    ids, targets = batch(joined, T=5, B=7)
    loss = accumulate(joined, ids, targets)
    total = sum(accumulate(parted, ids[:, rows], targets[:, rows]) for rows in (slice(0, 3), slice(3, 7)))
    assert total == pytest.approx(loss, rel=1e-14)
    np.testing.assert_allclose(parted.arena.grads, joined.arena.grads, rtol=0, atol=1e-13)


def test_a_tied_matrix_gets_the_sum_of_the_gradients_of_both_uses():
    """N03: against an untied model whose two matrices hold the same values; one token repeated."""
    tied, untied = build(SMALL), build(UNTIED)
    assert "classifier.weight" not in tied.arena.param
    for name, parameter in untied.arena.param.items():
        parameter[...] = tied.arena.param["embedding.weight" if name == "classifier.weight" else name]
    ids, targets = batch(tied)
    ids[:3] = 3
    assert accumulate(tied, ids, targets) == accumulate(untied, ids, targets)
    grad = untied.arena.grad
    assert np.array_equal(
        tied.arena.grad["embedding.weight"], grad["classifier.weight"] + grad["embedding.weight"]
    )
    for name in tied.arena.param.keys() - {"embedding.weight"}:
        assert np.array_equal(tied.arena.grad[name], grad[name]), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("V", "padding"), [(11, 8), (13, 128), (257, 64), (1151, 128), (5003, 64)])
def test_a_padded_vocabulary_gives_the_same_loss_to_the_last_bit(V, padding, tied):
    """And the padded rows get no gradient at all, whatever they hold."""
    plain = build(dataclasses.replace(SMALL, vocab_size=V, vocab_padding=1, tied=tied, context=16))
    padded = build(dataclasses.replace(SMALL, vocab_size=V, vocab_padding=padding, tied=tied, context=16))
    for name, parameter in padded.arena.param.items():
        whole = plain.arena.param[name]
        parameter[...] = 1e3
        parameter[: len(whole)] = whole
    ids, targets = batch(plain, T=16)
    losses = [accumulate(model, ids, targets, dropout_step=1) for model in (plain, padded)]
    assert losses[0] == losses[1]
    for name, gradient in padded.arena.grad.items():
        whole = plain.arena.grad[name]
        assert np.array_equal(gradient[: len(whole)], whole), name
        assert not gradient[len(whole) :].any(), name
    assert len(padded.arena.grad["embedding.weight"]) == padded_vocab(padded.config) > V


# --- text ---------------------------------------------------------------------------------------------------


def uncached(model, prompt, n, **settings):
    """What `generate` must give: each token from the last `context` ones, without a cache."""
    text = list(prompt)
    for position in range(n):
        last = np.array(text[-model.context :])[-model.context :, None]
        logits, _, _ = model.forward(last)

        class Fixed:
            config, context = model.config, None

            def forward(self, ids, state, logits=logits):
                return logits, None, None

        text += generate(Fixed(), [0], 1, start=position, **settings)
    return text[len(prompt) :]


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 3}, {"top_k": 4, "temperature": 1.5}])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 80])
def test_text_from_the_cache_is_the_text_without_it(length, settings):
    """S03: prompts of context − 1, context, context + 1, 10 × context; text of 5 × context."""
    model = build()
    prompt = np.random.default_rng(length).integers(0, 11, length)
    assert list(generate(model, prompt, 40, **settings)) == uncached(model, prompt, 40, **settings)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-14)])
def test_cached_logits_differ_by_the_order_of_sums_alone(dtype, tolerance):
    """docs/design.md says by how much: about 1e-6 in float32, and 1e-15 in float64."""
    model = build(dataclasses.replace(SMALL, hidden=96, context=32), dtype=dtype, noise=0.05)
    ids, _ = batch(model, T=32, B=2)
    whole, state = model.forward(ids)[0], None
    for t in range(32):
        logits, state, _ = model.forward(ids[t : t + 1], state)
        assert np.abs(logits[0] - whole[t]).max() <= tolerance * np.abs(whole).max()


def test_a_prompt_beyond_the_context_is_the_prompt_without_its_beginning():
    """S03."""
    model = build()
    prompt = np.random.default_rng(0).integers(0, 11, 30)
    expected = list(generate(model, prompt[-8:], 20))
    assert list(generate(model, prompt, 20)) == expected
    assert list(generate(model, np.append([1, 2, 3], prompt), 20)) == expected
    assert list(generate(model, prompt[-7:], 20)) != expected


def test_text_can_be_made_in_parts_only_from_all_that_was_said():
    """A longer sample begins with the shorter one, and `start` goes on from it."""
    model = build()
    whole = list(generate(model, [1, 2], 30))
    assert list(generate(model, [1, 2], 11)) == whole[:11]
    assert list(generate(model, [1, 2, *whole[:11]], 19, start=11)) == whole[11:]


@pytest.mark.parametrize("k", [0, 1, 10, 11, 12, 10**9])
def test_a_padded_token_is_never_drawn_and_top_k_keeps_exactly_k(k):
    """S02: of 300 draws, with rows 11 … 15 that would win if they were looked at."""
    model = build(noise=0.01)
    model.arena.param["embedding.weight"][11:] = 100
    model.arena.param["ln_f.bias"][...] = 1
    drawn = {next(generate(model, [3], 1, top_k=k, seed=seed)) for seed in range(300)}
    assert max(drawn) < 11
    assert len(drawn) == min(k or 11, 11)
    if k == 1:
        assert drawn == set(generate(model, [3], 1, temperature=0))
