"""The exceptions of the planner. The command line prints their text alone, never a traceback."""


class PlannerError(Exception):
    """A problem, a plan or an option that the planner can't use: what, where, value, limit and one remedy."""


class SolverUnavailableError(PlannerError):
    """A solver that is not installed or that broke down; the planner goes on with the next one."""
