"""The documents name what there is."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch

from h3store.cli import app

ROOT = Path(__file__).resolve().parents[2]


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = app._parser()
    (action,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return action.choices


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_is_in_the_readme_and_has_an_example(name: str) -> None:
    assert f"`h3store {name}" in (ROOT / "README.md").read_text()
    example = re.search(r"example: (h3store .*)", commands()[name].epilog or "")
    assert example and example[1].split()[1] == name


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_flag_says_what_it_is_for(name: str) -> None:
    for action in commands()[name]._actions:
        assert action.help, f"{name} {action.option_strings or action.dest}"


def test_the_readme_s_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0], names)
    rows = names["rows"]
    assert isinstance(rows, torch.Tensor) and rows.sum(dim=1).tolist() == [256.0, 0.0]


def test_the_readme_names_every_make_verb_of_the_two_commands() -> None:
    verbs = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.M)
    assert named == ["demo", "test"]
    assert set(named) <= set(verbs)


def test_architecture_stays_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 150
