"""The demo as `make demo` runs it: the real model, the default document, twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Cli

pytestmark = pytest.mark.model


def test_the_second_run_restores_the_document_ten_times_sooner(cli: Cli, smollm2: Path, tmp_path: Path) -> None:
    def run(name: str) -> dict[str, Any]:
        done = cli("demo", "--store", "kv.h3", "--json", name, check=0, timeout_s=600)
        assert "time to first token" in done.stdout
        return json.loads((tmp_path / name).read_text())

    first, second = run("first.json"), run("second.json")
    assert first["document_tokens"] > 5900 and len(first["questions"]) == 3
    assert first["questions"][0]["tokens_restored"] == 0
    assert all(q["tokens_restored"] > 5000 for q in first["questions"][1:] + second["questions"])
    assert [q["answer"] for q in first["questions"]] == [q["answer"] for q in second["questions"]]
    assert all(q["answer"].strip() for q in first["questions"])
    assert second["time_to_first_token_s"] * 10 <= first["time_to_first_token_s"]
    for report in (first, second):
        assert report["peak_resident_bytes"] <= report["ddr_bytes"] < report["kv_bytes_raw"] / 3
        assert report["evictions"] > 0
    assert 0 < first["kv_bytes_on_disk"] < first["kv_bytes_raw"]
