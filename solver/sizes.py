"""Sizes as people write them: "24GiB", "500MB", "1e9"."""

import argparse
import re

from lazytrain.solver.problem import MAX_BYTES

GIB = 1 << 30

UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "24GiB", "500MB" or "1e9"; for argparse.

    Raises:
        argparse.ArgumentTypeError: anything else, or what no machine has; says what to write.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 24GiB or 500MB")
    size = float(match[1]) * UNITS[match[2].upper()]
    if not 1 <= size <= MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size that a machine can have; write for example 24GiB")
    return int(size)


def format_size(num_bytes: int) -> str:
    """Return bytes in GiB, or in MiB where GiB would show next to nothing.

    Example:
        >>> format_size(3 << 29), format_size(10240)
        ('1.50 GiB', '0.010 MiB')
    """
    if num_bytes >= GIB // 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**20:.3f} MiB"
