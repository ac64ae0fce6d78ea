"""frames.arrow: written episode by episode, read row by row.

Rows are read with ``pread`` from the page cache, at offsets learnt from the file's map when it is opened. Reading
through the map itself would be no faster and would turn a file cut short under a running job into a bus error; this way
it is an ordinary short read. A reader holds one file handle and a few numbers a record batch, nothing a frame.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dm05_schemas.errors import DataError
from dm05_schemas.pack import ImageStore, PackInfo, arrow_schema, blob_path
from dm05_schemas.registry import DatasetSpec

BATCH_ROWS = 1 << 16
CHUNK_BYTES = 1 << 22
BLOB_FIELDS = ("blob", "offset", "length", "crc32")

CameraColumns = Mapping[str, Any]


class Rows(NamedTuple):
    """Neighbouring rows: episode, frame and prompt number int32 [n], state [n, S] and target [n, A] float32."""

    episode: NDArray[np.int32]
    frame: NDArray[np.int32]
    prompt: NDArray[np.int32]
    state: NDArray[np.float32]
    target: NDArray[np.float32]

    def checksums(self) -> list[int]:
        """CRC-32 of each row."""
        numbers = np.stack(self[:3], axis=1).astype(np.int32).view(np.uint8)
        vectors = (np.ascontiguousarray(part, dtype=np.float32).view(np.uint8) for part in self[3:])
        whole = np.concatenate([numbers, *vectors], axis=1)
        return [zlib.crc32(row) for row in whole]


def url_checksum(url: str, frame_idx: int) -> int:
    """CRC-32 of where an image file, or a frame of a video, is."""
    return zlib.crc32(f"{url}\0{frame_idx}".encode())


class FrameWriter:
    """Writes frames.arrow in record batches of BATCH_ROWS rows (the last is shorter).

    Args:
        path: the file, written in place: the folder around it is what gets renamed.
        spec: names the cameras and dims.
        images: what a camera's columns hold.
    """

    def __init__(self, path: Path, spec: DatasetSpec, images: ImageStore) -> None:
        self._schema = arrow_schema(spec, images)
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0

    def finish(self) -> None:
        """Write what is waiting and the footer."""
        self._flush(self._rows)
        self._writer.close()
        self.close()

    def close(self) -> None:
        """Close the file; without `finish` it is not complete."""
        self._sink.close()

    def add(self, rows: Rows, cameras: Mapping[str, CameraColumns]) -> None:
        """Append the rows of one episode.

        Args:
            rows: what every frame has.
            cameras: for each camera, by its key, an array or list [n] for each field of its struct.
        """
        columns = {**rows._asdict(), "crc32": rows.checksums(), **cameras}
        arrays = [_to_arrow(columns[field.name], field.type) for field in self._schema]
        self._waiting.append(pa.record_batch(arrays, schema=self._schema))
        self._rows += len(arrays[0])
        while self._rows >= BATCH_ROWS:
            self._flush(BATCH_ROWS)

    def _flush(self, rows: int) -> None:
        table = pa.Table.from_batches(self._waiting, schema=self._schema).combine_chunks()
        batches = table.slice(0, rows).combine_chunks().to_batches()
        for batch in batches:
            self._writer.write_batch(batch)
        rest = table.slice(rows)
        self._waiting = rest.to_batches()
        self._rows = rest.num_rows


def _to_arrow(values: Any, kind: pa.DataType) -> pa.Array:
    if pa.types.is_struct(kind):
        return pa.StructArray.from_arrays([_to_arrow(values[f.name], f.type) for f in kind], fields=list(kind))
    if pa.types.is_fixed_size_list(kind):
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), type=kind)
    return pa.array(values, type=kind)


class _Column(NamedTuple):
    """Where a column's values begin in each record batch; type, shape and bytes of one value."""

    starts: list[int]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    width: int


