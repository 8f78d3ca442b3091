"""How units come to the device: no copy overtakes compute that may still use the memory it writes to."""

import torch
from test_activations import RecordingLanes
from toys import make_model, make_params, make_plan

from lazytrain import adamw8bit
from lazytrain.arrivals import Arrivals
from lazytrain.homes import build_homes
from lazytrain.lanes import Worker
from lazytrain.optimizer import init_unit_into
from lazytrain.updates import PendingUpdate


def test_first_loads_wait_for_compute_queued_before_their_buffers_were_made() -> None:
    model, lanes, settings = make_model(), RecordingLanes(), adamw8bit(1e-3).settings
    params = make_params(model)
    homes = build_homes(
        model,
        make_plan(),
        settings,
        fill=lambda home, weights, state: init_unit_into(home.layout, params.__getitem__, weights, state),
        dtype=torch.float32,
        lanes=lanes,
        spill=None,
    )
    arrivals = Arrivals(homes, 2, lanes, Worker("writer", threaded=False))
    slots, buffers = (ticket for name, ticket, _ in lanes.spans if name == "reserve")
    block = homes.units[1]
    arrivals.bring(block, PendingUpdate(hyper=settings.hyper(1e-3, 1), due={block.index}))
    waits = next(waits for name, _, waits in lanes.spans if name == "load weights")
    assert any(wait is slots for wait in waits)
    assert any(wait is buffers for wait in waits)  # the states follow the weights in the same queue
