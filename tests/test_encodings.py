"""Text files are read and written in UTF-8: the locale of many hosts in Korea is EUC-KR."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = ("read_text", "write_text", "open", "fdopen")
"""What decodes in the locale's encoding if it is given none."""
BYTES = ("os.open", "tarfile.open", "Image.open", "page.open", "self.open")
SETTLED = {"rb", "r+b", "wb", "ab", "xb", "utf-8", "ascii"}


def in_the_locales_encoding(source: str) -> Iterator[int]:
    """The lines with such a call."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or (name := ast.unparse(call.func)) in BYTES:
            continue
        constants = {str(given.value) for given in call.args if isinstance(given, ast.Constant)}
        keywords = {keyword.arg for keyword in call.keywords}
        if (
            name.rpartition(".")[2] in TEXT
            and not constants & SETTLED
            and "encoding" not in keywords
        ):
            yield call.lineno


@pytest.mark.parametrize("folder", ["npu_agent", "tests", "bench", "docs", "packaging", "protos"])
def test_each_text_file_is_opened_with_its_encoding(folder: str) -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / folder).rglob("*.py")
        for line in in_the_locales_encoding(path.read_text(encoding="utf-8"))
    ]
    assert not lines, 'these need encoding="utf-8"'


@pytest.mark.parametrize(
    "source",
    ['open("a")', 'open("a", "w")', "path.read_text()", 'path.write_text("a")', 'path.open("r")'],
)
def test_a_missing_encoding_would_be_found(source: str) -> None:
    assert [*in_the_locales_encoding(source)] == [1]
