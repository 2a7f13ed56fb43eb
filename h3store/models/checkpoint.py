"""Weights of a Hugging Face folder, or of a packed one, by name. Owns lookup and checks; refuses to guess at missing
parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from h3store.errors import CheckpointError, UnsupportedModelError
from h3store.models.config import read_json
from h3store.models.source import ModelPath, PackedPath, PackedWeights, model_folder

__all__ = ["Checkpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# As safetensors and as torch name them.
_KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Checkpoint:
    """Named tensors of a folder, read one at a time.

    The index's weight_map is followed where there is one; files are never found by pattern.
    """

    def __init__(self, folder: str | Path | PackedPath) -> None:
        self.folder = model_folder(folder)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder; give a Hugging Face model folder")
        self._where = self._weight_map()

    def _weight_map(self) -> dict[str, str]:
        index = self.folder / _INDEX
        if index.is_file():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise CheckpointError(f"{index} has no weight_map")
            return self._checked(index, names)
        single = self.folder / _SINGLE
        if not single.is_file():
            raise CheckpointError(f"{self.folder} has neither {_INDEX} nor {_SINGLE}")
        return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _checked(self, index: ModelPath, names: dict[str, str]) -> dict[str, str]:
        for shard in sorted(set(names.values())):
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{index}: {shard!r} is not a file name")
            if not (self.folder / shard).is_file():
                raise CheckpointError(f"{self.folder / shard} is missing, though {index.name} names it; fetch it again")
        return names

    def _open(self, shard: str) -> Any:
        if shard not in self._files:
            path = self.folder / shard
            if isinstance(path, PackedPath):
                return self._files.setdefault(shard, PackedWeights(path))
            try:
                self._files[shard] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a whole safetensors file: {error}; fetch it again") from error
        return self._files[shard]

    @property
    def files(self) -> list[ModelPath]:
        """The weight files, sorted by name."""
        return [self.folder / shard for shard in sorted(set(self._where.values()))]

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def dtype_of(self, name: str) -> torch.dtype:
        """The element type of a tensor, without reading it; float32 for what is no float of this build."""
        if name not in self:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing")
        file = self._open(self._where[name])
        kind = file.dtype_of(name) if isinstance(file, PackedWeights) else file.get_slice(name).get_dtype()
        return _KINDS.get(kind, torch.float32)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Reads one tensor.

        Args:
            name: as in the file.
            shape: what the configuration promises.

        Raises:
            CheckpointError: no such tensor, or another shape.
            UnsupportedModelError: not float32, float16 or bfloat16.
        """
        shard = self._where.get(name)
        if shard is None:
            raise CheckpointError(f"{self.folder}: tensor {name!r} of shape {shape} is missing")
        try:
            tensor: Tensor = self._open(shard).get_tensor(name)
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(f"{self.folder / shard}: tensor {name!r} does not read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self.folder / shard}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                                  f"but config.json promises {shape}")
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModelError(f"{self.folder / shard}: tensor {name!r} is {tensor.dtype}; this build runs "
                                        "float32, float16 and bfloat16")
        return tensor

    def close(self) -> None:
        """Closes the files; tensors already read stay."""
        self._stack.close()
        self._files.clear()

    @classmethod
    @contextmanager
    def open(cls, folder: str | Path | PackedPath) -> Iterator[Checkpoint]:
        """A checkpoint that is closed when the block ends."""
        checkpoint = cls(folder)
        try:
            yield checkpoint
        finally:
            checkpoint.close()
