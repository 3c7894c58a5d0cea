"""A whole training beside PyTorch's own layers and optimizers: the loss of every step agrees to 1e-9.

The twin shares nothing but the initial weights, the windows and the schedule: `torch.nn.GRU`, autograd, and
`torch.optim`'s NAdam and AdamW.
"""

import numpy as np
import pytest

from gru_ref.config import ModelConfig, OptimizerConfig, ScheduleConfig
from gru_ref.data.tokenizers import get_tokenizer
from gru_ref.data.windows import IGNORE, Windows
from gru_ref.models.gru_lm import GRULM
from gru_ref.schedules import learning_rate
from gru_ref.training.optimizer import Optimizer
from gru_ref.training.step import train_step

torch = pytest.importorskip("torch")

L, H, T, B, A = 2, 16, 8, 2, 2  # A micro-batches of B windows of T tokens in a step
CLIP = 0.5
TEXT = b"The gates are sigmoids, the candidate is a tanh, and the state is a mean of the two.\n" * 3


@pytest.fixture
def float64():
    """NAdam keeps the product of its momenta in the default type."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


class Twin(torch.nn.Module):
    """The same model from PyTorch's layers, with the weights of `model`."""

    def __init__(self, model):
        super().__init__()
        V = model.config.vocab_size
        self.embedding = torch.nn.Embedding(V, H)
        self.gru = torch.nn.GRU(H, H, L)
        self.classifier = torch.nn.Linear(H, V)
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        names = {f"gru.{kind}_l{layer}": f"gru.{layer}.{kind}" for layer in range(L) for kind in kinds}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.from_numpy(model.arena.param[names.get(name, name)]))

    def loss(self, inputs, targets):
        """Σ nats over the counted targets."""
        hidden, _ = self.gru(self.embedding(torch.from_numpy(inputs)))
        logits = self.classifier(hidden).reshape(T * inputs.shape[1], -1)
        flat = torch.from_numpy(targets).reshape(-1)
        return torch.nn.functional.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="sum")


def step_of_twin(twin, optimizer, micro_batches, lr):
    tokens = sum(int((targets != IGNORE).sum()) for _, targets in micro_batches)
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets in micro_batches:
        loss = twin.loss(inputs, targets) / tokens
        loss.backward()
        total += loss.item()
    # not clip_grad_norm_, which divides by the norm + 1e-6
    norm = torch.cat([p.grad.reshape(-1) for p in twin.parameters()]).norm()
    for p in twin.parameters():
        p.grad *= min(1.0, CLIP / norm.item())
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return total


@pytest.mark.parametrize(("name", "steps"), [("nadam", 200), ("adamw", 50)])
def test_the_loss_curve_is_that_of_pytorch(float64, name, steps):
    tokenizer = get_tokenizer("ascii100")
    windows = Windows(tokenizer.encode(TEXT), T, seed=3)
    model = GRULM(ModelConfig(layers=L, hidden=H, vocab_size=tokenizer.vocab_size), seed=5, dtype=np.float64)
    model.initialise()
    schedule = ScheduleConfig(lr=1e-2, min_lr=1e-3, warmup=10, decay=steps // 4)
    config = OptimizerConfig(name=name, weight_decay=0.05)
    optimizer = Optimizer(config, model.ops)
    twin = Twin(model)
    matrices = [p for p in twin.parameters() if p.ndim >= 2]
    vectors = [p for p in twin.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    twins_optimizer = {
        "nadam": lambda: torch.optim.NAdam(groups, momentum_decay=0.004, decoupled_weight_decay=True),
        "adamw": lambda: torch.optim.AdamW(groups),
    }[name]()
    ours, theirs = [], []
    for step in range(1, steps + 1):
        taken = windows.indices((step - 1) * A * B, A * B)
        micro_batches = [windows.batch(taken[i : i + B]) for i in range(0, A * B, B)]
        lr = learning_rate(schedule, step, steps)
        ours.append(train_step(model, optimizer, micro_batches, lr=lr, clip_norm=CLIP).loss)
        theirs.append(step_of_twin(twin, twins_optimizer, micro_batches, lr))
    relative = np.abs(np.array(ours) / theirs - 1)
    assert relative.max() < 1e-9, f"step {relative.argmax() + 1}: {relative.max():.1e}"
    assert np.mean(ours[-5:]) < 0.7 * ours[0]  # they did train