class FrameTable:
    """Reads rows of frames.arrow.

    Args:
        folder: the pack's.
        info: its pack.json.

    Raises:
        DataError: missing, of another size, or with another schema or row count than pack.json says.
    """

    def __init__(self, folder: Path, info: PackInfo) -> None:
        self.path, self._info = blob_path(folder, info.frames_file), info
        try:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self.error(f"cannot be opened: {error.strerror or error}") from error
        try:
            self._columns = self._find_columns()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def error(self, what: str) -> DataError:
        """A DataError of this file that says how to rebuild it."""
        return DataError(what, where=self.path, fix=self._info.rebuild)

    def frames(self, row: int, count: int) -> Rows:
        """Rows from `row` on, their checksums compared.

        Raises:
            DataError: the file was cut short or changed since it was written.
        """
        rows = Rows(*(self.rows(name, row, count) for name in Rows._fields))
        if rows.checksums() != self.rows("crc32", row, count).tolist():
            raise self.error(f"row {row} was changed since it was written")
        return rows

    def url(self, camera: str, row: int) -> tuple[str, int]:
        """Url and frame number (-1 for an image) of a camera whose images are files.

        Raises:
            DataError: the file was cut short or changed since it was written.
        """
        url, frame = self.text(f"{camera}.url", row), int(self.rows(f"{camera}.frame_idx", row)[0])
        if url_checksum(url, frame) != self.rows(f"{camera}.crc32", row)[0]:
            raise self.error(f"row {row} was changed since it was written")
        return url, frame

    def rows(self, name: str, row: int, count: int = 1) -> NDArray[Any]:
        """Values [count] or [count, D] of a column ("state", "images_1.offset") from `row` on.

        Raises:
            DataError: the file was cut short since it was opened.
        """
        starts, dtype, shape, width = self._columns[name]
        data = b""
        while count:
            batch, inside = divmod(row, BATCH_ROWS)
            take = min(count, BATCH_ROWS - inside)
            data += self._read(starts[batch] + inside * width, take * width, row)
            row, count = row + take, count - take
        return np.frombuffer(data, dtype=dtype).reshape(-1, *shape)

    def text(self, name: str, row: int) -> str:
        """Value of a string column ("images_1.url").

        Raises:
            DataError: the file was cut short since it was opened, or holds no text there.
        """
        batch, inside = divmod(row, BATCH_ROWS)
        ends, letters = self._columns[name].starts, self._columns[f"{name}.letters"].starts
        first, last = np.frombuffer(self._read(ends[batch] + 4 * inside, 8, row), dtype=np.int32).tolist()
        if not 0 <= first <= last <= self._info.frames_file.bytes:
            raise self.error(f"row {row} of {name} is corrupt")
        try:
            return self._read(letters[batch] + first, last - first, row).decode()
        except UnicodeDecodeError:
            raise self.error(f"row {row} of {name} is corrupt") from None

    def verify(self) -> None:
        """Read the whole file once and compare its checksum.

        Raises:
            DataError: a byte differs from what was written.
        """
        crc, at, end = 0, 0, self._info.frames_file.bytes
        while at < end:
            data = self._read(at, min(CHUNK_BYTES, end - at), 0)
            crc, at = zlib.crc32(data, crc), at + len(data)
        if crc != self._info.frames_crc32:
            raise self.error("its checksum differs from the one it was written with")

    def _read(self, offset: int, length: int, row: int) -> bytes:
        data = os.pread(self._handle, length, offset)
        if len(data) != length:
            raise self.error(f"was cut short: row {row} is not there any more")
        return data

    def _find_columns(self) -> dict[str, _Column]:
        """Every leaf column by name ("prompt", "images_1.offset")."""
        size = os.fstat(self._handle).st_size
        if size != self._info.frames_file.bytes:
            raise self.error(f"has {size:,} bytes where {self._info.frames_file.bytes:,} were written")
        try:
            with pa.memory_map(str(self.path)) as source:
                whole = source.read_buffer()
                reader = pa.ipc.open_file(whole)
                if not reader.schema.equals(arrow_schema(self._info, self._info.images)):
                    raise self.error("does not have the columns that pack.json says")
                batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (pa.ArrowException, OSError) as error:
            raise self.error(f"is no Arrow file any more: {error}") from error
        rows = [batch.num_rows for batch in batches]
        if sum(rows) != self._info.frames or any(count != BATCH_ROWS for count in rows[:-1]):
            raise self.error(f"has {sum(rows)} rows where pack.json says {self._info.frames}")
        columns: dict[str, _Column] = {}
        for batch in batches:
            for name, buffer, dtype, shape in _buffers(batch):
                width = dtype.itemsize * math.prod(shape)
                columns.setdefault(name, _Column([], dtype, shape, width)).starts.append(buffer.address - whole.address)
        return columns


def _buffers(batch: pa.RecordBatch) -> list[tuple[str, pa.Buffer, np.dtype[Any], tuple[int, ...]]]:
    """Name, data buffer, type and shape a value of every leaf column of a record batch."""
    found: list[tuple[str, pa.Buffer, np.dtype[Any], tuple[int, ...]]] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_struct(column.type):
            leaves = [(f"{name}.{field.name}", column.field(i)) for i, field in enumerate(column.type)]
        else:
            leaves = [(name, column)]
        for leaf, array in leaves:
            if pa.types.is_string(array.type):
                _, ends, letters = array.buffers()
                found.append((leaf, ends, np.dtype(np.int32), ()))
                found.append((f"{leaf}.letters", letters, np.dtype(np.uint8), ()))
            elif pa.types.is_fixed_size_list(array.type):
                found.append((leaf, array.values.buffers()[1], np.dtype(np.float32), (array.type.list_size,)))
            else:
                found.append((leaf, array.buffers()[1], np.dtype(array.type.to_pandas_dtype()), ()))
    return found
