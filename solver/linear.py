"""A mixed-integer linear model as sparse rows, and nothing about what it means.

minimise  x[objective]    subject to    rows a·x <= b or a·x == b,   lower <= x <= upper,   some x binary or integer
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy import sparse

INFINITY = float("inf")


class Affine:
    """A sum of variables times coefficients, plus a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self, terms: dict[int, float] | None = None, constant: float = 0.0) -> None:
        self.terms = terms if terms is not None else {}
        self.constant = constant

    def __add__(self, other: "Affine | float") -> "Affine":
        if not isinstance(other, Affine):
            return Affine(dict(self.terms), self.constant + other)
        terms = dict(self.terms)
        for index, value in other.terms.items():
            terms[index] = terms.get(index, 0.0) + value
        return Affine(terms, self.constant + other.constant)

    __radd__ = __add__

    def __mul__(self, factor: float) -> "Affine":
        return Affine({i: v * factor for i, v in self.terms.items()}, self.constant * factor)

    __rmul__ = __mul__

    def __neg__(self) -> "Affine":
        return self * -1.0

    def __sub__(self, other: "Affine | float") -> "Affine":
        return self + (-other)

    def __rsub__(self, other: float) -> "Affine":
        return -self + other

    def value(self, x: np.ndarray) -> float:
        """Return the sum at a point."""
        return self.constant + sum(v * float(x[i]) for i, v in self.terms.items())

    @property
    def is_zero(self) -> bool:
        """Return whether this is the constant 0."""
        return self.constant == 0.0 and not any(self.terms.values())


def total(parts: Iterable["Affine | float"]) -> Affine:
    """Return the sum of many expressions, without building the sums in between."""
    terms: dict[int, float] = {}
    constant = 0.0
    for part in parts:
        if not isinstance(part, Affine):
            constant += part
            continue
        constant += part.constant
        for index, value in part.terms.items():
            terms[index] = terms.get(index, 0.0) + value
    return Affine(terms, constant)


@dataclass(kw_only=True)
class LinearModel:
    """Variables and rows under construction (see the head of this file).

    Attributes:
        decide_first: binaries on which much depends; a solver should branch on them before others.
    """

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    binary: list[int] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    decide_first: list[int] = field(default_factory=list)
    objective: int = 0
    _rows: list[int] = field(default_factory=list)
    _cols: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)
    _bounds: list[float] = field(default_factory=list)
    _is_equal: list[bool] = field(default_factory=list)

    @property
    def num_vars(self) -> int:
        """Return the number of variables."""
        return len(self.lower)

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return len(self._bounds)

    def add_var(
        self,
        lower: float = 0.0,
        upper: float = INFINITY,
        *,
        binary: bool = False,
        integer: bool = False,
        decide_first: bool = False,
    ) -> Affine:
        """Add a variable and return it."""
        index = len(self.lower)
        if decide_first:
            self.decide_first.append(index)
        self.lower.append(lower)
        self.upper.append(1.0 if binary else upper)
        if binary:
            self.binary.append(index)
        if integer:
            self.integer.append(index)
        return Affine({index: 1.0})

    def add_at_most(self, expression: Affine, bound: float = 0.0, *, equal: bool = False) -> None:
        """Add the row expression <= bound (or ==); a row without variables must hold by itself, or no point does."""
        row = len(self._bounds)
        self._is_equal.append(equal)
        for index, value in expression.terms.items():
            if value:
                self._rows.append(row)
                self._cols.append(index)
                self._values.append(value)
        self._bounds.append(bound - expression.constant)

    def add_at_least(self, expression: Affine, bound: "Affine | float" = 0.0) -> None:
        """Add the row expression >= bound."""
        self.add_at_most(bound - expression)

    def add_equal(self, expression: Affine, bound: float = 0.0) -> None:
        """Add the row expression == bound."""
        self.add_at_most(expression, bound, equal=True)

    def add_running_sums(self, parts: Iterable[Affine]) -> list[Affine]:
        """Return the sums of the parts before each position, and of all; variables, so that rows stay short."""
        sums = [Affine()]
        for part in parts:
            if part.terms:
                following = self.add_var()
                self.add_equal(following - sums[-1] - part)
                sums.append(following)
            else:
                sums.append(sums[-1] + part)
        return sums

    def matrix(self) -> tuple[sparse.csr_array, np.ndarray, np.ndarray]:
        """Return (a, b, is_equal): rows a·x <= b, or == b where `is_equal`."""
        shape = (len(self._bounds), len(self.lower))
        a = sparse.csr_array((self._values, (self._rows, self._cols)), shape=shape)
        return a, np.array(self._bounds), np.array(self._is_equal, dtype=bool)
