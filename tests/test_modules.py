"""The rules of tests/README.md for the modules of the tests."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
IMPORT = re.compile(r"^\s*(?:from|import) tests\.(?:\w+\.)*(test_\w+)", re.MULTILINE)


def test_no_test_module_imports_another() -> None:
    found = {
        str(path.relative_to(TESTS)): names
        for path in sorted(TESTS.rglob("*.py"))
        if (names := IMPORT.findall(path.read_text(encoding="utf-8")))
    }
    assert found == {}
