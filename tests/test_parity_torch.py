"""Agreement with PyTorch in float64, to 1e-12 of the norm: outputs, every gradient, optimizers, rounding."""

import numpy as np
import pytest

from gru_ref import GRULM
from gru_ref.config import ModelConfig
from gru_ref.models import padded_vocab
from gru_ref.ops import adamw, clip, cross_entropy, embedding, gru, linear, matmul, nadam

torch = pytest.importorskip("torch")
F = torch.nn.functional


@pytest.fixture(autouse=True, scope="module")
def float64_on_one_thread():
    """NAdam's running product of μ has the default type, whatever the parameters' type is."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


def leaf(a):
    """A float64 tensor that collects a gradient, or None."""
    return None if a is None else torch.tensor(a, requires_grad=True)


def assert_equal(ours, theirs, tolerance=1e-12):
    """|ours − theirs| ≤ tolerance·|theirs| in the norm of the whole array; shapes equal."""
    theirs = theirs.detach().numpy()
    assert ours.shape == theirs.shape
    assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)


def gru_layers(L, I, H, rng):  # noqa: E741 (the field's letter for the input width)
    """weight_ih, weight_hh, bias_ih, bias_hh of each layer; biases are non-zero for every gate (N01)."""
    return [
        [rng.standard_normal(s) / 2 for s in ((3 * H, I if l == 0 else H), (3 * H, H), (3 * H,), (3 * H,))]
        for l in range(L)  # noqa: E741
    ]


@pytest.mark.parametrize(
    ("L", "T", "B", "I", "H", "h0"),
    [
        (1, 1, 1, 1, 1, True),
        (1, 7, 3, 5, 11, True),
        (1, 4, 2, 3, 6, False),
        (2, 9, 1, 7, 5, True),
        (3, 5, 4, 2, 7, True),
        (3, 3, 3, 13, 3, False),
    ],
)
def test_stacked_gru_layers_equal_torch(L, T, B, I, H, h0):  # noqa: E741
    """Every output, and the gradient of every input, where each layer's last state has a gradient too."""
    rng = np.random.default_rng(L * T + I)
    layers = gru_layers(L, I, H, rng)
    x, state = rng.standard_normal((T, B, I)), rng.standard_normal((L, B, H)) if h0 else None
    dy, dh_T = rng.standard_normal((T, B, H)), rng.standard_normal((L, B, H))

    theirs = torch.nn.GRU(I, H, L)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    with torch.no_grad():
        for l, tensors in enumerate(layers):  # noqa: E741
            for name, value in zip(names, tensors, strict=True):
                getattr(theirs, f"{name}_l{l}").copy_(torch.tensor(value))
    x_t, state_t = leaf(x), leaf(state)
    y_t, h_t = theirs(x_t, state_t)
    ((y_t * torch.tensor(dy)).sum() + (h_t * torch.tensor(dh_T)).sum()).backward()

    y, caches = x, []
    for l, tensors in enumerate(layers):  # noqa: E741
        y, cache = gru.forward(y, None if state is None else state[l], *tensors)
        assert_equal(y[-1], h_t[l])
        caches.append(cache)
    assert_equal(y, y_t)
    d = dy
    for l in reversed(range(L)):  # noqa: E741
        d, dh0, *gradients = gru.backward(d, caches[l], dh_T=dh_T[l])
        for name, gradient in zip(names, gradients, strict=True):
            assert_equal(gradient, getattr(theirs, f"{name}_l{l}").grad)
        if h0:
            assert_equal(dh0, state_t.grad[l])
        else:
            assert dh0 is None
    assert_equal(d, x_t.grad)


@pytest.mark.parametrize(("T", "B", "I", "H"), [(1, 1, 1, 1), (6, 3, 5, 7)])
def test_the_form_of_2014_equals_its_equations_under_autograd(T, B, I, H):  # noqa: E741
    """No layer of PyTorch has this form, so its equations are stated once more, gate by gate."""
    rng = np.random.default_rng(T)
    arrays = [rng.standard_normal((T, B, I)), rng.standard_normal((B, H)), *gru_layers(1, I, H, rng)[0]]
    dy, dh_T = rng.standard_normal((T, B, H)), rng.standard_normal((B, H))

    leaves = [leaf(a) for a in arrays]
    x, h, weight_ih, weight_hh, bias_ih, bias_hh = leaves
    (W_r, W_z, W_n), (U_r, U_z, U_n) = weight_ih.chunk(3), weight_hh.chunk(3)
    (b_ir, b_iz, b_in), (b_hr, b_hz, b_hn) = bias_ih.chunk(3), bias_hh.chunk(3)
    states = []
    for t in range(T):
        r = torch.sigmoid(x[t] @ W_r.T + b_ir + h @ U_r.T + b_hr)
        z = torch.sigmoid(x[t] @ W_z.T + b_iz + h @ U_z.T + b_hz)
        n = torch.tanh(x[t] @ W_n.T + b_in + (r * h) @ U_n.T + b_hn)
        h = (1 - z) * n + z * h
        states.append(h)
    y_t = torch.stack(states)
    ((y_t * torch.tensor(dy)).sum() + (h * torch.tensor(dh_T)).sum()).backward()

    y, cache = gru.forward(*arrays, reset_after=False)
    assert_equal(y, y_t)
    for gradient, tensor in zip(gru.backward(dy, cache, dh_T=dh_T), leaves, strict=True):
        assert_equal(gradient, tensor.grad)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torch(label_smoothing, ignored):
    rng = np.random.default_rng(1)
    z, targets, dloss = 3 * rng.standard_normal((11, 7)), rng.integers(0, 7, 11), rng.standard_normal(11)
    if ignored:
        targets[[0, 4, 10]] = cross_entropy.IGNORE
    z_t = leaf(z)
    options = {"ignore_index": cross_entropy.IGNORE, "label_smoothing": label_smoothing}
    loss_t = F.cross_entropy(z_t, torch.tensor(targets), reduction="none", **options)
    loss_t.backward(torch.tensor(dloss))
    loss, cache = cross_entropy.forward(z, targets, label_smoothing=label_smoothing)
    assert_equal(loss, loss_t)
    assert_equal(cross_entropy.backward(dloss, cache)[0], z_t.grad)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(13,), (5, 3)])
