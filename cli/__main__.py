"""`python -m gru_ref.cli` is `gru-ref`."""

from gru_ref.cli import main

main()
