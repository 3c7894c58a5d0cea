"""Type aliases shared by the public API."""

from collections.abc import Callable
from typing import Any, TypeAlias

from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""A NumPy array of any dtype (or one that NumPy's dispatch accepts, such as CuPy's)."""

Event: TypeAlias = dict[str, Any]
"""One thing that happened, with an `event` key naming its kind; it is also a line of events.jsonl."""

Observer: TypeAlias = Callable[[Event], None]
"""Called with every event and every step of a training run; the library itself never prints."""
