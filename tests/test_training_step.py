"""One optimizer step: what accumulation, clipping, decay and non-finite numbers do (N07, C09)."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gru_ref.backend import KERNEL_FOLDERS, Backend
from gru_ref.config import ModelConfig, OptimizerConfig
from gru_ref.errors import RunError
from gru_ref.models.gpt2 import GPT2
from gru_ref.models.gru_lm import GRULM
from gru_ref.ops.clip import global_norm
from gru_ref.ops.cross_entropy import IGNORE
from gru_ref.training.optimizer import Optimizer
from gru_ref.training.step import accumulate, train_step

T, V = 5, 11
IS_MATRIX = ("weight", "weight_ih", "weight_hh")
OPTIMIZERS = [
    OptimizerConfig(name="nadam", weight_decay=0.1),
    OptimizerConfig(name="adamw", weight_decay=0.1),
]


def small_model(dtype=np.float64, **config):
    model = GRULM(ModelConfig(**{"layers": 2, "hidden": 4, "vocab_size": V} | config), seed=7, dtype=dtype)
    model.initialise()
    return model


def random_batch(B, seed=1):
    """Ids with repeats, and about a third of the targets not counted."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, V, (T, B))
    targets[rng.random((T, B)) < 0.3] = IGNORE
    targets[0, :] = 3  # never none at all
    return rng.integers(0, V, (T, B)), targets


def split(batch, sizes):
    edges = np.cumsum(sizes)[:-1]
    return list(zip(*(np.split(part, edges, axis=1) for part in batch), strict=True))


def snapshot(model, optimizer):
    arena = model.arena
    return arena.params.copy(), arena.m.copy(), arena.v.copy(), optimizer.t, optimizer.mu_product


def replace(model, op, **functions):
    """Let a model use other functions for an operation."""
    setattr(model.ops, op, SimpleNamespace(**vars(getattr(model.ops, op)) | functions))


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_micro_batches_of_any_sizes_equal_the_whole_batch(sizes, seed):
    model, whole = small_model(), small_model()
    B = sum(sizes)
    batch = random_batch(B, seed)
    state = np.random.default_rng(seed).standard_normal((2, B, 4))
    loss, tokens, new_state = accumulate(model, split(batch, sizes), state=state)
    whole_loss, whole_tokens, whole_state = accumulate(whole, [batch], state=state)
    assert tokens == whole_tokens == np.count_nonzero(batch[1] != IGNORE)
    assert loss == pytest.approx(whole_loss, rel=1e-14)
    assert np.abs(model.arena.grads - whole.arena.grads).max() <= 1e-14
    # The columns of the carried state stay with their lanes.
    assert np.abs(new_state - whole_state).max() <= 1e-14


def test_without_a_carried_state_none_comes_back():
    assert accumulate(small_model(), [random_batch(2)])[2] is None


def test_the_loss_is_weighted_by_tokens_and_not_a_mean_of_means():
    """4 tokens at 1 nat and 1 at 5 are 1.8 nats a token, not 3."""
    model = small_model(vocab_size=3)
    model.arena.params[...] = 0  # h is 0, so the logits are the classifier's bias
    model.arena.param["classifier.bias"][...] = [-1, -5, np.log(1 - np.exp(-1) - np.exp(-5))]
    four = np.zeros((2, 2), int), np.zeros((2, 2), int)
    one = np.zeros((2, 1), int), np.array([[1], [IGNORE]])
    loss, tokens, _ = accumulate(model, [four, one])
    assert (loss, tokens) == (pytest.approx(1.8, rel=1e-15), 5)
    # dL/db = mean over the 5 tokens of p − onehot
    p = np.exp(model.arena.param["classifier.bias"])
    assert model.arena.grad["classifier.bias"] == pytest.approx(p - [0.8, 0.2, 0], abs=1e-15)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_copied_model_trains_as_the_original(copied, steps):
    """Its parameters by name were no longer views of the flat vector: it silently never learned."""
    model, batches = small_model(), [random_batch(3)]
    for _ in range(steps):
        train_step(model, Optimizer(OptimizerConfig(), model.ops), batches, lr=1e-2)
    again = copied(model)
    for one in (model, again):
        one.optimizer = Optimizer(OptimizerConfig(), one.ops)
    for _ in range(3):
        losses = [train_step(one, one.optimizer, batches, lr=1e-2).loss for one in (model, again)]
        assert losses[0] == losses[1]
    assert np.array_equal(model.arena.params, again.arena.params)
    assert not np.may_share_memory(model.arena.params, again.arena.params)


