"""The exceptions that gru-ref raises, and the exit code each one means on the command line.

    GruRefError            1  the run or the verification failed
      CheckpointError      1  a checkpoint is damaged, incomplete or not explained by its config
      RunError             1  training could not go on (non-finite numbers, a failed write)
      UsageError           2  wrong usage or input
        ConfigError        2  an unknown key, a value out of range, settings that contradict each other
        DataError          2  text or a corpus that cannot be used
        RunDirectoryError  2  a run directory that is in use, finished or not writable
        BackendError       2  a device or a kernel set that this machine or version does not have

Every message is one line that names the file or option and says what to do.
"""


class GruRefError(Exception):
    """Base of the family. `exit_code` is what the command line ends with."""

    exit_code = 1


class CheckpointError(GruRefError):
    """A checkpoint is damaged, incomplete, or does not hold what its config explains."""


class RunError(GruRefError):
    """Training could not go on; the last good checkpoint is intact."""


class UsageError(GruRefError):
    """The caller asked for something impossible; nothing was changed."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key is unknown, out of range, or contradicts another."""


class DataError(UsageError):
    """Text or a corpus cannot be used as it is."""


class RunDirectoryError(UsageError):
    """A run directory is in use, finished, missing or not writable."""


class BackendError(UsageError):
    """A device or kernel set is not available."""
