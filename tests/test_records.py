"""Files as they come: cut, misnamed, gzipped, ragged; never a network, never a silent skip."""

import gzip
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.errors import DataError
from lazytrain.recipes.records import choose_cache_dir, find_files, read_hub_records, read_records

ROOT = Path(__file__).resolve().parents[1]
RECORDS = [{"query": f"What is {i} + 1?", "response": f"The answer is: {i + 1}"} for i in range(5)]
LINES = "".join(json.dumps(r) + "\n" for r in RECORDS)


def read(path: Path, split: str = "train") -> list[dict]:
    return [record.fields for record in read_records(path, split)]


def write_parquet(path: Path, records: list[dict]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "list.json", "list.json.gz", "a.parquet"]
)
def test_every_format_gives_the_same_records(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = (json.dumps(RECORDS, indent=1) if name.startswith("list") else LINES).encode()
    if name.endswith(".parquet"):
        write_parquet(path, RECORDS)
    else:
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(path) == RECORDS


def test_json_object_of_lists_gives_the_list_of_the_split(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": 1, "train": RECORDS, "test": RECORDS[:1]}))
    assert read(path, "test") == RECORDS[:1]
    with pytest.raises(DataError, match=r"a\.json: several lists of records \(train, test\).*'dev'"):
        read(path, "dev")


def test_byte_order_mark_blank_lines_and_line_separators_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"q": "a\u2028b\x85c"}\r\n\n  \n{"q": "d"}'.encode())
    assert read(path) == [{"q": "a\u2028b\x85c"}, {"q": "d"}]


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text() | st.none() | st.integers(), max_size=3), min_size=1))
@settings(deadline=None)
def test_json_lines_round_trip(tmp_path_factory: pytest.TempPathFactory, records: list[dict]) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), "utf-8", "surrogatepass")
    assert read(path) == records


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("cut.jsonl", (LINES + '{"query": "What is').encode(), r"cut\.jsonl: line 6, column 11: not valid JSON"),
        ("bad.json", b'[\n {"q": 1},\n {"q" 2}]', r"bad\.json: line 3, column 7: not valid JSON"),
        ("cut.json", json.dumps(RECORDS, indent=1).encode()[:90], r"cut\.json: line 7, column \d+: not valid JSON"),
        ("misnamed.jsonl", b"PAR1\x15\x04", r"misnamed\.jsonl: not what its name says; it is a parquet file"),
        ("misnamed.parquet", LINES.encode(), r"misnamed\.parquet: not a parquet file"),
        ("cut.parquet", b"PAR1\x15\x04\x00", r"cut\.parquet: the parquet data is cut or damaged"),
        ("zipped.jsonl", gzip.compress(LINES.encode()), r"zipped\.jsonl: not what its name says; it is a gzip file"),
        ("cut.jsonl.gz", gzip.compress(LINES.encode())[:-20], r"cut\.jsonl\.gz: the gzip data is cut or damaged"),
        ("page.jsonl", b"\n<!DOCTYPE html><html>", r"page\.jsonl: not what its name says; it is an HTML page"),
        ("lfs.json", b"version https://git-lfs.github.com/spec/v1\n", r"lfs\.json: .* a Git LFS pointer"),
        ("list.jsonl", json.dumps(RECORDS).encode(), r"list\.jsonl: line 1: a JSON list, not JSON lines"),
        ("numbers.jsonl", b'{"q": 1}\n7\n', r"numbers\.jsonl: line 2: expected an object .* found int"),
        ("numbers.json", b"[1, 2]", r"numbers\.json: record 1: expected an object"),
        ("text.json", b'"text"', r"text\.json: a JSON str, not a list of records"),
        ("latin.jsonl", b'{"q": 1}\n{"q": "caf\xe9"}\n', r"latin\.jsonl: line 2: not UTF-8"),
        ("deep.json", b"[" * 100_000, r"deep\.json: line 1: JSON that can't be read"),
        ("empty.jsonl", b"", r"empty\.jsonl: the file is empty \(0 bytes\)"),
        ("a.csv", b"q,a\n", r"a\.csv: unknown kind of file; known are \.json"),
    ],
)
def test_file_that_is_not_what_it_says_is_named(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=text):
        read(tmp_path / name)


def test_split_picks_the_files_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    names = ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl", "dataset_info.json")
    for name in (*names, ".hidden.jsonl"):
        (tmp_path / "data" / name).write_text(LINES)
    assert [p.name for p in find_files(tmp_path, "train")] == list(names[:2])
    assert [p.name for p in find_files(tmp_path, "test")] == ["test.jsonl"]
    with pytest.raises(DataError, match=r"no data file of the split 'validation' \(data files found: test\.jsonl"):
        find_files(tmp_path, "validation")


def test_files_without_a_split_in_their_names_all_belong(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json"):
        (tmp_path / name).write_text(LINES)
    assert [p.name for p in find_files(tmp_path, "train")] == ["a.json", "b.jsonl"]


def test_cache_directory_that_cannot_be_written_falls_back_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")  # can't be written, not even by root
    for variable in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_XET_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / "file" / "cache"))
    fallback = tmp_path / "run" / "cache"
    with pytest.warns(UserWarning, match="can't be written") as caught:
        assert choose_cache_dir(fallback) == fallback
    assert len(caught) == 1
    assert fallback.is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_cache_dir(fallback) == fallback  # chosen once: the second load warns no more


def test_hub_name_goes_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls = []

    def fake(path: str, config: str | None, *, split: str, cache_dir: str) -> datasets.Dataset:
        calls.append((path, config, split, cache_dir))
        return datasets.Dataset.from_list(RECORDS)

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert [r.fields for r in read_hub_records("owner/name:main", "test", None)] == RECORDS
    assert calls == [("owner/name", "main", "test", str(tmp_path / "cache"))]


def test_hub_name_without_network_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"owner/no-such-set: no such file here.*or give a local file") as caught:
        list(read_hub_records("owner/no-such-set", "train", None))
    assert "\n" not in str(caught.value)


def test_local_files_ask_no_network(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    write_parquet(tmp_path / "b.parquet", RECORDS)
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
        "from lazytrain.recipes.rows import load_rows\n"
        f"assert load_rows({str(tmp_path)!r}).report.num_used == 10\n"
        "sys.exit('datasets' in sys.modules)\n"
    )
    unreachable = {"HF_HOME": str(tmp_path / "a.jsonl" / "no"), "PYTHONPATH": str(ROOT), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=unreachable, check=False, timeout=120).returncode == 0