@pytest.mark.parametrize("kernels", KERNEL_FOLDERS)
def test_a_numpy_number_as_learning_rate_widens_nothing(kernels):
    """float32 times a np.float64 is float64: the definition rounded elsewhere than with a Python number."""
    arenas = []
    for number in (float, np.float64):
        model = small_model(np.float32)
        model.arena.grads[...] = model.arena.params
        Optimizer(OptimizerConfig(), Backend(kernels)).step(model.arena, number(1e-3))
        arenas.append(model.arena.params.tobytes())
    assert arenas[0] == arenas[1]


@pytest.mark.parametrize("first", ["grads", "grad"])
def test_forgotten_gradients_are_zero_for_whoever_looks(first):
    arena = small_model().arena
    arena.grads[...] = 7
    arena.forget_grads()
    assert not any(a.any() for a in ([arena.grads] if first == "grads" else arena.grad.values()))
    assert arena.grad_memory("classifier.bias") is None  # they were cleared for that


def test_a_total_to_add_to_is_cleared_once_and_alone():
    arena = small_model().arena
    arena.grads[...] = 7
    arena.forget_grads()
    total = arena.grad_total("embedding.weight")
    assert not total.any()
    total += 1
    arena.grad_total("embedding.weight")[...] += 2
    assert arena.grad_memory("classifier.bias") is not None
    assert (arena.grad["embedding.weight"] == 3).all()


def test_the_first_gradient_after_forgetting_takes_its_place_and_later_ones_are_added():
    arena, add = small_model().arena, Backend("numpy").accumulate.add
    arena.grads[...] = np.nan
    arena.forget_grads()
    written, copied, part, untouched = list(arena.shapes)[:4]
    memory = arena.grad_memory(written)
    memory[...] = 2
    arena.add_grad(written, memory, add)
    arena.add_grad(copied, np.full(arena.shapes[copied], 3.0), add)
    arena.add_grad(part, np.full((1, *arena.shapes[part][1:]), 4.0), add)  # the first row: the rest is 0
    assert arena.grad_memory(untouched) is not None
    for name in (written, copied, part):
        assert arena.grad_memory(name) is None
        arena.add_grad(name, np.ones(arena.shapes[name]), add)
    grad = arena.grad
    assert (grad[written] == 3).all()
    assert (grad[copied] == 4).all()
    assert (grad[part][0] == 5).all()
    assert (grad[part][1:] == 1).all()
    assert not any(grad[name].any() for name in list(arena.shapes)[3:])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_a_step_after_others_has_the_gradients_of_a_first_one(kernels, tied):
    """Whatever lay in their memory, and where the vocabulary is padded."""
    sizes = {"vocab_size": V, "vocab_padding": 8, "hidden": 8, "layers": 2, "heads": 2, "context": T}
    config = ModelConfig(kind="gpt2", tied=tied, **sizes)
    fresh, used = (GPT2(config, backend=Backend(kernels)) for _ in range(2))
    used.arena.grads[...] = np.nan
    batch = random_batch(3)
    for model in (fresh, used):
        model.initialise()
        train_step(model, Optimizer(OptimizerConfig(), model.ops), [batch, batch], lr=0.0)
    assert fresh.arena.grads.tobytes() == used.arena.grads.tobytes()


def test_gradients_start_from_zero_in_every_step():
    once, twice = small_model(), small_model()
    for model, steps in ((once, 1), (twice, 2)):
        for _ in range(steps):
            train_step(model, Optimizer(OptimizerConfig(), model.ops), [random_batch(3)], lr=0.0)
    assert np.array_equal(once.arena.grads, twice.arena.grads)


