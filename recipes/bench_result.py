"""What the bench says of one plan's steps, measured beside predicted."""

from dataclasses import dataclass
from typing import Any

from lazytrain.account import Account
from lazytrain.recipes.bench_disk import DiskUse

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the steps of one plan took and needed; times in ms, memory in bytes.

    `host_bytes`: the most that placing or a step left in use; without a GPU the device's part is in it. `disk`: None
    where no plan could use one.
    `num_refills`: how often, warm-up included, device memory was so full or so cut up that all that was free had to be
    given back and taken anew; the device waits meanwhile. `num_steady_refills`: in the measured steps. Both are None
    without a GPU. `step_ms_each`: of every measured step, in order.
    """

    plan: str
    step_ms: float
    predicted_ms: float
    tokens_per_s: float
    tflops: float
    device_peak_bytes: int | None
    predicted_device_bytes: int
    host_bytes: int
    predicted_host_bytes: int
    startup_s: float
    num_refills: int | None
    num_steady_refills: int | None
    account: Account
    disk: DiskUse | None
    losses_digest: str
    step_ms_each: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        disk = self.disk._asdict() if self.disk is not None else None
        return {**vars(self), "account": self.account._asdict(), "disk": disk}

    def describe(self) -> list[str]:
        """Return the lines that say what one plan gave, measured beside predicted."""
        error = self.step_ms / self.predicted_ms - 1
        lines = [
            f"{self.plan}: {self.step_ms:.1f} ms a step (predicted {self.predicted_ms:.1f}, {error:+.1%}), "
            f"{self.tokens_per_s:,.0f} tokens/s, {self.tflops:.0f} model TFLOP/s; "
            f"single steps {min(self.step_ms_each):.1f} to {max(self.step_ms_each):.1f} ms",
            f"  {self.account.describe()}",
            f"  host {self.host_bytes / GIB:.2f} GiB (predicted {self.predicted_host_bytes / GIB:.2f}); "
            f"losses {self.losses_digest}",
        ]
        if self.device_peak_bytes is not None:
            share = self.predicted_device_bytes / self.device_peak_bytes - 1
            lines.append(
                f"  device peak {self.device_peak_bytes / GIB:.2f} GiB "
                f"(predicted {self.predicted_device_bytes / GIB:.2f}, {share:+.1%}); "
                f"memory taken anew {self.num_refills} times, "
                f"{self.num_steady_refills} of them in the measured steps"
            )
        return lines + (self.disk.describe() if self.disk is not None else [])
