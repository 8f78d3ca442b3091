import gc
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from lazytrain import slabs
from lazytrain.errors import MemoryBudgetError
from lazytrain.slabs import (
    PAGE_BYTES,
    allocate_slab,
    available_host_bytes,
    free_slab,
    is_slab_pinned,
    require_memory,
)

GIB = 2**30


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class FakeRuntime:
    """Stands for the CUDA runtime; registering fails with `code`."""

    def __init__(self, code=0):
        self.code = code
        self.calls = []

    def cudaHostRegister(self, address, num_bytes, flags):
        self.calls.append(("register", address, num_bytes))
        return self.code

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0

    def cudaGetErrorString(self, code):
        return f"error {int(code)}"


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(slabs, "_clear_pending_error", lambda: fake.calls.append(("clear",)))
    monkeypatch.setattr(slabs, "_has_warned", False)
    return fake


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 123, PAGE_BYTES, PAGE_BYTES + 1, 3 * 2**20 + 5])
def test_slab_has_exact_size_zeroed_and_aligned(num_bytes):
    slab = allocate_slab(num_bytes, pin=False, name="test")
    assert slab.dtype == torch.uint8
    assert slab.shape == (num_bytes,)
    assert slab.untyped_storage().nbytes() == num_bytes
    assert num_bytes == 0 or slab.data_ptr() % PAGE_BYTES == 0
    assert not slab.any()
    slab.fill_(7)
    assert (slab == 7).all()


def test_slab_takes_its_size_and_no_power_of_two():
    # torch's pinned allocator would take 128 MiB for this (case C20).
    num_bytes = 65 * 2**20
    before = resident_bytes()
    slab = allocate_slab(num_bytes, pin=False, name="test")
    taken = resident_bytes() - before
    assert num_bytes <= taken + 2**21
    assert taken < num_bytes + 8 * 2**20
    del slab
    gc.collect()
    assert resident_bytes() - before < 8 * 2**20


def test_large_slab_is_touched_by_all_pieces(monkeypatch):
    monkeypatch.setattr(slabs, "_TOUCH_BYTES", 64 * 1024)
    before = resident_bytes()
    slab = allocate_slab(16 * 2**20 + 1, pin=False, name="test")
    assert resident_bytes() - before > 15 * 2**20
    assert slab.numel() == 16 * 2**20 + 1


def test_freed_slab_gives_its_pages_back_and_reads_zero():
    slab = allocate_slab(32 * 2**20, pin=False, name="test").fill_(3)
    before = resident_bytes()
    free_slab(slab)
    assert before - resident_bytes() > 24 * 2**20
    assert slab[5] == 0
    free_slab(allocate_slab(0, pin=True, name="empty"))


def test_pinning_registers_once_and_unregisters_with_the_last_view(runtime):
    slab = allocate_slab(5000, pin=True, name="test")
    address = slab.data_ptr()
    assert is_slab_pinned(slab)
    view = slab[10:20].view(torch.int16)
    del slab
    gc.collect()
    assert runtime.calls == [("register", address, 5000)]
    del view
    gc.collect()
    assert runtime.calls[1:] == [("unregister", address)]
    free_slab(allocate_slab(5000, pin=True, name="test"))
    gc.collect()
    assert [call[0] for call in runtime.calls] == ["register", "unregister"] * 2


def test_failed_pinning_clears_the_error_and_warns_once(runtime):
    runtime.code = 2
    with pytest.warns(RuntimeWarning, match=r"weights 3: pinning 0.002 GiB failed \(error 2\)"):
        slab = allocate_slab(2**21, pin=True, name="weights 3")
    assert not is_slab_pinned(slab)
    assert ("clear",) in runtime.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = allocate_slab(100, pin=True, name="weights 4")
    other.fill_(1)
    free_slab(slab)
    assert not any(call[0] == "unregister" for call in runtime.calls)


def test_impossible_size_is_a_memory_error():
    with pytest.raises(MemoryBudgetError, match="weights 3"):
        allocate_slab(2**62, pin=False, name="weights 3")