@pytest.mark.parametrize("clip_norm", [0.01, 0.0, 100.0])
def test_clipping_scales_all_gradients_by_the_one_global_norm(clip_norm):
    free, model = small_model(), small_model()
    batches = split(random_batch(4), [2, 2])
    train_step(free, Optimizer(OptimizerConfig(), free.ops), batches, lr=1e-3)
    result = train_step(model, Optimizer(OptimizerConfig(), model.ops), batches, lr=1e-3, clip_norm=clip_norm)
    norm = np.sqrt(np.square(free.arena.grads).sum())
    assert result.grad_norm == pytest.approx(norm, rel=1e-14)
    scale = min(1, clip_norm / norm) if clip_norm else 1
    assert model.arena.m == pytest.approx(0.1 * scale * free.arena.grads, rel=1e-12)
    assert model.arena.v == pytest.approx(0.001 * np.square(scale * free.arena.grads), rel=1e-12)
    if scale < 1:
        assert global_norm([model.arena.m]) == pytest.approx(0.1 * clip_norm, rel=1e-12)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda config: config.name)
def test_only_matrices_decay_and_each_of_them_once(config, tied):
    """N07: zero gradients, so decay alone moves a weight."""
    model = small_model(np.float32, tied=tied)
    before = {name: w.copy() for name, w in model.arena.param.items()}
    ids, targets = random_batch(2)
    train_step(model, Optimizer(config, model.ops), [(ids, np.full_like(targets, IGNORE))], lr=0.01)
    assert ("classifier.weight" in before) is not tied
    for name, w in model.arena.param.items():
        factor = np.float32(1 - 0.01 * 0.1) if name.rpartition(".")[2] in IS_MATRIX else 1
        assert np.array_equal(w, before[name] * factor), name


@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda config: config.name)
@pytest.mark.parametrize(
    ("where", "culprit"),
    [
        ("parameter", "parameter gru.1.weight_hh"),
        ("gradient", "gradient of gru.0.bias_ih"),
        ("loss", "loss"),
    ],
)
def test_a_non_finite_step_is_named_and_changes_nothing(config, where, culprit):
    """C09."""
    model = small_model(np.float32)
    optimizer = Optimizer(config, model.ops)
    state = np.zeros((2, 3, 4), np.float32)
    train_step(model, optimizer, [random_batch(3)], lr=1e-2)  # moments that could be spoiled
    gru, loss = model.ops.embedded_gru, model.ops.cross_entropy

    def gradient_with_inf(*arguments):
        gradients = list(gru.backward(*arguments))
        gradients[5] = np.full_like(gradients[5], np.inf)  # bias_ih
        return tuple(gradients)

    def infinite_loss(logits, targets, **options):
        losses, cache = loss.forward(logits, targets, **options)
        return np.full_like(losses, np.inf), cache

    if where == "parameter":
        model.arena.param["gru.1.weight_hh"][2, 3] = np.nan
    elif where == "gradient":
        replace(model, "embedded_gru", backward=gradient_with_inf)
    else:
        replace(model, "cross_entropy", forward=infinite_loss)
    before = snapshot(model, optimizer)
    result = train_step(model, optimizer, [random_batch(3)], lr=1e-2, clip_norm=1.0, state=state)
    assert result.nonfinite == culprit
    assert result.state is state
    for old, new in zip(before, snapshot(model, optimizer), strict=True):
        assert np.array_equal(old, new, equal_nan=True)


def test_an_update_that_overflows_is_an_error_that_names_its_victim():
    model = small_model(np.float32)
    optimizer = Optimizer(OptimizerConfig(), model.ops)
    with pytest.raises(RunError, match=r"learning rate 1e\+39 .*overflowed parameter embedding\.weight"):
        train_step(model, optimizer, [random_batch(3)], lr=1e39)


