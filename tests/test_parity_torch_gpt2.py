"""Agreement of GPT-2 and its operations with PyTorch in float64, to 1e-12 of the norm; every gradient."""

import dataclasses

import numpy as np
import pytest

from gru_ref import GPT2
from gru_ref.config import ModelConfig
from gru_ref.ops import attention, attention_blocked, cross_entropy, gelu, layer_norm

torch = pytest.importorskip("torch")
F = torch.nn.functional


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def leaf(a):
    """A float64 tensor that collects a gradient, or None."""
    return None if a is None else torch.tensor(a, requires_grad=True)


def assert_equal(ours, theirs, tolerance=1e-12):
    """|ours − theirs| ≤ tolerance·|theirs| in the norm of the whole array; shapes equal."""
    theirs = theirs.detach().numpy()
    assert ours.shape == theirs.shape
    assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)


@pytest.mark.parametrize("op", [attention, attention_blocked], ids=["plain", "blocked"])
@pytest.mark.parametrize(
    ("T", "S", "B", "N", "D"), [(1, 1, 1, 1, 1), (7, 7, 2, 3, 5), (150, 150, 1, 2, 16), (3, 70, 2, 1, 4)]
)
def test_attention_equals_scaled_dot_product_attention(op, T, S, B, N, D):
    """Torch has the time axis last but one, and is given the mask: its own is that of offset 0."""
    rng = np.random.default_rng(T)
    q, dy = rng.standard_normal((2, T, B, N, D))
    k, v = rng.standard_normal((2, S, B, N, D))
    leaves = [leaf(a) for a in (q, k, v)]
    seen = torch.tensor(np.tri(T, S, S - T, dtype=bool))
    y_t = F.scaled_dot_product_attention(*(a.permute(1, 2, 0, 3) for a in leaves), attn_mask=seen)
    y_t = y_t.permute(2, 0, 1, 3)
    (y_t * torch.tensor(dy)).sum().backward()
    y, cache = op.forward(q, k, v, offset=S - T)
    assert_equal(y, y_t)
    for gradient, tensor in zip(op.backward(dy, cache), leaves, strict=True):
        if S == 1:  # one key has all the weight: no gradient passes its score, and torch's is rounding
            np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=0, atol=1e-15)
        else:
            assert_equal(gradient, tensor.grad)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(13,), (5, 3)])
def test_layer_norm_equals_torch(lead, bias):
    rng = np.random.default_rng(1)
    x, dy = 2 + 3 * rng.standard_normal((2, *lead, 11))
    weight, offset = rng.standard_normal((2, 11))
    arrays = [x, weight, offset if bias else None]
    leaves = [leaf(a) for a in arrays]
    y_t = F.layer_norm(leaves[0], (11,), *leaves[1:])
    y_t.backward(torch.tensor(dy))
    y, cache = layer_norm.forward(*arrays)
    assert_equal(y, y_t)
    for gradient, tensor in zip(layer_norm.backward(dy, cache), leaves, strict=True):
        if tensor is None:
            assert gradient is None
        else:
            assert_equal(gradient, tensor.grad)


@pytest.mark.parametrize(("approximate", "name"), [("tanh", "tanh"), ("erf", "none")])
def test_both_forms_of_gelu_equal_torch(approximate, name):
    x, dy = 3 * np.random.default_rng(2).standard_normal((2, 40, 7))
    x_t = leaf(x)
    y_t = F.gelu(x_t, approximate=name)
    y_t.backward(torch.tensor(dy))
    y, cache = gelu.forward(x, approximate)
    assert_equal(y, y_t)
    assert_equal(gelu.backward(dy, cache)[0], x_t.grad)


def torch_gpt2(config, p, ids):
    """The model once more, of torch's functions: logits (T, B, V) from ids (T, B) and tensors p by name."""
    (T, B), C, N = ids.shape, config.hidden, config.heads

    def norm(x, name):
        return F.layer_norm(x, (C,), p[f"{name}.weight"], p.get(f"{name}.bias"))

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    x = p["embedding.weight"][ids.T] + p["position.weight"][:T]  # (B, T, C), as torch likes it
    for layer in range(config.layers):
        name = f"block.{layer}"
        qkv = linear(norm(x, f"{name}.ln_1"), f"{name}.attention.qkv").split(C, dim=-1)
        q, k, v = (a.view(B, T, N, C // N).transpose(1, 2) for a in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(B, T, C), f"{name}.attention.proj")
        h = F.gelu(linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.fc"), approximate="tanh")
        x = x + linear(h, f"{name}.mlp.proj")
    classifier = p["embedding.weight" if config.tied else "classifier.weight"]
    return F.linear(norm(x, "ln_f"), classifier[: config.vocab_size]).transpose(0, 1)


TIED = ModelConfig(kind="gpt2", layers=2, hidden=12, heads=3, context=9, vocab_size=11, tied=True)


@pytest.mark.parametrize(
    "config",
    [
        TIED,
        dataclasses.replace(TIED, layers=3, tied=False, vocab_padding=8),
        dataclasses.replace(TIED, bias=False, vocab_padding=64),
        dataclasses.replace(TIED, layers=1, heads=1, context=70, hidden=16),
    ],
    ids=["tied", "untied, padded", "no bias", "longer than a block of keys"],
)
def test_the_model_equals_its_twin_of_torch_functions(config):
    """Logits, loss over counted targets, and the gradient of every parameter."""
    T, B, V = config.context, 3, config.vocab_size
    rng = np.random.default_rng(8)
    ids, targets = rng.integers(0, V, (2, T, B))
    targets[0] = cross_entropy.IGNORE
    count = np.sum(targets != cross_entropy.IGNORE)
    model = GPT2(config, dtype=np.float64)
    model.initialise()
    model.arena.params += 0.3 * rng.standard_normal(model.arena.size)

    p = {name: leaf(a) for name, a in model.arena.param.items()}
    logits_t = torch_gpt2(config, p, torch.tensor(ids))
    targets_t = torch.tensor(targets).reshape(-1)
    loss_t = F.cross_entropy(logits_t.reshape(T * B, V), targets_t, ignore_index=cross_entropy.IGNORE)
    loss_t.backward()

    logits, _, cache = model.forward(ids)
    losses, loss_cache = cross_entropy.forward(logits.reshape(T * B, -1), targets.reshape(-1), vocab_size=V)
    dlogits, _ = cross_entropy.backward(np.full(T * B, 1 / count), loss_cache)
    model.backward(dlogits.reshape(logits.shape), cache)

    assert_equal(logits, logits_t)
    assert losses.sum() / count == pytest.approx(loss_t.item(), rel=1e-13)
    for name, tensor in p.items():
        assert_equal(model.arena.grad[name], tensor.grad)
