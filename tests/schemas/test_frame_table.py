"""pack.json and frames.arrow: what is written is read back, what is wrong is refused with the command that mends it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pytest
from dm05_schemas.errors import DataError
from dm05_schemas.frame_table import BATCH_ROWS, FrameTable, FrameWriter, Rows, url_checksum
from dm05_schemas.json_schemas import load_schema
from dm05_schemas.pack import FileRecord, PackInfo, arrow_schema, check_files, check_matches, read_info, write_info
from dm05_schemas.pack_writer import replaced_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import make_spec

SPEC = make_spec()
INFO = PackInfo(
    dataset="toy",
    images="blobs",
    state_dim=4,
    action_dim=3,
    cameras=("images_1", "images_2"),
    prompts=("put", "取"),
    episodes=("a.jsonl", "b/c.jsonl"),
    episode_frames=(2, 5),
    frames_file=FileRecord(path="frames.arrow", bytes=10),
    frames_crc32=123,
    blobs=(FileRecord(path="../x.tar.part-000", bytes=7),),
    largest_image_bytes=300,
    source="abc",
    rebuild="Run dm05-prep pack --force",
    tool_version="0.1.0",
)


def test_round_trip_and_json_schema(tmp_path: Path) -> None:
    path = write_info(tmp_path, INFO)
    assert read_info(tmp_path) == INFO and INFO.frames == 7
    jsonschema.validate(json.loads(path.read_text()), load_schema("pack"))


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"format": "other"}, "is not the description of a pack"),
    ({"version": True}, "is of version True"),
    ({"blobs": []}, "images are blobs and there are 0 blobs"),
    ({"images": "files"}, "images are files and there are 1 blobs"),
    ({"largest_image_bytes": 10**15}, "largest_image_bytes is"),
    ({"version": 2}, "is of version 2, this program reads version 1"),
    ({"images": "tape"}, "images is 'tape'"),
    ({"episode_frames": [2]}, "do not fit together"),
    ({"episode_frames": [2, 1]}, "do not fit together"),
    ({"episode_frames": [2, True]}, "episode_frames is True"),
    ({"state_dim": 0}, "a count is 0"),
    ({"state_dim": "4"}, "state_dim is '4'"),
    ({"cameras": "images_1"}, "cameras is 'images_1'"),
    ({"blobs": [{"path": "x", "bytes": -1}]}, "bytes is -1"),
    ({"blobs": [{"path": "x"}]}, "bytes"),
    ({"blobs": None}, "does not hold what it should"),
    ({"source": None}, "source is None"),
    ({"surprise": 1}, "surprise"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=[text for _, text in CHANGES])
def test_wrong_descriptions(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = write_info(tmp_path, INFO)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match="Run dm05-prep pack --force") as caught:
        read_info(tmp_path)
    assert text in str(caught.value) and str(path) in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(sorted(asdict(INFO))), data=st.data())
def test_any_value_anywhere_is_read_or_refused(tmp_path_factory: Any, key: str, data: st.DataObject) -> None:
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
        max_leaves=6,
    )
    folder = tmp_path_factory.mktemp("info")
    path = write_info(folder, INFO)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: data.draw(values)}))
    try:
        read_info(folder)
    except DataError:
        pass
    shutil.rmtree(folder)


def test_missing_or_broken_json(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_info(tmp_path)
    for text in ("", "{", "[]", '{"format": NaN}'):
        (tmp_path / "pack.json").write_text(text)
        with pytest.raises(DataError, match=r"pack\.json: .*\. Run dm05-prep pack --force"):
            read_info(tmp_path)


def test_files_are_checked(tmp_path: Path) -> None:
    folder = tmp_path / "pack"
    folder.mkdir()
    (folder / "frames.arrow").write_bytes(b"x" * 10)
    part = tmp_path / "x.tar.part-000"
    part.write_bytes(b"y" * 7)
    check_files(folder, INFO)
    part.write_bytes(b"y" * 6)
    with pytest.raises(DataError, match=r"part-000: part of the pack, has 6 bytes where 7 were written"):
        check_files(folder, INFO)
    part.unlink()
    with pytest.raises(DataError, match=r"part-000: part of the pack, No such file.*Run dm05-prep"):
        check_files(folder, INFO)


def test_matches(tmp_path: Path) -> None:
    check_matches(tmp_path, INFO, SPEC, "abc")
    for spec in (make_spec(name="other"), make_spec(action_dim=2), make_spec(state_desc=("joint",) * 3)):
        with pytest.raises(DataError, match="was packed with"):
            check_matches(tmp_path, INFO, spec)
    with pytest.raises(DataError, match="stale"):
        check_matches(tmp_path, INFO, SPEC, "abd")


def write_table(folder: Path, lengths: list[int]) -> tuple[PackInfo, list[Rows], list[list[str]]]:
    rng = np.random.default_rng(len(lengths))
    writer = FrameWriter(folder / "frames.arrow", SPEC, "files")
    written, urls = [], []
    for number, n in enumerate(lengths):
        rows = Rows(
            episode=np.full(n, number, dtype=np.int32),
            frame=np.arange(n, dtype=np.int32),
            prompt=rng.integers(0, 2, n).astype(np.int32),
            state=rng.normal(size=(n, 4)).astype(np.float32),
            target=rng.normal(size=(n, 3)).astype(np.float32),
        )
        names = [f"ep_{number}/日{t}" + "x" * (t % 7) for t in range(n)]
        camera = {"url": names, "frame_idx": [-1] * n, "crc32": [url_checksum(name, -1) for name in names]}
        writer.add(rows, dict.fromkeys(SPEC.image_keys, camera))
        written.append(rows)
        urls.append(names)
    writer.finish()
    size = (folder / "frames.arrow").stat().st_size
    info = replace(
        INFO,
        images="files",
        blobs=(),
        episodes=tuple(map(str, range(len(lengths)))),
        episode_frames=tuple(lengths),
        frames_file=FileRecord(path="frames.arrow", bytes=size),
    )
    return info, written, urls


def test_rows_are_read_back_across_record_batches(tmp_path: Path) -> None:
    lengths = [BATCH_ROWS - 3, 7, 2, BATCH_ROWS, 5]
    info, written, urls = write_table(tmp_path, lengths)
    with pa.memory_map(str(tmp_path / "frames.arrow")) as source:
        reader = pa.ipc.open_file(source)
        assert reader.schema == arrow_schema(info, "files") == arrow_schema(SPEC, "files")
        sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        assert sizes == [BATCH_ROWS, BATCH_ROWS, sum(lengths) - 2 * BATCH_ROWS]
    table = FrameTable(tmp_path, info)
    start = 0
    for rows, names in zip(written, urls, strict=True):
        whole = table.frames(start, len(rows.frame))
        for got, due in zip(whole, rows, strict=True):
            assert got.dtype == due.dtype and np.array_equal(got, due)
        for t in (0, len(names) // 2, len(names) - 1):
            assert table.url("images_2", start + t) == (names[t], -1)
        start += len(names)
    table.close()


def test_a_table_that_is_not_what_was_written(tmp_path: Path) -> None:
    info, _, _ = write_table(tmp_path, [3, 4])
    path = tmp_path / "frames.arrow"
    whole = path.read_bytes()
    for broken, text in ((whole[:-1], "has .* bytes where"), (whole + b"x", "has .* bytes where")):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=text):
            FrameTable(tmp_path, info)
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(DataError, match="is no Arrow file any more"):
        FrameTable(tmp_path, info)
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"has 7 rows where pack\.json says 8"):
        FrameTable(tmp_path, replace(info, episode_frames=(3, 5)))
    with pytest.raises(DataError, match="does not have the columns"):
        FrameTable(tmp_path, replace(info, action_dim=4))
    path.unlink()
    with pytest.raises(DataError, match="cannot be opened: No such file"):
        FrameTable(tmp_path, info)


def test_every_changed_byte_of_a_row_is_noticed(tmp_path: Path) -> None:
    """Flip each byte of the file in turn under an open reader: a row is right or refused."""
    info, written, urls = write_table(tmp_path, [3])
    path = tmp_path / "frames.arrow"
    whole = bytearray(path.read_bytes())
    table = FrameTable(tmp_path, info)
    refused = 0
    with path.open("r+b") as file:
        for at in range(0, len(whole), 3):
            _poke(file, at, whole[at] ^ 0x55)
            try:
                rows = table.frames(0, 3)
                assert all(np.array_equal(a, b) for a, b in zip(rows, written[0], strict=True))
                assert [table.url("images_1", t) for t in range(3)] == [(url, -1) for url in urls[0]]
            except DataError as error:
                refused += 1
                assert "dm05-prep pack --force" in str(error)
            _poke(file, at, whole[at])
    assert refused > 50


def _poke(file: Any, at: int, value: int) -> None:
    os.pwrite(file.fileno(), bytes([value]), at)


class TestReplacedFolder:
    def test_replaces_only_when_complete(self, tmp_path: Path) -> None:
        target = tmp_path / "a" / "pack"
        for text in ("one", "two"):
            with replaced_folder(target) as new:
                (new / "x").write_text(text)
            assert (target / "x").read_text() == text
        with pytest.raises(KeyboardInterrupt), replaced_folder(target) as new:
            (new / "x").write_text("three")
            raise KeyboardInterrupt
        assert (target / "x").read_text() == "two"
        assert [path.name for path in target.parent.iterdir()] == ["pack"]

    def test_clears_what_a_killed_run_left_but_not_what_another_writes(self, tmp_path: Path) -> None:
        (tmp_path / ".pack-0123.tmp").mkdir()
        target = tmp_path / "pack"
        with replaced_folder(target) as first, replaced_folder(target) as second:
            assert not (tmp_path / ".pack-0123.tmp").exists()
            assert first.exists() and second.exists()
            (second / "x").write_text("second")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["pack"]

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "pack").write_text("precious")
        with pytest.raises(NotADirectoryError), replaced_folder(tmp_path / "pack"):
            pass
        assert (tmp_path / "pack").read_text() == "precious"
