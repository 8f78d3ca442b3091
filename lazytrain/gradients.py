"""Sum a step's gradients over microbatches, take their squares for the norm, and put them where the plan says.

With one microbatch a unit's grads are what its backward returned. With more they are summed in fp32 and rounded once.
The square sum is that of the summed, rounded gradient, which is what the update reads.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lazytrain.base import Params
from lazytrain.homes import Homes, UnitHome
from lazytrain.kernels.norm import square_sum_into
from lazytrain.lanes import D2H, Lanes, Ticket

NUM_GRAD_BUFFERS = 2


class GradientSink:
    """The gradients of one step (see the head of this file)."""

    def __init__(self, homes: Homes, lanes: Lanes, *, num_microbatches: int, tied: Mapping[str, str]) -> None:
        self._homes, self._lanes, self._tied = homes, lanes, tied
        self._num_microbatches = num_microbatches
        self._sums: dict[int, Tensor] = {}
        # Buffers that d2h still reads, held until the compute queue has waited for it.
        self._in_flight: list[tuple[Ticket, Tensor]] = []
        self.squares = torch.zeros(len(homes.units), dtype=torch.float64, device=lanes.device)

    def add(self, home: UnitHome, flat: Tensor) -> None:
        """Add one microbatch's flat grads, a new tensor that the sink may keep."""
        if home.index in self._sums:
            self._sums[home.index].add_(flat)
        elif self._num_parts(home) == 1:
            self._sums[home.index] = flat
        else:
            self._sums[home.index] = flat.float()

    def add_head(self, grads: Params) -> None:
        """Add one microbatch's grads of the head; tied ones go to the embed."""
        embed, head = self._homes.units[0], self._homes.units[-1]
        if head.has_params:
            self.add(head, head.layout.flatten(grads))
        if self._tied:
            shared = {source: grads[name] for name, source in self._tied.items()}
            for place in embed.layout.places:
                if place.name not in shared:
                    shared[place.name] = next(iter(shared.values())).new_zeros(place.shape)
            self.add(embed, embed.layout.flatten(shared))

    def finish(self, home: UnitHome) -> None:
        """Round a unit's sum to the working dtype and take its squares, on the compute queue."""
        if not home.has_params:
            return
        total = self._sums[home.index] = self._sums[home.index].to(home.layout.dtype)
        square_sum_into(total, self.squares[home.index])

    def room_for(self, home: UnitHome) -> Ticket | None:
        """Return what a unit's backward must wait for before it may write new grads; frees the oldest buffer."""
        if home.plan.grads == "host" and len(self._in_flight) >= NUM_GRAD_BUFFERS:
            return self._in_flight.pop(0)[0]
        return None

    def deliver(self, home: UnitHome, done: Ticket) -> None:
        """Put a unit's finished grads where the plan says, once `done` is due."""
        if not home.has_params:
            return
        grads = self._sums.pop(home.index)
        if home.grads_host is None:
            home.grads_device = grads
            return
        with self._lanes.span(D2H, "store grads", home.unit.name, [done]) as out:
            self._lanes.copy_into(home.grads_host, grads, D2H)
        home.grads_out = out
        self._in_flight.append((out, grads))

    def drop(self) -> None:
        """Forget grads that were kept on the device: the step is skipped."""
        for home in self._homes.units:
            home.grads_device = None

    def _num_parts(self, home: UnitHome) -> int:
        return self._num_microbatches * (2 if self._tied and home.index == 0 else 1)


def norm_of_squares(squares: Sequence[float]) -> tuple[float, int | None]:
    """Return the global norm √Σ, and the index of the first unit whose squares are not finite (or None)."""
    for index, square in enumerate(squares):
        if not math.isfinite(square):
            return square, index
    return math.sqrt(math.fsum(squares)), None
