"""The one place that states the version; `setup.cfg` and `gru-ref --version` read it."""

__version__ = "0.1.0"
