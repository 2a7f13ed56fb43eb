"""The tree drawn in the docstring is the tree there is."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from h3store import errors

CLASSES = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls)}


def drawn() -> dict[str, tuple[str, str | None]]:
    """name -> (parent in the drawing, built-in it also derives from)."""
    path, found = ["H3Error"], {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^((?:│   |    )*)[├└]── (\w+)(?: \((?:also )?(\w+)\))?", line)
        if match:
            depth = len(match[1]) // 4 + 1
            path[depth:] = [match[2]]
            found[match[2]] = (path[depth - 1], match[3])
    return found


def test_every_error_is_drawn_once() -> None:
    assert set(drawn()) | {"H3Error"} == set(CLASSES)


@pytest.mark.parametrize("name", sorted(drawn()))
def test_each_derives_from_what_the_drawing_says(name: str) -> None:
    parent, builtin = drawn()[name]
    assert CLASSES[parent] in CLASSES[name].__bases__
    if builtin:
        assert builtin in {base.__name__ for base in CLASSES[name].__mro__}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_message_comes_out_as_it_went_in_also_from_another_process(name: str) -> None:
    error = CLASSES[name]("store a.h3: 3 bytes, limit 4")
    assert str(error) == "store a.h3: 3 bytes, limit 4"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
