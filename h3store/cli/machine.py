"""doctor: what this machine offers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from h3store.cli.flags import DONE, command, print_json

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Adds this group's commands."""
    _add_doctor(commands)


def _add_doctor(commands: Any) -> None:
    parser = command(commands, "doctor", _doctor, "say what this machine offers and what to do about it",
                     "h3store doctor --path /mnt/nvme")
    parser.add_argument("--path", type=Path, default=Path("."), metavar="FOLDER",
                        help="where stores will live, to measure its disk (default: the current folder)")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _doctor(args: argparse.Namespace) -> int:
    from h3store import doctor

    checks = doctor.examine(args.path)
    if args.json:
        print_json(doctor.as_dict(checks))
    else:
        for check in checks:
            print(f"{check.status:4}  {check.name}: {check.value}")
            if check.advice:
                print(f"      -> {check.advice}")
    return DONE