def test_linear_equals_torch(lead, bias):
    rng = np.random.default_rng(2)
    x, weight, b = (rng.standard_normal(shape) for shape in ((*lead, 7), (5, 7), (5,)))
    arrays = [x, weight, b if bias else None]
    dy = rng.standard_normal((*lead, 5))
    leaves = [leaf(a) for a in arrays]
    y_t = F.linear(*leaves)
    y_t.backward(torch.tensor(dy))
    y, cache = linear.forward(*arrays)
    assert_equal(y, y_t)
    for gradient, tensor in zip(linear.backward(dy, cache), leaves, strict=True):
        if tensor is None:
            assert gradient is None
        else:
            assert_equal(gradient, tensor.grad)


def test_embedding_equals_torch():
    """More tokens than rows, so ids repeat; and rows that no token names (N03)."""
    rng = np.random.default_rng(3)
    ids, weight, dy = rng.integers(0, 6, (9, 5)), rng.standard_normal((8, 3)), rng.standard_normal((9, 5, 3))
    weight_t = leaf(weight)
    y_t = F.embedding(torch.tensor(ids), weight_t)
    y_t.backward(torch.tensor(dy))
    y, cache = embedding.forward(ids, weight)
    assert np.array_equal(y, y_t.detach().numpy())
    assert_equal(embedding.backward(dy, cache)[1], weight_t.grad)


def optimizer_runs(optimizer, step):
    """Parameters after each of 100 steps with random gradients, by PyTorch's optimizer and by `step`."""
    rng = np.random.default_rng(4)
    theta = rng.standard_normal(17)
    theta_t = leaf(theta)
    optimizer = optimizer([theta_t])
    m, v = np.zeros(17), np.zeros(17)
    for t in range(1, 101):
        g = rng.standard_normal(17) * 10.0 ** rng.integers(-3, 3)
        theta_t.grad = torch.tensor(g)
        optimizer.step()
        step(theta, g, m, v, t)
        yield theta, theta_t


DECAYS = [(0.0, True), (0.1, True), (0.1, False)]


@pytest.mark.parametrize(("weight_decay", "decoupled"), DECAYS)
@pytest.mark.parametrize(("variant", "psi"), [("torch", 0.004), ("keras", 1.0)])
def test_nadam_equals_torch_over_100_steps(variant, psi, weight_decay, decoupled):
    options = {"lr": 2e-3, "weight_decay": weight_decay}
    product = 1.0

    def optimizer(parameters):
        return torch.optim.NAdam(
            parameters, betas=(0.9, 0.999), momentum_decay=psi, decoupled_weight_decay=decoupled, **options
        )

    def step(theta, g, m, v, t):
        nonlocal product
        product *= nadam.momentum(t, variant=variant)
        nadam.step(theta, g, m, v, t=t, mu_product=product, variant=variant, decoupled=decoupled, **options)

    for ours, theirs in optimizer_runs(optimizer, step):
        assert_equal(ours, theirs)


