from tests.words import INSTALL, found, long_sentences

LONG = " ".join(["word"] * 13)


def test_words_are_found_over_the_end_of_a_line_and_in_comments() -> None:
    assert [line for line, _ in found("a\nit was told\n")] == [2]
    assert [words for _, words in found("# it lets\n# go of it")] == [
        "'lets # go of': prefer release, drop, block, delay"
    ]


def test_parts_of_words_are_not() -> None:
    assert found("a commendation, a stoldier, hold upper") == []


def test_a_long_sentence_is_found_where_it_begins() -> None:
    page = f"# Page\n\nShort one. Begins\nhere {LONG},\n{LONG}.\n"
    [(line, what)] = long_sentences(page)
    assert line == 3
    assert what.startswith("28 words, at most 25: Begins here word word")


def test_sentences_end_with_items_cells_and_paragraphs() -> None:
    assert not long_sentences(f"- {LONG}\n- {LONG}\n\n{LONG}:\n\n1. {LONG}\n")
    assert not long_sentences(f"| {LONG} | {LONG} |\n|---|---|\n| {LONG} | e.g. {LONG} |\n")
    assert [line for line, _ in long_sentences(f"| a | b |\n|---|---|\n| {LONG} {LONG} | b |")] == [
        3
    ]


def test_code_and_addresses_are_not_sentences() -> None:
    assert not long_sentences(f"```sh\n{LONG} {LONG}\n```\n<!-- {LONG} {LONG} -->\n")
    assert not long_sentences(f"{LONG} `{LONG} {LONG}` [a page](docs/{LONG} {LONG}.md).")


def test_a_package_that_is_not_registered_is_never_named_for_an_installation() -> None:
    for command in (
        "pipx install npu-agent",
        "pip install -U 'npu-agent[kubectl]'",
        "uvx npu-agent",
    ):
        assert [line for line, _ in found(f"\nRun `{command}`.", INSTALL)] == [2], command
    for command in (
        "pipx install .",
        "pipx install '.[kubectl]'",
        "helm install npu-agent k8s/chart",
    ):
        assert not found(command, INSTALL)
    assert not found(
        "pipx install dist/npu_agent-0.1.0-py3-none-any.whl, or uv tool install", INSTALL
    )