def test_a_second_moment_never_becomes_infinite_in_silence():
    """It would freeze its weight for ever, while the loss looks healthy. Clipping prevents it."""

    def huge(dlogits, cache, out):
        return tuple(np.float32(1e25) * gradient for gradient in linear.backward(dlogits, cache))

    model = small_model(np.float32, layers=1)
    linear = model.ops.linear
    replace(model, "linear", backward=huge)
    clipped = train_step(
        model, Optimizer(OptimizerConfig(), model.ops), [random_batch(3)], lr=1e-3, clip_norm=1.0
    )
    assert clipped.nonfinite is None
    assert clipped.grad_norm > 1e24
    with pytest.raises(RunError, match=r"overflowed second moment of embedding\.weight"):
        train_step(model, Optimizer(OptimizerConfig(), model.ops), [random_batch(3)], lr=1e-3)


def test_a_norm_beyond_float64_is_not_blamed_on_the_loss():
    """All gradients are finite, and so is the loss."""
    model = small_model()
    linear = model.ops.linear

    def huge(dlogits, cache, out):
        return tuple(1e200 * gradient for gradient in linear.backward(dlogits, cache))

    replace(model, "linear", backward=huge)
    result = train_step(model, Optimizer(OptimizerConfig(), model.ops), [random_batch(3)], lr=1e-3)
    assert (result.nonfinite, result.grad_norm) == ("gradient norm", np.inf)


@pytest.mark.parametrize("sequences", [3, 5])
def test_a_state_of_other_sequences_is_refused(sequences):
    """One that was too wide lost its last sequences without a word."""
    model = small_model()
    batches = split(random_batch(4), [2, 2])
    with pytest.raises(ValueError, match=f"the state is of {sequences} sequences, the micro-batches have 4"):
        accumulate(model, batches, state=model.initial_state(sequences))


def test_each_micro_batch_has_its_own_dropout_mask():
    model = small_model(dropout=0.5)
    steps = []
    forward = model.forward
    model.forward = lambda *args, dropout_step, **options: (
        steps.append(dropout_step) or forward(*args, dropout_step=dropout_step, **options)
    )
    batch = random_batch(2)
    losses = [accumulate(model, [batch], micro_step=step)[0] for step in (5, 6, 7)]
    assert len(set(losses)) == 3
    assert accumulate(model, [batch] * 3, micro_step=5)[0] == pytest.approx(sum(losses) / 3, rel=1e-14)
    assert steps == [5, 6, 7, 5, 6, 7]


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(name="nadam", variant="keras", weight_decay=0.3, decoupled=False, beta1=0.8),
        OptimizerConfig(name="nadam", variant="constant", weight_decay=0.3, beta2=0.9, eps=1e-3),
        OptimizerConfig(name="adamw", weight_decay=0.3, decoupled=False, beta1=0.7, beta2=0.8, eps=1e-2),
    ],
)
def test_the_optimizer_passes_every_setting_on(config):
    model, twin = small_model(), small_model()
    optimizer, op = Optimizer(config, model.ops), getattr(model.ops, config.name)
    settings = {
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps,
        "decoupled": config.decoupled,
    }
    product = 1.0
    for t in (1, 2):
        train_step(model, optimizer, [random_batch(2, seed=t)], lr=1e-2)
        twin.arena.grads[...] = model.arena.grads
        if config.name == "nadam":
            product *= op.momentum(t, config.beta1, config.variant)
            settings |= {"mu_product": product, "variant": config.variant}
        for part, decay in ((twin.arena.decayed, 0.3), (twin.arena.rest, 0.0)):
            arrays = (getattr(twin.arena, name)[part] for name in ("params", "grads", "m", "v"))
            op.step(*arrays, t=t, lr=1e-2, weight_decay=decay, **settings)
    assert np.array_equal(model.arena.params, twin.arena.params)


def test_the_optimizer_counts_steps_and_not_tensors_or_micro_batches():
    model = small_model()
    optimizer = Optimizer(OptimizerConfig(), model.ops)
    for _ in range(3):
        train_step(model, optimizer, split(random_batch(4), [1, 3]), lr=1e-3)
    mu = Backend("numpy").nadam.momentum
    assert optimizer.t == 3
    assert optimizer.mu_product == pytest.approx(mu(1) * mu(2) * mu(3), rel=1e-15)
    restored = Optimizer(OptimizerConfig(), model.ops)
    restored.restore(optimizer.scalars())
    assert (restored.t, restored.mu_product) == (optimizer.t, optimizer.mu_product)