@pytest.mark.parametrize(("weight_decay", "decoupled"), DECAYS)
def test_adamw_and_adam_with_l2_equal_torch_over_100_steps(weight_decay, decoupled):
    options = {"lr": 2e-3, "weight_decay": weight_decay}
    theirs_of = torch.optim.AdamW if decoupled else torch.optim.Adam

    def step(theta, g, m, v, t):
        adamw.step(theta, g, m, v, t=t, beta1=0.8, beta2=0.95, decoupled=decoupled, **options)

    for ours, theirs in optimizer_runs(lambda p: theirs_of(p, betas=(0.8, 0.95), **options), step):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_torch_but_for_the_1e_6_that_torch_adds_to_the_norm(max_norm):
    rng = np.random.default_rng(5)
    shapes = [(7, 3), (7,), (), (2, 3, 4)]
    gradients = [rng.standard_normal(shape) for shape in shapes]
    tensors = [leaf(np.zeros(shape)) for shape in shapes]
    for tensor, g in zip(tensors, gradients, strict=True):
        tensor.grad = torch.tensor(g)
    norm_t = torch.nn.utils.clip_grad_norm_(tensors, max_norm)
    norm = clip.global_norm(gradients)
    assert norm == pytest.approx(norm_t.item(), rel=1e-14)
    for tensor, g in zip(tensors, gradients, strict=True):
        ours = g * clip.factor(norm, max_norm)
        if norm > max_norm:
            ours *= norm / (norm + 1e-6)
        assert_equal(ours, tensor.grad, 1e-14)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rounding_equals_torch_bit_for_bit(precision):
    """A quarter million random patterns of 32 bits, all exponents alike, and their neighbours at ties."""
    bits = np.random.default_rng(6).integers(0, 2**32, 250_000, dtype=np.uint32)
    last = {"bf16": 16, "fp16": 13}[precision]
    ties = (bits[:50_000] >> np.uint32(last) << np.uint32(last)) | np.uint32(1 << (last - 1))
    x = np.concatenate([bits, ties, ties - np.uint32(1), ties + np.uint32(1)]).view(np.float32)
    if precision == "fp16":  # all exponents that fp16 has, subnormal and overflowing ones too
        exponents = np.random.default_rng(7).integers(-27, 18, x.size)
        fractions, _ = np.frexp(np.where(np.isfinite(x), x, 1))
        x = np.concatenate([x, np.ldexp(fractions, exponents).astype(np.float32)])
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the patterns
        ours = matmul.round_to(x, precision)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    theirs = torch.from_numpy(x).to(dtype).float().numpy()
    nan = np.isnan(x)
    assert np.isnan(ours[nan]).all()
    assert np.array_equal(ours[~nan].view(np.uint32), theirs[~nan].view(np.uint32))


class TorchGRULM(torch.nn.Module):
    """The same model of PyTorch's own layers, with the parameters of a GRULM copied in."""

    def __init__(self, model):
        super().__init__()
        config, p = model.config, model.arena.param
        rows, H = padded_vocab(config), config.hidden
        self.embedding = torch.nn.Embedding(rows, config.embedding or H)
        self.gru = torch.nn.GRU(config.embedding or H, H, config.layers)
        self.classifier = torch.nn.Linear(H, rows)
        if config.tied:
            self.classifier.weight = self.embedding.weight
        self.named = {"embedding.weight": self.embedding.weight, "classifier.bias": self.classifier.bias}
        if not config.tied:
            self.named["classifier.weight"] = self.classifier.weight
        for l in range(config.layers):  # noqa: E741
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                self.named[f"gru.{l}.{name}"] = getattr(self.gru, f"{name}_l{l}")
        assert self.named.keys() == p.keys()
        with torch.no_grad():
            for name, tensor in self.named.items():
                tensor.copy_(torch.tensor(p[name]))

    def forward(self, ids, state):
        y, state = self.gru(self.embedding(ids), state)
        return self.classifier(y), state


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(layers=1, hidden=7, vocab_size=11),
        ModelConfig(layers=3, hidden=6, embedding=5, vocab_size=11, vocab_padding=8),
        ModelConfig(layers=2, hidden=9, vocab_size=13, vocab_padding=4, tied=True),
    ],
    ids=["plain", "padded, E ≠ H", "tied"],
)
def test_a_language_model_equals_its_twin_of_torch_layers(config):
    """Logits, next state, loss over counted targets, and the gradient of every parameter."""
    T, B, V = 6, 3, config.vocab_size
    rng = np.random.default_rng(8)
    ids, targets = rng.integers(0, V, (2, T, B))
    targets[0] = cross_entropy.IGNORE
    count = np.sum(targets != cross_entropy.IGNORE)
    state = rng.standard_normal((config.layers, B, config.hidden))
    model = GRULM(config, dtype=np.float64)
    model.initialise()

    twin = TorchGRULM(model)
    logits_t, state_t = twin(torch.tensor(ids), torch.tensor(state))
    true_logits_t, targets_t = logits_t[..., :V].reshape(T * B, V), torch.tensor(targets).reshape(-1)
    loss_t = F.cross_entropy(true_logits_t, targets_t, ignore_index=cross_entropy.IGNORE)
    loss_t.backward()

    logits, new_state, cache = model.forward(ids, state)
    losses, loss_cache = cross_entropy.forward(logits.reshape(T * B, -1), targets.reshape(-1), vocab_size=V)
    dlogits, _ = cross_entropy.backward(np.full(T * B, 1 / count), loss_cache)
    model.backward(dlogits.reshape(logits.shape), cache)

    assert_equal(logits, logits_t)
    assert_equal(new_state, state_t)
    assert losses.sum() / count == pytest.approx(loss_t.item(), rel=1e-13)
    for name, tensor in twin.named.items():
        assert_equal(model.arena.grad[name], tensor.grad)
