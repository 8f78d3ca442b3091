import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.errors import MemoryBudgetError
from lazytrain.spill import SpillError, SpillStore
from lazytrain.store_io import PIECE_BYTES, Manner, piece_checksum


def blob(value, num_bytes=1000):
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def read(store, name, num_bytes=1000):
    out = torch.empty(num_bytes, dtype=torch.uint8)
    store.read_into(name, out)
    return out


@pytest.fixture
def store(tmp_path):
    store = SpillStore(tmp_path)
    yield store
    store.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 123, 4096, 100_001])
def test_blob_comes_back_bit_equal(store, num_bytes):
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    store.write("a", data, sync=True)
    assert torch.equal(read(store, "a", num_bytes), data)
    assert torch.equal(store.map("a"), data)
    assert store.nvme_write_bytes == store.nvme_read_bytes == num_bytes


def test_short_reads_and_writes_are_continued(store, monkeypatch):
    data = torch.randint(0, 256, (100,), dtype=torch.uint8)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, out, offset: preadv(fd, [out[0][:3]], offset))
    store.write("a", data)
    assert torch.equal(read(store, "a", 100), data)


def test_rewriting_reuses_files_and_keeps_the_room(store):
    store.reserve([1000, 1000, 1000])
    names = sorted(path.name for path in store.path.iterdir())
    for value in range(20):
        store.write("a", blob(value))
        store.write("b", blob(value + 100))
        assert read(store, "a")[0] == value
    assert read(store, "b")[5] == 119
    assert sorted(path.name for path in store.path.iterdir()) == names
    assert store.reserved_bytes == 3000


def test_reserved_room_is_taken_from_the_disk(store):
    store.reserve([2**20, 5])
    assert sum(path.stat().st_blocks for path in store.path.iterdir()) * 512 >= 2**20


def test_old_version_lives_while_it_is_mapped(store):
    store.write("a", blob(1))
    view = store.map("a")[10:20]
    for value in range(2, 6):
        store.write("a", blob(value))
        store.write("b", blob(value))
    assert (view == 1).all()
    view.fill_(99)
    assert read(store, "a")[0] == 5
    num_files = len(list(store.path.iterdir()))
    assert store.reserved_bytes == 1000 * num_files
    del view
    gc.collect()
    for name in range(num_files - 2):  # every file but those of a and b is free again
        store.write(str(name), blob(7))
    assert len(list(store.path.iterdir())) == num_files


def test_mapping_of_the_current_version_may_end_first(store):
    store.write("a", blob(1))
    view = store.map("a")
    del view
    gc.collect()
    store.write("b", blob(2))
    assert read(store, "a")[0] == 1


def test_removed_blob_is_gone_and_its_file_reused(store):
    store.write("a", blob(1))
    store.remove("a")
    store.remove("a")
    with pytest.raises(SpillError, match="'a'"):
        read(store, "a")
    store.write("b", blob(2))
    assert len(list(store.path.iterdir())) == 1


def test_small_blob_does_not_take_a_large_file(store):
    store.reserve([1000])
    store.write("small", blob(1, 10))
    assert store.reserved_bytes == 1010
    store.write("a", blob(1, 900))
    assert store.reserved_bytes == 1010


def test_wrong_sizes_and_cut_files_are_errors(store):
    store.write("a", blob(1))
    with pytest.raises(SpillError, match="1000 bytes; the buffer has 5"):
        read(store, "a", 5)
    os.truncate(next(store.path.iterdir()), 10)
    with pytest.raises(SpillError, match="cut to 10 of 1000"):
        read(store, "a")
    with pytest.raises(SpillError, match="Nothing was spilled"):
        store.map("b")


HEAD = b"head" + b" " * 4092


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("num_bytes", [1, 123, 4096, 100_001, 9 * 2**20 + 5])
def test_a_linked_blob_is_a_file_of_its_exact_size_behind_its_header(tmp_path, direct, num_bytes):
    store = SpillStore(tmp_path, Manner(direct, 2))
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    store.reserve_lasting([num_bytes + 4096], 1)
    store.write("a", data, head_bytes=4096)
    checksums = store.link("a", tmp_path / "x", HEAD)
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, num_bytes, PIECE_BYTES)]
    assert checksums == tuple(piece_checksum(piece.numpy()) for piece in pieces)
    store.write("a", data + 1, head_bytes=4096)
    assert (tmp_path / "x").read_bytes() == HEAD + data.numpy().tobytes()
    assert torch.equal(read(store, "a", num_bytes), data + 1)
    assert torch.equal(store.map("a"), data + 1)
    assert store.reserved_bytes == (2 + 2) * (num_bytes + 4096)
    assert store.shared_bytes == num_bytes + 4096
    store.close()
    assert (tmp_path / "x").read_bytes() == HEAD + data.numpy().tobytes()


def test_a_linked_file_is_never_written_again_and_a_new_one_takes_its_room(store, tmp_path):
    """Neither while it has its other name nor after: whoever has it open or mapped reads what the checkpoint held."""
    store.reserve_lasting([4096 + 1000], 1)
    for value in range(6):
        store.write("a", blob(value), head_bytes=4096)
        if value in (1, 3):
            store.link("a", tmp_path / str(value), HEAD)
        store.restock()
    num_files, reserved_bytes = len(list(store.path.iterdir())), store.reserved_bytes
    assert reserved_bytes == num_files * 5096
    with (tmp_path / "1").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        (tmp_path / "1").unlink()
        for value in range(12):
            store.write("a", blob(100 + value), head_bytes=4096)
            store.link("a", tmp_path / "now", HEAD)
            (tmp_path / "now").unlink()
            if value % 3 == 0:
                store.restock()
        assert mapping[:] == HEAD + bytes([1]) * 1000
    assert (tmp_path / "3").read_bytes() == HEAD + bytes([3]) * 1000
    assert len(list(store.path.iterdir())) == num_files
    assert store.reserved_bytes == reserved_bytes
    assert all(path.stat().st_blocks * 512 >= 5096 for path in store.path.iterdir())


