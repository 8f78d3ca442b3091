"""The tree of exceptions that a user can cause. The command line prints their text alone, never a traceback.

Each text says what was wrong, where, the value and the limit, and one remedy.
"""


class LazyTrainError(Exception):
    """The root: anything that a user, a file or a machine can cause."""


class ConfigError(LazyTrainError):
    """A config.json or an option that can't be used."""


class ModelFileError(LazyTrainError):
    """A shard, an index or a tensor that is missing, cut, foreign or contradicts another."""


class DataError(LazyTrainError):
    """A data file or a row that can't be trained on."""


class MemoryBudgetError(LazyTrainError):
    """A tier (device, host, NVMe) has less room than the run needs."""


class PlanError(LazyTrainError):
    """A plan that does not belong to this model, or that contradicts itself."""


class CheckpointError(LazyTrainError):
    """A checkpoint that is incomplete, damaged or of another run."""


class RunLockedError(LazyTrainError):
    """Another process works in the run directory."""


class StateConsumedError(LazyTrainError):
    """A training state that a step has already consumed."""


class NonFiniteError(LazyTrainError):
    """A gradient norm that is not finite, where the user asked for an error, or step after step."""
