"""Sum a step's gradients over microbatches, take their squares for the norm, and put them where the plan says.

A block's grads are what its backward returned; more than one microbatch's are summed in fp32 and rounded once, in the
same pass that takes the squares. Embed and head add to an fp32 sum of their own (theirs have a row for every token).
The square sum is that of the summed, rounded gradient, which is what the update reads.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lazytrain.base import Params
from lazytrain.homes import Homes, UnitHome
from lazytrain.kernels.norm import add_into, square_sum_into
from lazytrain.lanes import D2H, Lanes, Ticket
from lazytrain.row_sums import sum_rows_into

NUM_GRAD_BUFFERS = 2
FIRST_PIECE = 1 << 20


class GradientSink:
    """The gradients of one step after the other (see the head of this file)."""

    def __init__(self, homes: Homes, lanes: Lanes, *, tied: Mapping[str, str]) -> None:
        self._homes, self._lanes, self._tied = homes, lanes, tied
        self._num_microbatches = 1
        # Of each unit whose grads are being summed: the sum so far, and how many microbatches are in it.
        self._sums: dict[int, Tensor] = {}
        self._num_added: dict[int, int] = {}
        # The fp32 sum of one block after the other: new memory for each would be holes that nothing else fits in.
        self._block_sum: Tensor | None = None
        # Buffers that d2h still reads, held until the compute queue has waited for it; in the next step, too.
        self._in_flight: list[tuple[Ticket, Tensor]] = []
        self._head_out: Ticket | None = None
        self.squares = torch.zeros(0, dtype=torch.float64, device=lanes.device)

    def begin_step(self, num_microbatches: int) -> None:
        """Start the sums of a step that is cut in that many parts."""
        self._num_microbatches = num_microbatches
        self._sums, self._num_added = {}, {}
        self.squares = torch.zeros(len(self._homes.units), dtype=torch.float64, device=self._lanes.device)

    def add(self, home: UnitHome, flat: Tensor) -> None:
        """Add one microbatch's flat grads of a block, a new tensor that the sink may keep.

        The last microbatch's complete the unit's grads and their square sum.
        """
        if not home.has_params:
            return
        added = self._num_added.get(home.index, 0) + 1
        self._num_added[home.index] = added
        square = self.squares[home.index] if added == self._num_microbatches else None
        begins_sum = added == 2 < self._num_microbatches and flat.dtype != torch.float32
        buffer = self._buffer(flat) if begins_sum else None
        self._sums[home.index] = add_microbatch(self._sums.pop(home.index, None), flat, square, buffer)

    def drop_buffer(self) -> None:
        """Free the memory of the blocks' sums: no block's backward comes next."""
        self._block_sum = None

    def _buffer(self, flat: Tensor) -> Tensor:
        """Return fp32 memory for one block's sum, that of the block before where it is as large (see `room_for`)."""
        if self._block_sum is None or self._block_sum.numel() != flat.numel():
            self._block_sum = torch.empty_like(flat, dtype=torch.float32)
        return self._block_sum

    def sums(self, home: UnitHome) -> Params:
        """Return the fp32 sums that embed's or head's grads are added to, by local name; zeros at first.

        A head's include those of the embed's tensors that it shares.
        """
        if home.has_params and home.index not in self._sums:
            zeros = torch.zeros(home.layout.numel, dtype=torch.float32, device=self._lanes.device)
            self._sums[home.index] = zeros
        views = home.layout.views(self._sums[home.index]) if home.has_params else {}
        if home is self._homes.units[-1] and self._tied:
            shared = self.sums(self._homes.units[0])
            views |= {name: shared[source] for name, source in self._tied.items()}
        return views

    def add_rows(self, home: UnitHome, rows: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
        """Make the grads of an embed that looked rows up, of all microbatches at once (see `sum_rows_into`)."""
        layout = home.layout
        (place,) = layout.places
        make = torch.empty if layout.numel == place.numel else torch.zeros  # gaps between tensors are 0
        flat = self._sums[home.index] = make(layout.numel, dtype=layout.dtype, device=self._lanes.device)
        sum_rows_into(layout.views(flat)[place.name], rows, cotangents)

    def finish(self, home: UnitHome) -> None:
        """Round embed's or head's sum to the working dtype and take its squares, on the compute queue.

        What leaves the device soon is rounded within the sum's own memory, what stays there gets its own.
        """
        if not home.has_params:
            return
        total, dtype, square = self._sums[home.index], home.layout.dtype, self.squares[home.index]
        if total.dtype == dtype:
            square_sum_into(total, square)
        elif home.grads_host is None:
            out = self._sums[home.index] = torch.empty_like(total, dtype=dtype)
            add_into(out, total, square=square)
        else:
            out = self._sums[home.index] = round_in_place(total)
            square_sum_into(out, square)

    def room_for(self, home: UnitHome) -> list[Ticket]:
        """Return what a block's backward must wait for before it may write new grads; frees the oldest buffers.

        The first block waits for the head's store, whose memory is the largest. A sum of another size than the block's
        is freed, too.
        """
        if self._block_sum is not None and not (home.has_params and self._block_sum.numel() == home.layout.numel):
            self._block_sum = None
        tickets = [self._in_flight.pop(0)[0]] if self._in_flight and self._in_flight[0][0] is self._head_out else []
        while home.plan.grads == "host" and len(self._in_flight) >= NUM_GRAD_BUFFERS:
            tickets.append(self._in_flight.pop(0)[0])
        return tickets

    def room_for_forward(self) -> list[Ticket]:
        """Return what the first block's forward must wait for: the last step's stores; frees all their buffers."""
        tickets = [ticket for ticket, _ in self._in_flight]
        self._in_flight.clear()
        return tickets

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
        if home is self._homes.units[-1]:
            self._head_out = out

    def drop(self) -> None:
        """Forget grads that were kept on the device: the step is skipped."""
        for home in self._homes.units:
            home.grads_device = None


def add_microbatch(total: Tensor | None, flat: Tensor, square: Tensor | None, buffer: Tensor | None = None) -> Tensor:
    """Return the sum of flat grads so far: the first microbatch's as they are, then fp32, after the last one rounded.

    Args:
        total: the sum before; None = this is the first microbatch.
        flat: written, and returned where the sum has its dtype.
        square: gets the sum of squares after the last microbatch; None = there are more.
        buffer: fp32, of flat's length, for the sum of two and more; None = new memory.
    """
    if total is None:
        if square is not None:
            square_sum_into(flat, square)
        return flat
    if square is not None:
        add_into(flat, total, flat, square=square)
        return flat
    out = total
    if total.dtype != torch.float32:
        out = torch.empty_like(total, dtype=torch.float32) if buffer is None else buffer
    add_into(out, total, flat)
    return out


def round_in_place(total: Tensor) -> Tensor:
    """Round flat fp32 to bf16, to nearest even, within its own memory; return the bf16 tensor, its first half.

    Element i goes where half an element was that was rounded before: pieces that double in length never overlap what
    they read, but for the first one, which is copied.
    """
    out = total.view(torch.bfloat16)[: total.numel()]
    end = min(FIRST_PIECE, total.numel())
    add_into(out[:end], total[:end].clone())
    while end < total.numel():
        begin, end = end, min(2 * end, total.numel())
        add_into(out[begin:end], total[begin:end])
    return out
