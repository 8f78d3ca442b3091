"""Machines that a plan can be made for without having them: typical hosts, by data sheet and common sense.

Every preset is an estimate; a measured `Hardware` (the trainer's profile writes one) plans better.
"""

import difflib
import json
from pathlib import Path

from lazytrain.solver.errors import PlannerError
from lazytrain.solver.memory import GIB
from lazytrain.solver.problem import Hardware

USABLE_DEVICE_SHARE = 0.93  # the driver's context, the allocator's fragments
USABLE_HOST_SHARE = 0.9
CPU_PRESET = "cpu"
# 8-bit AdamW on the device moves about 13 bytes a parameter.
UPDATE_BYTES_PER_PARAM = 13.0


def _make(
    name: str,
    *,
    device_gib: float,
    host_gib: float,
    nvme_gib: float = 500,
    link_gbs: float,
    nvme_gbs: tuple[float, float] = (5.0, 3.0),
    dram_gbs: float,
    tflops: float,
    device_gbs: float,
    cpu_gparams_s: float,
) -> Hardware:
    return Hardware(
        name=name,
        device_memory_bytes=int(device_gib * USABLE_DEVICE_SHARE * GIB),
        host_memory_bytes=int(host_gib * USABLE_HOST_SHARE * GIB),
        nvme_bytes=int(nvme_gib * GIB),
        h2d_gbs=link_gbs,
        d2h_gbs=link_gbs,
        nvme_read_gbs=nvme_gbs[0],
        nvme_write_gbs=nvme_gbs[1],
        dram_gbs=dram_gbs,
        copy_latency_ms=0.02,
        matmul_tflops=tflops,
        device_memory_gbs=device_gbs,
        cpu_update_gparams_s=cpu_gparams_s,
        device_update_gparams_s=device_gbs / UPDATE_BYTES_PER_PARAM,
        is_estimate=True,
    )


_PRESETS = (
    _make(
        "rtx3090", device_gib=24, host_gib=64, link_gbs=22, dram_gbs=70, tflops=65, device_gbs=850, cpu_gparams_s=2.5
    ),
    _make(
        "rtx4090", device_gib=24, host_gib=64, link_gbs=22, dram_gbs=110, tflops=150, device_gbs=920, cpu_gparams_s=3.5
    ),
    _make(
        "a100-40g", device_gib=40, host_gib=256, link_gbs=22, dram_gbs=220, tflops=260, device_gbs=1400, cpu_gparams_s=5
    ),
    _make(
        "a100-80g", device_gib=80, host_gib=256, link_gbs=22, dram_gbs=220, tflops=260, device_gbs=1800, cpu_gparams_s=5
    ),
    _make("h100", device_gib=80, host_gib=512, link_gbs=48, dram_gbs=330, tflops=650, device_gbs=3000, cpu_gparams_s=7),
    _make("h800", device_gib=80, host_gib=512, link_gbs=48, dram_gbs=330, tflops=650, device_gbs=3000, cpu_gparams_s=7),
    _make(
        "h200",
        device_gib=141,
        host_gib=125,
        nvme_gbs=(1.7, 1.5),
        link_gbs=48,
        dram_gbs=270,
        tflops=775,
        device_gbs=4300,
        cpu_gparams_s=5.5,
    ),
    _make("cpu", device_gib=8, host_gib=16, link_gbs=10, dram_gbs=25, tflops=0.15, device_gbs=25, cpu_gparams_s=1),
)
PRESETS: dict[str, Hardware] = {preset.name: preset for preset in _PRESETS}


def load_hardware(name: str) -> Hardware:
    """Return a preset, or the machine in a JSON file that `Hardware.to_dict` made.

    Raises:
        PlannerError: neither (the nearest preset is suggested), or a file with a wrong field.
    """
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? Presets" if near else "presets"
        raise PlannerError(f"{name!r} is neither a file nor a known machine; {hint} are {', '.join(PRESETS)}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlannerError(f"{path} can't be read as JSON: {error}") from error
    return Hardware.from_dict(data, where=str(path))