def test_require_memory_lists_every_tier_and_what_would_fit():
    require_memory({"host": 5, "device": 0}, {"host": 5})
    with pytest.raises(MemoryBudgetError) as caught:
        require_memory({"device": 10 * GIB, "host": 53 * GIB, "nvme": 1}, {"device": 24 * GIB, "host": 31 * GIB})
    text = str(caught.value)
    assert "device: needs 10.00 GiB, 24.00 GiB available: fits" in text
    assert "host: needs 53.00 GiB, 31.00 GiB available: 22.00 GiB short" in text
    assert "To fit host: " in text
    assert "To fit nvme: " in text
    assert "To fit device" not in text


def write_tree(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  4096000 kB\nMemAvailable:   1000 kB\n"}


def test_system_memory_counts_without_a_group_limit(tmp_path):
    root = write_tree(tmp_path, MEMINFO)
    assert available_host_bytes(root=root) == 1000 * 1024
    assert available_host_bytes(7, root=root) == 7
    write_tree(root, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"})
    assert available_host_bytes(root=root) == 1000 * 1024


def test_tightest_limit_of_the_group_and_its_parents_counts(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "900\n",
        "sys/fs/cgroup/a/b/memory.current": "600\n",
        "sys/fs/cgroup/a/b/memory.stat": "anon 100\ninactive_file 300\nactive_file 100\n",
        "sys/fs/cgroup/a/memory.max": "1000\n",
        "sys/fs/cgroup/a/memory.current": "650\n",
    }
    root = write_tree(tmp_path, MEMINFO | files)
    assert available_host_bytes(root=root) == 350
    (root / "sys/fs/cgroup/a/memory.max").write_text("max")
    assert available_host_bytes(root=root) == 700


def test_container_group_and_version_1_are_read(tmp_path):
    files = {"proc/self/cgroup": "0::/host/only/path\n", "sys/fs/cgroup/memory.max": "800\n"}
    assert available_host_bytes(root=write_tree(tmp_path / "v2", MEMINFO | files)) == 800
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "700\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "500\n",
        "sys/fs/cgroup/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert available_host_bytes(root=write_tree(tmp_path / "v1", MEMINFO | files)) == 350


def test_others_use_of_the_machine_counts_below_the_group_limit(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4_000_000 * 1024}\n"}
    assert available_host_bytes(root=write_tree(tmp_path, MEMINFO | files)) == 1000 * 1024


def test_group_limit_counts_where_the_machine_shows_less_memory(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{5_000_000 * 1024}\n"}
    assert available_host_bytes(root=write_tree(tmp_path, MEMINFO | files)) == 5_000_000 * 1024


def test_overused_group_has_no_room(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "800\n", "sys/fs/cgroup/memory.current": "900\n"}
    assert available_host_bytes(root=write_tree(tmp_path, files)) == 0


def test_this_machine_has_memory():
    assert 2**20 < available_host_bytes() < 2**50


@pytest.mark.gpu
def test_slab_is_pinned_and_copies_right():
    slab = allocate_slab(3 * 2**20 + 5, pin=True, name="test")
    slab.random_()
    assert is_slab_pinned(slab)
    assert slab.is_pinned()
    on_device = torch.empty_like(slab, device="cuda").copy_(slab, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(on_device.cpu(), slab)


GPU_FAILURE = """
import warnings, torch
from lazytrain import slabs
slab = slabs.allocate_slab(2**20, pin=True, name="first")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import numpy as np
    slabs._register(np.asarray(slab), None, "again")
    slabs._register(np.asarray(slab), None, "again")
assert len(caught) == 1 and "pinning" in str(caught[0].message), caught
x = torch.ones(4, device="cuda") * 2
torch.cuda.synchronize()
assert x.sum().item() == 8
print(caught[0].message)
"""


@pytest.mark.gpu
def test_failed_pinning_on_a_gpu_leaves_cuda_usable():
    # The same range twice: CUDA's own refusal, whose pending error the next launch would report.
    done = subprocess.run([sys.executable, "-c", GPU_FAILURE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
