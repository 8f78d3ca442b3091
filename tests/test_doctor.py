"""The doctor: each finding from machines made of files, none of which this test needs to be."""

import json
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lazytrain.kernels import native
from lazytrain.recipes import doctor, host_checks, software_checks
from lazytrain.recipes.doctor import Check, examine, main
from lazytrain.recipes.findings import FAIL, OK, WARN, Finding
from lazytrain.recipes.host_checks import check_cpu, check_disk, check_host_memory, check_memlock, check_shared_memory
from lazytrain.recipes.software_checks import check_compiler, check_driver, check_gpu, check_scip, check_torch

GIB = 2**30


def make_root(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def one(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    assert bool(finding.remedy) == (finding.status != OK), finding
    assert "\n" not in finding.text + finding.remedy
    return finding


@pytest.mark.parametrize(
    ("limit", "status", "phrase"),
    [(8 * GIB, WARN, "a cgroup limits it to 8.0 GiB"), (None, OK, "of 64.0 GiB in all")],
)
def test_a_cgroup_below_the_machine_is_named(limit: int | None, status: str, phrase: str, tmp_path: Path) -> None:
    text = "max" if limit is None else str(limit)
    root = make_root(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {60 * GIB // 1024} kB\n",
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": text,
            "sys/fs/cgroup/job/memory.current": str(GIB),
        },
    )
    finding = one(check_host_memory(root=root))
    assert finding.status == status
    assert phrase in finding.text


@pytest.mark.parametrize(
    ("files", "status", "phrase"),
    [
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, WARN, "0.5 cores' time"),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, OK, "may be used"),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            WARN,
            "0.5",
        ),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            OK,
            "may be",
        ),
        ({}, OK, "may be used"),
    ],
)
def test_a_cpu_quota_is_found(
    files: dict[str, str], status: str, phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    finding = one(check_cpu(root=make_root(tmp_path, files)))
    assert (finding.status, phrase in finding.text) == (status, True), finding


def test_threads_held_back_by_the_environment_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    finding = one(check_cpu(root=tmp_path))
    assert finding.status == WARN
    assert "OMP_NUM_THREADS is 1" in finding.text


@pytest.mark.parametrize(
    ("soft", "has_gpu", "status"),
    [(resource.RLIM_INFINITY, True, OK), (8 * 2**20, True, WARN), (8 * 2**20, False, OK)],
)
def test_locked_memory_matters_with_a_gpu(
    soft: int, has_gpu: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks.resource, "getrlimit", lambda what: (soft, soft))
    assert one(check_memlock(has_gpu=has_gpu)).status == status


@pytest.mark.parametrize(("size", "status"), [(64 * 2**20, WARN), (GIB, OK)])
def test_a_small_dev_shm_is_found(size: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda path: SimpleNamespace(total=size, free=size))
    assert one(check_shared_memory(tmp_path)).status == status


def test_a_missing_dev_shm_is_found(tmp_path: Path) -> None:
    assert one(check_shared_memory(tmp_path / "shm")).status == WARN


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in check_disk(tmp_path, 2**20)}
    assert set(findings) == {"file system", "disk room", "disk speed"}
    assert "GB/s" in findings["disk speed"].text
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_fails(tmp_path: Path) -> None:
    finding = one(check_disk(tmp_path / "nowhere", 2**20))
    assert finding.status == FAIL
    assert "mkdir -p" in finding.remedy


@pytest.mark.parametrize(
    ("kind", "status"), [("ext4", OK), ("xfs", OK), ("tmpfs", WARN), ("nfs4", WARN), ("fuse.sshfs", WARN)]
)
def test_a_file_system_that_is_no_local_disk_is_named(
    kind: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks, "file_system", lambda directory: kind)
    finding = next(f for f in check_disk(tmp_path, 0) if f.name == "file system")
    assert finding.status == status


def test_the_longest_mount_point_decides(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nb /data nfs4 rw 0 0\nc /data/my\\040disk xfs rw 0 0\nbroken\n")
    kinds = [host_checks.file_system(Path(p), mounts=mounts) for p in ("/home", "/data/x", "/data/my disk/y", "/datum")]
    assert kinds == ["ext4", "nfs4", "xfs", "ext4"]


@pytest.mark.parametrize(("has_gpu", "status"), [(True, FAIL), (False, WARN)])
def test_a_torch_for_cpus_beside_a_gpu_fails(has_gpu: bool, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False), version=SimpleNamespace(cuda=None))
    monkeypatch.setattr(software_checks, "_load", lambda name: fake)
    monkeypatch.setattr(software_checks, "has_nvidia_gpu", lambda: has_gpu)
    assert one(check_gpu()).status == status


@pytest.mark.parametrize(("capability", "free", "status"), [((9, 0), 70, OK), ((7, 5), 70, WARN), ((9, 0), 10, WARN)])
def test_each_gpu_is_told(capability: tuple[int, int], free: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="H", major=capability[0], minor=capability[1])
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda index: about,
        mem_get_info=lambda index: (free * GIB, 80 * GIB),
    )
    monkeypatch.setattr(software_checks, "_load", lambda name: SimpleNamespace(cuda=cuda))
    finding = one(check_gpu())
    assert finding.status == status
    assert f"capability {capability[0]}.{capability[1]}" in finding.text


def test_no_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert one(check_torch()).status == FAIL


def test_no_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = one(check_compiler())
    assert finding.status == WARN
    assert "no-such-compiler" in finding.text


def test_a_compiler_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("LAZYTRAIN_CACHE", str(tmp_path))
    native.reset()
    try:
        finding = one(check_compiler())
    finally:
        native.reset()
    assert finding.status == WARN
    assert "failed with code 1" in finding.text


def test_no_scip_is_a_warning_that_names_what_plans_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(check_scip()).status == OK
    monkeypatch.setitem(sys.modules, "pyscipopt", None)
    finding = one(check_scip())
    assert finding.status == WARN
    assert "pyscipopt is not installed" in finding.text
    assert re.search("HiGHS|heuristics", finding.text)


def test_a_driver_that_nvidia_smi_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 570.86.15\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert one(check_driver()) == Finding("driver", OK, "570.86.15")


def test_a_check_that_breaks_is_a_finding_and_the_others_run() -> None:
    def broken() -> Iterator[Finding]:
        raise ZeroDivisionError("of\ntwo lines")
        yield

    def fine() -> Iterator[Finding]:
        yield Finding("fine", OK, "all well")

    first, second = examine([Check("broken", broken), Check("fine", fine)])
    assert (first.name, first.status, second.status) == ("broken", WARN, OK)
    assert "ZeroDivisionError: of two lines" in first.text


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (WARN, 0), (FAIL, 1)])
def test_only_a_failure_fails(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding("thing", status, "as it is", "" if status == OK else "mend it")
    monkeypatch.setattr(doctor, "list_checks", lambda directory, size: [Check("thing", lambda: iter([finding]))])
    assert main([]) == code
    assert f"{status}" in capsys.readouterr().out
    assert main(["--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"ok": code == 0, "findings": [finding._asdict()]}


def test_it_works_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--size", "1", "--json"]) == 0
    names = [finding["name"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert {"Python", "torch", "Triton", "SCIP", "CPU", "host memory", "disk speed"} <= set(names)
