"""What the forward sweep leaves for the backward sweep: boundaries and residuals, kept here or packed off.

Shape letters: b batch, t time, d model width.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lazytrain.activations import NUM_FETCH_BUFFERS, Activations, Packed
from lazytrain.homes import UnitHome
from lazytrain.lanes import Ticket
from lazytrain.layout import ALIGN_BYTES, round_up
from lazytrain.programs import BlockPrograms

Fetched = Mapping[str, Sequence[Tensor]]


class Piece(NamedTuple):
    """One microbatch's pass through one block."""

    block: int
    microbatch: int


class Stash:
    """One step's boundaries and residuals, by block and microbatch (see the head of this file).

    `programs` holds each block's programs, one a microbatch.
    """

    def __init__(self, activations: Activations, num_microbatches: int, chunks_behind: int) -> None:
        self.programs: dict[int, list[BlockPrograms]] = {}
        self._activations, self._num_microbatches = activations, num_microbatches
        self._num_behind = chunks_behind
        self._boundaries: dict[Piece, Tensor] = {}
        self._residuals: dict[Piece, tuple[Tensor, ...]] = {}
        self._packs: dict[Piece, dict[str, Packed]] = {}
        # Offloads that may still read their tensors, which are held here until the compute queue has waited for them.
        self._in_flight: list[tuple[Ticket, Any]] = []

    def take_oldest(self) -> Ticket | None:
        """Return what compute must wait for before there is room for another offload; its tensors are let go."""
        return self._in_flight.pop(0)[0] if len(self._in_flight) > self._num_behind else None

    def take_all(self) -> list[Ticket]:
        """Return what compute must wait for before all offloads have ended; their tensors are let go."""
        tickets = [ticket for ticket, _ in self._in_flight]
        self._in_flight.clear()
        return tickets

    def put(self, piece: Piece, home: UnitHome, x_btd: Tensor, residuals: tuple[Tensor, ...], done: Ticket) -> None:
        """Keep or send away, once `done` is due, what a block needs for one microbatch: its input and residuals."""
        plan, leaving = home.plan, dict[str, tuple[Tensor, ...]]()
        if plan.boundary == "device":
            self._boundaries[piece] = x_btd
        elif plan.boundary != "none":
            leaving["boundary"] = (x_btd,)
        if plan.residuals in ("host", "nvme") and residuals:
            leaving["residuals"] = residuals
        else:
            self._residuals[piece] = residuals
        if leaving:
            self._packs[piece] = {
                what: self._activations.offload(
                    f"{piece.block}.{what}",
                    tensors,
                    getattr(plan, what),
                    home.unit.name,
                    done,
                    part=piece.microbatch,
                    num_parts=self._num_microbatches,
                )
                for what, tensors in leaving.items()
            }
            *_, last = self._packs[piece].values()
            self._in_flight.append((last.ticket, leaving))

    def put_boundary(self, piece: Piece, x_btd: Tensor) -> None:
        """Keep an input that was computed again."""
        self._boundaries[piece] = x_btd

    def boundary(self, piece: Piece) -> Tensor:
        """Return an input, which stays kept."""
        return self._boundaries[piece]

    def fetch_turns(self, order: Sequence[Piece]) -> dict[Piece, int]:
        """Make room for the largest fetch; return piece -> number in the order in which packs come back."""
        sizes = [
            sum(round_up(pack.num_bytes, ALIGN_BYTES) for pack in packs.values()) for packs in self._packs.values()
        ]
        self._activations.reserve(max(sizes, default=0))
        return {piece: turn for turn, piece in enumerate(p for p in order if p in self._packs)}

    def fetch(self, piece: Piece, turn: int, name: str, free: Ticket | None) -> tuple[Fetched, Ticket]:
        """Bring back what was sent away, into a buffer that is free once `free` is due."""
        packs = self._packs.pop(piece)
        tensors, ticket = self._activations.fetch([*packs.values()], turn, name, free)
        return dict(zip(packs, tensors)), ticket

    def take(self, piece: Piece, fetched: Fetched) -> tuple[Tensor, list[Tensor]]:
        """Return a block's input and residuals for one microbatch; they are no longer kept."""
        x_btd = fetched["boundary"][0] if "boundary" in fetched else self._boundaries.pop(piece)
        return x_btd, list(fetched["residuals"] if "residuals" in fetched else self._residuals.pop(piece))


def buffer_of_turn(turn: int | None) -> int | None:
    """Return which fetch buffer a turn uses."""
    return None if turn is None else turn % NUM_FETCH_BUFFERS
