from tests.words import by_name, found, long_sentences, questions_in_code, questions_in_tables

LONG = " ".join(["word"] * 13)


def test_words_are_found_over_the_end_of_a_line_and_in_comments() -> None:
    assert [line for line, _ in found("a\nit was told\n")] == [2]
    assert [words for _, words in found("# it lets\n# go of it")] == [
        "'lets # go of': prefer release, drop, close"
    ]
    assert [
        line for line, _ in found("It is no error,\nthere is no error, and is no longer one.")
    ] == [1]


def test_parts_of_words_are_not() -> None:
    assert found("a commendation, a stoldier, hold upper") == []


def test_a_long_sentence_is_found_where_it_begins() -> None:
    page = f"# Page\n\nShort one. Begins\nhere {LONG},\n{LONG}.\n"
    [(line, what)] = long_sentences(page)
    assert line == 3
    assert what.startswith("a sentence of 28 words, at most 25: Begins here word word")


def test_sentences_end_with_items_cells_and_paragraphs() -> None:
    assert not long_sentences(f"- {LONG}\n- {LONG}\n\n{LONG}:\n\n1. {LONG}\n")
    assert not long_sentences(f"| {LONG} | {LONG} |\n|---|---|\n| {LONG} | e.g. {LONG} |\n")
    assert [line for line, _ in long_sentences(f"| a | b |\n|---|---|\n| {LONG} {LONG} | b |")] == [
        3
    ]


def test_code_and_addresses_are_not_sentences() -> None:
    assert not long_sentences(f"```sh\n{LONG} {LONG}\n```\n<!-- {LONG} {LONG} -->\n")
    assert not long_sentences(f"{LONG} `{LONG} {LONG}` [a page](docs/{LONG} {LONG}.md).")


def test_a_question_is_no_remedy() -> None:
    table = "| text | what to do |\n|---|---|\n| who? | look |\n| a | is it there? |\n"
    assert [line for line, _ in questions_in_tables(table)] == [4]
    code = 'Note("did you mean a?",\n    remedy="do it" if a else f"{b}: is it there?")'
    assert [line for line, _ in questions_in_code(code)] == [2]


def test_a_package_that_is_not_registered_is_never_named_for_an_installation() -> None:
    for command in (
        "pipx install npu-agent",
        "pip install -U 'npu-agent[kubectl]'",
        "uvx npu-agent",
    ):
        assert [line for line, _ in by_name(f"\nRun `{command}`.")] == [2], command
    for command in (
        "pipx install .",
        "pipx install '.[kubectl]'",
        "helm install npu-agent k8s/chart",
    ):
        assert not by_name(command)
    assert not by_name("pipx install dist/npu_agent-0.1.0-py3-none-any.whl, or uv tool install")
