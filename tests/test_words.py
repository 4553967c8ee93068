from tests.words import found, long_sentences

LONG = " ".join(["word"] * 13)


def test_words_are_found_over_the_end_of_a_line_and_in_comments() -> None:
    assert [line for line, _ in found("a\nit was told\n")] == [2]
    assert [words for _, words in found("# it lets\n# go of it")] == [
        "'lets # go of': prefer release, drop, block, delay"
    ]


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
