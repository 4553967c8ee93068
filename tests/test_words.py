from tests.words import found


def test_words_are_found_over_the_end_of_a_line_and_in_comments() -> None:
    assert found("a\nit was told\n") == [(2, "told", found("told")[0][2])]
    assert [words for _, words, _ in found("# it lets\n# go of it")] == ["lets # go of"]


def test_parts_of_words_are_not() -> None:
    assert found("a commendation, a stoldier, hold upper") == []
