"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h3store.errors import Unavailable
from h3store.models.fetch import fetch_smollm2


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, alone or among others."""
    torch.manual_seed(20240229)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct; fetched once into $H3STORE_CACHE, or the tests that need it are skipped."""
    try:
        return fetch_smollm2()
    except Unavailable as error:
        pytest.skip(str(error))
