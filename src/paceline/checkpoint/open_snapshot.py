"""A snapshot whose files are open: verified first, and then read straight into existing tensors."""

import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from paceline.checkpoint.checkpoint_errors import Damaged
from paceline.checkpoint.snapshots import Snapshot, open_file
from paceline.stored.directory import PIECE
from paceline.stored.tensor_file import TensorEntry, parse_header

Chunk = tuple[str, int]  # the name of a file, and which of its chunks


class OpenSnapshot:
    """The files of a snapshot. They stay readable even if they are renamed or removed. Raises Damaged, also when
    it is made, if they differ from what was written."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._descriptors: dict[str, int] = {}
        self._threads = 1
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: list[Future[None]] = []
        weakref.finalize(self, _close_all, self._descriptors)
        for name, record in snapshot.manifest.files.items():
            self._descriptors[name], size = open_file(snapshot.path / name)
            if size != record.size:
                raise self._damaged(f"{name} has {size} bytes, expected {record.size}")

    def chunks(self) -> list[Chunk]:
        """All chunks of all files."""
        return [(name, n) for name, record in self.snapshot.manifest.files.items() for n in range(len(record.sha256))]

    def chunks_of(self, name: str, begin: int, end: int) -> Iterator[Chunk]:
        """The chunks of a file that cover these bytes."""
        size = self.snapshot.manifest.files[name].chunk
        yield from ((name, number) for number in range(begin // size, -(-end // size)))

    def verify(self, chunks: Sequence[Chunk], threads: int = 1) -> None:
        """Compare the bytes of these chunks with the manifest. As many threads may read later."""
        self._threads = threads
        parts = [chunks[len(chunks) * part // threads : len(chunks) * (part + 1) // threads] for part in range(threads)]
        if threads == 1:
            self._verify(chunks)
            return
        with ThreadPoolExecutor(threads) as pool:  # hashing and reading let other threads run
            for done in [pool.submit(self._verify, part) for part in parts]:
                done.result()

    def _verify(self, chunks: Sequence[Chunk]) -> None:
        scratch = memoryview(bytearray(PIECE))
        for name, number in chunks:
            record, digest = self.snapshot.manifest.files[name], hashlib.sha256()
            begin, end = number * record.chunk, min((number + 1) * record.chunk, record.size)
            for at in range(begin, end, PIECE):
                piece = scratch[: min(PIECE, end - at)]
                self.read(name, at, piece)
                digest.update(piece)
            found, expected = digest.hexdigest()[:12], record.sha256[number][:12]
            if digest.hexdigest() != record.sha256[number]:
                where = f"bytes {begin} to {end} of {name} have" if len(record.sha256) > 1 else f"{name} has"
                raise self._damaged(f"{where} changed: the SHA-256 is {found}…, expected {expected}…")

    def read(self, name: str, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes of a file from `offset` on."""
        while memory:
            try:
                count = os.preadv(self._descriptors[name], [memory], offset)
            except OSError as error:
                raise self._damaged(f"{name} cannot be read: {error.strerror}") from error
            if not count:
                raise self._damaged(f"{name} ended after {offset} bytes")
            memory, offset = memory[count:], offset + count

    def read_soon(self, name: str, offset: int, memory: memoryview) -> None:
        """As `read`, but large reads are only complete when `finish` has returned, so that several threads can read."""
        if self._threads == 1 or len(memory) < PIECE:
            self.read(name, offset, memory)
            return
        self._pool = self._pool or ThreadPoolExecutor(self._threads)
        self._under_way.append(self._pool.submit(self.read, name, offset, memory))

    def finish(self) -> None:
        """Wait for all reads to complete."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            one.result()

    def content(self, name: str) -> bytes:
        """All bytes of a file. Raises KeyError if there is none of this name."""
        found = bytearray(self.snapshot.manifest.files[name].size)
        self.read(name, 0, memoryview(found))
        return bytes(found)

    def header(self, name: str) -> tuple[int, Mapping[str, object], dict[str, TensorEntry]]:
        """The offset of a file's tensor data, its metadata, and its tensors. Raises ValueError if it is not in
        the safetensors format."""
        size = self.snapshot.manifest.files[name].size
        start = memoryview(bytearray(min(8, size)))
        self.read(name, 0, start)
        if size < 8 or (length := int.from_bytes(start, "little")) > size - 8:
            raise ValueError(f"the header of {name} does not fit in its {size} bytes")
        header = memoryview(bytearray(length))
        self.read(name, 8, header)
        return (8 + length, *parse_header(bytes(header), size - 8 - length))

    def _damaged(self, why: str) -> Damaged:
        return Damaged(self.snapshot.path, why)


def _close_all(descriptors: Mapping[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
