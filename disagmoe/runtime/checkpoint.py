"""Checkpoints on disk: written whole or not at all, checked before they are used.

Decides what counts as a checkpoint. A save goes to a hidden folder first; when
every rank has written its file, rank 0 adds a manifest (step, identity of the run,
size and checksum of every file) and renames the folder: `step-00000120`. A folder
without a manifest, or whose files do not match it, is none: the newest valid one
is resumed and the others are named in a warning. All ranks share the folder.

The placement may change between save and load (see `snapshot.py`); model,
precision and data may not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from disagmoe.runtime.snapshot import ChunkLoadPlanner, ChunkSavePlanner, buffer_chunks, shard_chunks
from disagmoe.runtime.step import StepRunner

SCHEMA = "disagmoe.checkpoint/1"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8})")
T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; one line that names the folder and the reason."""


@dataclass(frozen=True)
class Found:
    """The newest valid checkpoint: its folder and step, and what was passed over (one line each)."""

    folder: Path | None
    step: int
    passed_over: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run in `folder`. `identity` must be equal between save and load; `keep` newest ones stay.

    All methods are collective over the world.
    """

    def __init__(self, folder: Path, runner: StepRunner, identity: Mapping[str, object], *, keep: int = 3) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least one checkpoint must be kept")
        self.folder = folder
        self.keep = keep
        self._runner = runner
        self._identity = dict(identity)

    def prepare(self) -> None:
        """Make the folder, prove that it can be written and remove what an interrupted save left."""
        self._first(self._prepare)

    def save(self, step: int) -> Path:
        """Write the state after `step` steps."""
        target = self.folder / f"step-{step:08d}"
        part = self.folder / f".part-{target.name}"
        self._first(lambda: _fresh(part))
        chunks = [*shard_chunks(self._runner), *buffer_chunks(self._runner, saving=True)]
        try:
            save({}, storage_writer=FileSystemWriter(part, sync_files=True), planner=ChunkSavePlanner(chunks))
        except CheckpointException as error:
            raise CheckpointError(f"{target}: cannot be written: {_cause(error)}") from None
        sums = _checksums(part.glob(f"__{dist.get_rank()}_*"))
        gathered: list[dict[str, list[int]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(gathered, sums)
        files = {name: entry for of_rank in gathered for name, entry in of_rank.items()}
        self._first(lambda: self._publish(part, target, step, files))
        return target

    def newest(self) -> Found:
        """The newest valid checkpoint in the folder; every file is read and checked once, by rank 0."""
        return self._first(self._newest)

    def load(self, folder: Path) -> int:
        """Read the state into this run, whatever its placement; the number of steps that it is after."""
        manifest = self._first(lambda: read_manifest(folder))
        assert self._runner.optimizer is not None
        self._check_identity(folder, manifest)
        chunks = [*shard_chunks(self._runner), *buffer_chunks(self._runner, saving=False)]
        try:
            load({}, storage_reader=FileSystemReader(folder), planner=ChunkLoadPlanner(chunks))
        except CheckpointException as error:
            raise CheckpointError(f"{folder}: cannot be loaded: {_cause(error)}") from None
        for bucket in self._runner.buckets:
            bucket.gather()
        step = int(str(manifest["step"]))
        self._runner.optimizer.updates = step
        return step

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
        for left in self.folder.glob(".part-*"):
            shutil.rmtree(left)

    def _newest(self) -> Found:
        passed_over: list[str] = []
        names = sorted((p.name for p in self.folder.glob("step-*") if _NAME.fullmatch(p.name)), reverse=True)
        for name in names:
            folder = self.folder / name
            try:
                manifest = check_files(folder)
            except CheckpointError as reason:
                passed_over.append(str(reason))
                continue
            return Found(folder, int(str(manifest["step"])), tuple(passed_over))
        return Found(None, 0, tuple(passed_over))

    def _publish(self, part: Path, target: Path, step: int, files: Mapping[str, list[int]]) -> None:
        metadata = _checksums([part / ".metadata"])
        manifest = {"schema": SCHEMA, "step": step, "run": self._identity, "files": {**files, **metadata}}
        text = json.dumps(manifest, indent=1, allow_nan=False, sort_keys=True)
        with (part / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():  # an older run in the same folder, or one that was not resumed
            shutil.rmtree(target)
        part.rename(target)
        handle = os.open(self.folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        names = sorted(p.name for p in self.folder.glob("step-*") if _NAME.fullmatch(p.name))
        for name in [n for n in names if n <= target.name][: -self.keep]:
            shutil.rmtree(self.folder / name)

    def _check_identity(self, folder: Path, manifest: Mapping[str, object]) -> None:
        saved = manifest["run"]
        assert isinstance(saved, dict)
        for key in sorted({*saved, *self._identity}):
            if saved.get(key) != self._identity.get(key):
                raise CheckpointError(
                    f"{folder}: belongs to another run: {key} is {saved.get(key)!r} there and "
                    f"{self._identity.get(key)!r} here; use another folder, or resume=none"
                )

    def _first(self, work: Callable[[], T]) -> T:
        """Do something on rank 0; its result, or its error as one line, on every rank."""
        outcome: list[tuple[T | None, str | None]] = [(None, None)]
        if dist.get_rank() == 0:
            try:
                outcome[0] = (work(), None)
            except CheckpointError as error:
                outcome[0] = (None, str(error))
            except OSError as error:
                outcome[0] = (None, f"{self.folder}: cannot be used for checkpoints: {error.strerror or error}")
        dist.broadcast_object_list(outcome, 0)
        result, reason = outcome[0]
        if reason is not None:
            raise CheckpointError(reason)
        return result  # type: ignore[return-value]  # None only where T is None


def read_manifest(folder: Path) -> dict[str, object]:
    """The manifest of a checkpoint. CheckpointError where there is none or it is damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no complete checkpoint ({MANIFEST} is missing)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise CheckpointError(f"{folder}: {MANIFEST} is not of {SCHEMA}")
    return manifest


def check_files(folder: Path) -> dict[str, object]:
    """The manifest of a checkpoint whose files are all there and unchanged; CheckpointError otherwise."""
    manifest = read_manifest(folder)
    files = manifest["files"]
    assert isinstance(files, dict)
    for name, (size, checksum) in files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{folder}: {name} has {file.stat().st_size} bytes, not {size}")
        if _checksum(file) != checksum:
            raise CheckpointError(f"{folder}: {name} is damaged (its checksum differs)")
    return manifest


def _fresh(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _checksums(files: Iterable[Path]) -> dict[str, list[int]]:
    """Name -> [bytes, checksum]."""
    return {file.name: [file.stat().st_size, _checksum(file)] for file in sorted(files)}


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _cause(error: CheckpointException) -> str:
    """The first failure of a collective save or load, in one line."""
    rank, (cause, _) = sorted(error.failures.items())[0]
    return f"{cause} (rank {rank})".strip().replace("\n", " ")
