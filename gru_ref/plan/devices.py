"""Common GPUs: memory, memory bandwidth, and the peak of matrix products in each precision.

The figures are those of the vendor data sheets: dense, so without structured sparsity, which doubles what
is printed largest there; fp16 and bf16 with sums in fp32. A precision that is not listed has no fast path on
that card, or no figure that we could confirm. A peak is what no program exceeds, not what one should expect.
"""

import difflib
from dataclasses import dataclass

from gru_ref.errors import ConfigError

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


@dataclass(frozen=True)
class Device:
    """A line of the table."""

    name: str
    memory: float  # GiB; a little less can be used, for the driver and for error correction
    bandwidth: float  # GB/s of that memory, 10⁹ bytes
    peak: dict[str, float]  # precision: TFLOP/s, 10¹² a second

    def flops_per_second(self, precision: str) -> float:
        """The peak in FLOP/s; raises ConfigError for a precision that is not listed."""
        if precision not in self.peak:
            raise ConfigError(
                f"{self.name} has no listed peak for {precision}; it has {', '.join(self.peak)}: "
                "choose one with --precision"
            )
        return 1e12 * self.peak[precision]


def _device(name: str, memory: float, bandwidth: float, *peaks: float | None) -> Device:
    return Device(
        name, memory, bandwidth, {p: peak for p, peak in zip(PRECISIONS, peaks, strict=True) if peak}
    )


#                          GiB  GB/s    fp32   tf32   fp16    bf16
DEVICES = (
    _device("T4", 16, 320, 8.1, None, 65, None),
    _device("V100-16GB", 16, 900, 15.7, None, 125, None),  # SXM2
    _device("V100-32GB", 32, 900, 15.7, None, 125, None),  # SXM2
    _device("RTX-3080-Laptop", 8, 448, 19.0, None, None, None),  # at 1545 MHz; it depends on the power limit
    _device("RTX-3080", 10, 760, 29.8, 29.8, 59.5, 59.5),
    _device("RTX-3090", 24, 936, 35.6, 35.6, 71, 71),
    _device("RTX-4090", 24, 1008, 82.6, 82.6, 165.2, 165.2),
    _device("RTX-5090", 32, 1792, 104.8, 104.8, 209.5, 209.5),
    _device("RTX-A6000", 48, 768, 38.7, 77.4, 154.8, 154.8),
    _device("A10", 24, 600, 31.2, 62.5, 125, 125),
    _device("A10G", 24, 600, 35, 35, 70, 70),
    _device("A40", 48, 696, 37.4, 74.8, 149.7, 149.7),
    _device("A100-40GB", 40, 1555, 19.5, 156, 312, 312),
    _device("A100-80GB", 80, 2039, 19.5, 156, 312, 312),  # SXM4; the PCIe card has 1935 GB/s
    _device("L4", 24, 300, 30.3, 60, 121, 121),
    _device("L40", 48, 864, 90.5, 90.5, 181.05, 181.05),
    _device("L40S", 48, 864, 91.6, 183, 362.05, 362.05),
    _device("H100-PCIe", 80, 2000, 51, 378, 756.5, 756.5),
    _device("H100-SXM", 80, 3350, 67, 494.5, 989.5, 989.5),
    _device("H200", 141, 4800, 67, 494.5, 989.5, 989.5),
)


def device(name: str) -> Device:
    """The device of that name, in any case and with spaces for hyphens; raises ConfigError."""
    known = {entry.name.lower(): entry for entry in DEVICES}
    wanted = "-".join(name.lower().split())
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: here, {', '.join(known)}"
        raise ConfigError(f"--device: unknown device {name!r}; {hint}")
    return known[wanted]
