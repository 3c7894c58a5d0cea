"""Training: one step (step.py), a run in memory (trainer.py), the loop with its files (loop.py)."""

from gru_ref.training.loop import Stop as Stop
from gru_ref.training.loop import TrainResult as TrainResult
from gru_ref.training.loop import resume as resume
from gru_ref.training.loop import train as train
