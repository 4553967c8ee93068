from tests.budgets import LONGEST, VAGUE, habits


def test_long_functions_shared_class_names_and_vague_locals_are_found() -> None:
    body = "    pass\n" * LONGEST
    sources = {
        "a.py": f"class Card: ...\ndef short():\n{body[9:]}async def long():\n{body}",
        "b.py": "class Other:\n    class Card: ...\n" + "one = 1\n" * (VAGUE["one"] + 1),
    }
    assert [line.split(":")[0] for line in habits(sources)] == [
        "a.py",
        "b.py",
        "`one` 41 times, at most 40",
    ]
