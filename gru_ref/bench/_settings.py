"""What the user says of a measurement."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How long and with what; the sizes of the work are each benchmark's own."""

    threads: int  # of each side
    kernels: str = "numba"  # ours
    seconds: float = 10.0  # for one comparison, after its warm-up
    repeats: int = 0  # rounds of turns instead; 0: as many as the seconds allow, and at least three
