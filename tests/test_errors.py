"""The exception tree is the one that its docstring draws."""

import inspect
import re

import pytest

from shardwise import errors

BRANCH = re.compile(r"^(?P<indent>[│ ]*)[├└]── (?P<name>\w+)(?:\((?P<builtin>\w+)\))?")


def drawn_bases() -> dict[str, list[str]]:
    """The bases of every class as the docstring's tree has them."""
    ancestors = ["ShardwiseError"]
    bases = {"ShardwiseError": ["Exception"]}
    for line in (inspect.getdoc(errors) or "").splitlines():
        branch = BRANCH.match(line.removeprefix("    "))
        if branch is None:
            continue
        depth = len(branch["indent"]) // 4 + 1
        del ancestors[depth:]
        bases[branch["name"]] = [ancestors[-1], *filter(None, [branch["builtin"]])]
        ancestors.append(branch["name"])
    return bases


def defined_bases() -> dict[str, list[str]]:
    found = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    classes = [c for c in found if c.__module__ == errors.__name__]
    return {c.__name__: [base.__name__ for base in c.__bases__] for c in classes}


def test_drawing_is_the_real_tree() -> None:
    assert drawn_bases() == defined_bases()


def test_all_is_sorted_and_complete() -> None:
    assert errors.__all__ == sorted(errors.__all__)
    assert set(errors.__all__) == set(defined_bases())


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_documented_and_caught_by_the_base(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.ShardwiseError)
    assert error.__doc__
