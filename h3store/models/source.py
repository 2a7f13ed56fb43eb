"""Where a model's files are: a folder on the disk, or one in a packed archive. Owns paths into archives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from h3store.errors import ArchiveFormatError, CheckpointError
from h3store.packed import PackedFolder
from h3store.units import MiB

__all__ = ["ModelPath", "PackedPath", "PackedWeights", "model_folder"]

_DDR_BYTES = 64 * MiB  # for blocks of files and weights on their way into memory


class PackedPath:
    """A path into a packed folder, with what is used of pathlib.Path here. Keeps the archive open.

    Args:
        packed: the folder.
        name: with slashes; empty for the folder itself.
    """

    def __init__(self, packed: PackedFolder, name: str = "") -> None:
        self.packed = packed
        self._name = name

    @property
    def name(self) -> str:
        """The last part of the path: the archive's name for the folder itself."""
        return self._name.rpartition("/")[2] or self.packed.path.name

    @property
    def parent(self) -> PackedPath:
        """The folder that it lies in."""
        return PackedPath(self.packed, self._name.rpartition("/")[0])

    def __truediv__(self, name: str) -> PackedPath:
        return PackedPath(self.packed, f"{self._name}/{name}".lstrip("/"))

    def __str__(self) -> str:
        return f"{self.packed.path}/{self._name}".rstrip("/")

    def is_dir(self) -> bool:
        """Whether it is the folder itself."""
        return not self._name

    def is_file(self) -> bool:
        """Whether the archive has such a file."""
        return self._name in self.packed.files

    def open(self, mode: str = "rb") -> BinaryIO:
        """Opens for reading bytes; FileNotFoundError if there is no such file."""
        assert mode == "rb"
        return self.packed.open(self._name)

    def read_bytes(self) -> bytes:
        """The whole file."""
        with self.open() as stream:
            return stream.read()

    def read_text(self, encoding: str) -> str:
        """The whole file as text."""
        return self.read_bytes().decode(encoding)


ModelPath = Path | PackedPath


def model_folder(given: str | os.PathLike[str] | PackedPath) -> ModelPath:
    """Returns a folder, or the folder in a packed archive.

    Raises:
        CheckpointError: a file that is no packed archive.
        CorruptArchiveError, ArchiveError: an archive that does not open.
    """
    if isinstance(given, PackedPath):
        return given
    path = Path(given)
    if not path.is_file():
        return path
    try:
        return PackedPath(PackedFolder(path, _DDR_BYTES))
    except ArchiveFormatError as error:
        raise CheckpointError(f"{path} is a file; give a Hugging Face model folder, or an archive that h3store pack "
                              f"made ({error})") from error


class PackedWeights:
    """A safetensors file of a packed folder, with what is used of safetensors.safe_open here.

    Args:
        path: of the file.
    """

    def __init__(self, path: PackedPath) -> None:
        self._store = path.packed.store
        self._stored = path.packed.tensors(path._name)

    def keys(self) -> list[str]:
        """Names of its tensors."""
        return list(self._stored)

    def dtype_of(self, name: str) -> str:
        """The element type, as torch names it."""
        return self._store.record(self._stored[name]).dtype

    def get_tensor(self, name: str) -> Tensor:
        """A copy in ordinary memory."""
        name = self._stored[name]
        self._store.range(name).prefetch()
        return self._store.read(name)