def test_a_restock_finds_the_room_of_a_deleted_checkpoint_taken_by_others(store, tmp_path, monkeypatch):
    store.reserve_lasting([4096 + 1000], 1)
    store.write("a", blob(1), head_bytes=4096)
    store.link("a", tmp_path / "1", HEAD)
    store.write("a", blob(2), head_bytes=4096)
    (tmp_path / "1").unlink()
    reserved_bytes = store.reserved_bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(MemoryBudgetError, match="Taking 5096 bytes"):
            store.restock()
        for value in range(3, 9):  # what is left is enough to write on
            store.write("a", blob(value), head_bytes=4096)
    assert store.reserved_bytes == reserved_bytes - 5096
    assert read(store, "a")[0] == 8


def test_other_blobs_never_take_the_room_of_lasting_ones(store, monkeypatch):
    store.reserve_lasting([4096 + 1000])
    for value in range(5):
        store.write(str(value), blob(value, 5000))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryBudgetError):
        store.write("x", blob(1, 5000))
    for value in range(5):
        store.write("a", blob(value), head_bytes=4096)
    assert read(store, "a")[0] == 4


def test_the_files_go_with_the_process(tmp_path):
    code = (
        "import sys, torch; from pathlib import Path; from lazytrain.spill import SpillStore;"
        "store = SpillStore(Path(sys.argv[1])); store.write('a', torch.zeros(9, dtype=torch.uint8))"
    )
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=True)
    assert list(tmp_path.iterdir()) == []


def full(*args):
    raise OSError(errno.ENOSPC, "full")


def test_full_disk_is_found_when_reserving(store, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryBudgetError, match=r"5000 bytes.*No space left.*GiB free"):
        store.reserve([5000])
    assert list(store.path.iterdir()) == []


def test_reserved_store_writes_on_when_the_disk_fills_up(store, monkeypatch):
    store.reserve([1000] * 3)
    monkeypatch.setattr(os, "posix_fallocate", full)
    for value in range(5):
        store.write("a", blob(value))
        store.write("b", blob(value))
    assert read(store, "a")[0] == 4
    with pytest.raises(MemoryBudgetError, match="No space left"):
        store.write("large", blob(1, 5000))
    assert read(store, "b")[0] == 4


def test_failed_write_keeps_the_old_version(store, monkeypatch):
    store.write("a", blob(1))
    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(3):
        with pytest.raises(MemoryBudgetError, match="Spilling 'a'"):
            store.write("a", blob(2))
    monkeypatch.undo()
    assert read(store, "a")[0] == 1
    assert len(list(store.path.iterdir())) == 2


def test_unused_files_make_room_for_another_size(store, monkeypatch):
    store.reserve([1000])
    real, calls = os.posix_fallocate, []

    def first_fails(*args):
        calls.append(args)
        return full() if len(calls) == 1 else real(*args)

    monkeypatch.setattr(os, "posix_fallocate", first_fails)
    store.write("a", blob(1, 5000))
    assert store.reserved_bytes == 5000


def test_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MemoryBudgetError, match="file"):
        SpillStore(tmp_path / "file" / "x")


def test_stores_share_a_directory_and_remove_only_the_dead(tmp_path):
    first = SpillStore(tmp_path)
    first.write("a", blob(1))
    dead = tmp_path / "spill.lazytrain-tmp-dead"
    dead.mkdir()
    (dead / "slot_000000").write_bytes(b"x")
    (tmp_path / "mine").mkdir()
    second = SpillStore(tmp_path)
    second.write("a", blob(2))
    assert not dead.exists()
    assert read(first, "a")[0] == 1
    second.close()
    second.close()
    first.close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_threads_use_different_names_at_once(store):
    errors = []

    def work(name, start):
        try:
            for value in range(start, start + 30):
                store.write(name, blob(value, 20_000))
                assert (read(store, name, 20_000) == value).all()
        except BaseException as error:  # pytest sees no thread's failure by itself
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"t{i}", i * 40)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.nvme_write_bytes == store.nvme_read_bytes == 6 * 30 * 20_000


actions = st.tuples(st.sampled_from(["write", "map", "unmap", "remove"]), st.sampled_from("abc"), st.integers(0, 40))


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(actions, max_size=30))
def test_any_sequence_keeps_every_version_whole(tmp_path_factory, steps):
    store = SpillStore(tmp_path_factory.getbasetemp() / "spills")
    expected, maps = {}, []
    for turn, (action, name, num_bytes) in enumerate(steps):
        if action == "write":
            expected[name] = blob(turn, num_bytes)
            store.write(name, expected[name])
        elif action == "map" and name in expected:
            maps.append((store.map(name), expected[name]))
        elif action == "unmap":
            maps = maps[1:]
        elif action == "remove":
            store.remove(name)
            expected.pop(name, None)
        assert all(torch.equal(view, value) for view, value in maps)
        assert all(torch.equal(read(store, key, value.numel()), value) for key, value in expected.items())
    store.close()
