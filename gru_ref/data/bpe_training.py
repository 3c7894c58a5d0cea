"""A vocabulary made in a process of its own, so that this one still hears signals and shows that it works.

The library's training may take minutes, and nothing interrupts it. The process gets the texts through a
pipe, which is its lifeline too: it ends when the other end is gone, and is ended when nobody waits for it.
Not here: what training does (gru_ref/data/bpe.py).
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from gru_ref.data import bpe
from gru_ref.errors import GruRefError, RunError

PATIENCE = 0.2  # seconds between two calls of `waiting`

# Not multiprocessing's own processes: those import the caller's script again.
_PROGRAM = """
import sys
sys.path[:] = sys.argv[3:]
from gru_ref.data import bpe_training
bpe_training.serve(int(sys.argv[1]), int(sys.argv[2]))
"""


def train(texts: Iterable[bytes], vocab_size: int, waiting: Callable[[], None] = lambda: None) -> bpe.BPE:
    """`bpe.train` in another process. waiting: called again and again until the vocabulary is made.

    Raises what `bpe.train` raises, and RunError where the process dies.
    """
    ours, theirs = Pipe()
    arguments = [str(theirs.fileno()), str(vocab_size), *sys.path]
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which ends the other
        )
        theirs.close()
        try:
            for text in filter(None, texts):
                ours.send_bytes(text)
            ours.send_bytes(b"")
            while not ours.poll(PATIENCE):
                waiting()
            made = ours.recv()
        except (EOFError, ConnectionError):
            raise RunError(
                "the process that makes the vocabulary died, perhaps for lack of memory; give it less text"
            ) from None
        finally:
            process.kill()
            process.wait()
    if isinstance(made, GruRefError):
        raise made
    return bpe.BPE(made)


# In the process --------------------------------------------------------------------------------------------


def serve(descriptor: int, vocab_size: int) -> None:
    """Train on the texts that come through the pipe, and send a definition, or an error, back."""
    with Connection(descriptor) as pipe:
        texts = _received(pipe)
        try:
            answer: object = bpe.train(texts, vocab_size).definition()
        except GruRefError as error:
            for _ in texts:  # or their sender would find the pipe closed, and not the error
                pass
            answer = error
        except EOFError:
            return
        pipe.send(answer)


def _received(pipe: Connection) -> Iterator[bytes]:
    yield from iter(pipe.recv_bytes, b"")
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()


def _end_with(pipe: Connection) -> None:
    """Nothing comes after the texts but the end of the pipe: nobody waits for a vocabulary any more."""
    pipe.poll(None)
    os._exit(1)
