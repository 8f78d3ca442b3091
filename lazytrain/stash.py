"""What the forward sweep leaves for the backward sweep: boundaries and residuals, kept here or packed off.

Shape letters: b batch, t time, d model width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lazytrain.activations import NUM_FETCH_BUFFERS, Activations, Packed
from lazytrain.homes import UnitHome
from lazytrain.lanes import Ticket
from lazytrain.layout import ALIGN_BYTES, round_up
from lazytrain.programs import BlockPrograms

NUM_OFFLOADS_IN_FLIGHT = 2

Fetched = Mapping[str, list[Tensor]]


class Stash:
    """One step's boundaries and residuals by block number (see the head of this file).

    `programs` holds each block's programs, one a microbatch.
    """

    def __init__(self, activations: Activations) -> None:
        self.programs: dict[int, list[BlockPrograms]] = {}
        self._activations = activations
        self._boundaries: dict[int, list[Tensor]] = {}
        self._residuals: dict[int, list[tuple[Tensor, ...]]] = {}
        self._packs: dict[int, list[tuple[str, Packed]]] = {}
        self._num_residuals: dict[int, list[int]] = {}
        # Offloads that may still read their tensors, which are held here until the compute queue has waited for them.
        self._in_flight: list[tuple[Ticket, Any]] = []

    def take_oldest(self) -> Ticket | None:
        """Return what compute must wait for before there is room for another offload; its tensors are let go."""
        return self._in_flight.pop(0)[0] if len(self._in_flight) == NUM_OFFLOADS_IN_FLIGHT else None

    def take_all(self) -> list[Ticket]:
        """Return what compute must wait for before all offloads have ended; their tensors are let go."""
        tickets = [ticket for ticket, _ in self._in_flight]
        self._in_flight.clear()
        return tickets

    def put(self, i: int, home: UnitHome, xs: list[Tensor], residuals: list[tuple[Tensor, ...]], done: Ticket) -> None:
        """Keep or send away, once `done` is due, what block `i` needs: its inputs x_btd and its residuals."""
        packs: list[tuple[str, Packed]] = []
        name, plan = home.unit.name, home.plan
        if plan.boundary == "device":
            self._boundaries[i] = xs
        elif plan.boundary != "none":
            packs.append(("boundary", self._activations.offload(f"{i}.boundary", xs, plan.boundary, name, done)))
        flat = [tensor for kept in residuals for tensor in kept]
        if plan.residuals in ("host", "nvme") and flat:
            self._num_residuals[i] = [len(kept) for kept in residuals]
            packs.append(("residuals", self._activations.offload(f"{i}.residuals", flat, plan.residuals, name, done)))
        else:
            self._residuals[i] = residuals
        if packs:
            self._packs[i] = packs
            self._in_flight.append((packs[-1][1].ticket, (xs, flat)))

    def put_boundary(self, i: int, xs: list[Tensor]) -> None:
        """Keep inputs of block `i` that were computed again."""
        self._boundaries[i] = xs

    def boundary(self, i: int) -> list[Tensor]:
        """Return block `i`'s inputs, which stay kept."""
        return list(self._boundaries[i])

    def fetch_turns(self, order: Sequence[int]) -> dict[int, int]:
        """Make room for the largest fetch; return block -> number in the order in which packs come back."""
        sizes = [sum(round_up(pack.num_bytes, ALIGN_BYTES) for _, pack in packs) for packs in self._packs.values()]
        self._activations.reserve(max(sizes, default=0))
        return {i: turn for turn, i in enumerate(i for i in order if i in self._packs)}

    def fetch(self, i: int, turn: int, name: str, free: Ticket | None) -> tuple[Fetched, Ticket]:
        """Bring back what block `i` sent away, into a buffer that is free once `free` is due."""
        named = self._packs.pop(i)
        tensors, ticket = self._activations.fetch([pack for _, pack in named], turn, name, free)
        return {name: kept for (name, _), kept in zip(named, tensors)}, ticket

    def take(self, i: int, fetched: Fetched) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        """Return block `i`'s inputs and residuals, one entry a microbatch; they are no longer kept."""
        boundaries = fetched["boundary"] if "boundary" in fetched else self._boundaries.pop(i)
        if "residuals" not in fetched:
            return boundaries, self._residuals.pop(i)
        residuals, rest = [], fetched["residuals"]
        for count in self._num_residuals.pop(i):
            residuals.append(tuple(rest[:count]))
            rest = rest[count:]
        return boundaries, residuals


def buffer_of_turn(turn: int | None) -> int | None:
    """Return which fetch buffer a turn uses."""
    return None if turn is None else turn % NUM_FETCH_BUFFERS
