"""`npu-agent completion`: scripts by which shells complete our commands, options and values.

They are written from the parsers themselves, and ask npu-agent nothing while somebody types.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from npu_agent.commands.catalogue import COMMANDS, GROUPS, below, group, top
from npu_agent.commands.parser import Parser

_FILE, _DIRECTORY = "FILE", "DIR"
_WORDS = re.compile(r"\{(.+)\}|([a-z]+(?:\|[a-z]+)+)")
_LONGEST = 70


@dataclass(frozen=True, slots=True)
class Value:
    """What an argument, or an option's value, may be."""

    words: tuple[str, ...] = ()
    files: bool = False
    directories: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """An option; its value is None where it takes none."""

    names: tuple[str, ...]
    about: str
    value: Value | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where one may be in a command line: behind a command, or before any ("")."""

    name: str
    commands: tuple[tuple[str, str], ...]
    """Those that may follow, each with a few words."""
    arguments: tuple[Value, ...]
    options: tuple[Option, ...]

    @property
    def argument(self) -> Value:
        """What any of its arguments may be."""
        return Value(
            tuple(word for each in self.arguments for word in each.words),
            any(each.files for each in self.arguments),
            any(each.directories for each in self.arguments),
        )


def main(args: argparse.Namespace) -> int:
    """Prints the script for `args.shell`."""
    print("\n".join(script(args.shell)))
    return 0


def script(shell: str) -> Iterator[str]:
    """The lines of the script."""
    shells: dict[str, Callable[[list[Place]], Iterator[str]]]
    shells = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    yield from shells[shell](places())


def places() -> list[Place]:
    """All of them."""
    return [
        _place("", top(), below("")),
        *(_place(name, group(name), below(name)) for name in GROUPS),
        *(_place(name, command.parser(), {}) for name, command in COMMANDS.items()),
    ]


def _place(name: str, parser: Parser, commands: dict[str, str]) -> Place:
    actions = [action for section in parser.sections for action in section.actions]
    return Place(
        name,
        tuple(commands.items()),
        tuple(_value(action) for action in actions if not action.option_strings),
        tuple(
            Option(
                tuple(action.option_strings),
                _short(action.help or ""),
                None if action.nargs == 0 else _value(action),
            )
            for action in actions
            if action.option_strings
        ),
    )


def _value(action: argparse.Action) -> Value:
    """As the help calls it: `{a,b}` and `a|b` are words, FILE and DIR are what they say."""
    called = str(action.metavar or "")
    if found := _WORDS.match(called):
        return Value(tuple(re.split("[,|]", found[1] or found[2])))
    return Value(files=called == _FILE, directories=called in (_DIRECTORY, "ROOT"))


def _short(text: str) -> str:
    """The first sentence, in one line of a list."""
    first = re.split(r"\. |; |: ", text)[0].rstrip(".")
    return first if len(first) <= _LONGEST else f"{first[: _LONGEST - 1]}…"


def _quoted(text: str) -> str:
    """For bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _names(places: list[Place]) -> str:
    """A pattern of `case`: what has been found of a command, and the word that continues it."""
    known = ((place.name, word) for place in places for word, _ in place.commands)
    return " | ".join(f"'{name} {word}'" for name, word in known)


def _with_value(places: list[Place]) -> list[str]:
    """The names of the options that take a value."""
    return [name for names in _values(places) for name in names]


def _values(places: list[Place]) -> dict[tuple[str, ...], Value]:
    """The options with a value, by their names; one name means the same everywhere."""
    found = {}
    for place in places:
        for option in place.options:
            if option.value is not None:
                found[option.names] = option.value
    return found


def _bash(places: list[Place]) -> Iterator[str]:
    yield from (
        "# bash completion for npu-agent; made by `npu-agent completion bash`",
        "_npu_agent() {",
        "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}",
        "    local command= words= i",
        "    # bash takes --option=value apart.",
        "    if [[ $cur == = ]]; then",
        "        cur=",
        "    elif [[ $prev == = ]]; then",
        "        prev=${COMP_WORDS[COMP_CWORD - 2]}",
        "    fi",
        "    for ((i = 1; i < COMP_CWORD; i++)); do",
        "        case ${COMP_WORDS[i]} in",
        f"            {' | '.join(_with_value(places))})",
        "                # What follows is its value, and no command.",
        "                ((i++))",
        "                [[ ${COMP_WORDS[i]} == = ]] && ((i++))",
        "                continue ;;",
        "        esac",
        '        case "$command ${COMP_WORDS[i]}" in',
        f"            {_names(places)}) command=${{command:+$command }}${{COMP_WORDS[i]}} ;;",
        "        esac",
        "    done",
        "    COMPREPLY=()",
        "    case $prev in",
    )
    for names, value in _values(places).items():
        yield f"        {' | '.join(names)}) {_bash_value(value)}; return ;;"
    yield "    esac"
    yield "    case $command in"
    for place in places:
        words = [word for word, _ in place.commands] + list(place.argument.words)
        options = [name for option in place.options for name in option.names]
        yield f"        '{place.name}')"
        yield f"            words={_quoted(' '.join(words))}"
        yield f"            [[ $cur == -* ]] && words={_quoted(' '.join(options))}"
        if place.argument.files or place.argument.directories:
            files = _bash_value(Value((), place.argument.files, place.argument.directories))
            yield f"            [[ $cur == -* ]] || {{ {files}; }}"
        yield "            ;;"
    yield from (
        "    esac",
        '    COMPREPLY+=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -F _npu_agent npu-agent",
    )


def _bash_value(value: Value) -> str:
    if value.words:
        return f'COMPREPLY=($(compgen -W {_quoted(" ".join(value.words))} -- "$cur"))'
    if value.files or value.directories:
        kind = "f" if value.files else "d"
        return f'compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -{kind} -- "$cur"))'
    return "true"


def _zsh(places: list[Place]) -> Iterator[str]:
    yield from (
        "#compdef npu-agent",
        "# zsh completion for npu-agent; made by `npu-agent completion zsh`",
        "_npu_agent() {",
        "    local command= word value=",
        "    local -a found",
        '    for word in "${(@)words[2,CURRENT-1]}"; do',
        "        # What follows an option that takes a value is no command.",
        "        if [[ -n $value ]]; then value=; continue; fi",
        "        case $word in",
        f"            ({' | '.join(_with_value(places))}) value=1; continue ;;",
        "        esac",
        '        case "$command $word" in',
        f"            ({_names(places)})",
        "                command=${command:+$command }$word ;;",
        "        esac",
        "    done",
        "    if [[ $PREFIX == --*=* ]]; then",
        "        word=${PREFIX%%=*}",
        "        compset -P '*='",
        "    else",
        "        word=${words[CURRENT-1]}",
        "    fi",
        "    case $word in",
    )
    for names, value in _values(places).items():
        yield f"        ({'|'.join(names)}) {_zsh_value(value)}; return ;;"
    yield "    esac"
    yield "    case $command in"
    for place in places:
        yield f"        ('{place.name}')"
        options = " ".join(
            _quoted(f"{name}:{option.about}") for option in place.options for name in option.names
        )
        yield f"            if [[ $PREFIX == -* ]]; then found=({options})"
        yield "                _describe -o option found; return; fi"
        if place.commands:
            words = " ".join(_quoted(f"{word}:{about}") for word, about in place.commands)
            yield f"            found=({words}); _describe command found"
        for value in place.arguments:
            if value != Value():
                yield f"            {_zsh_value(value)}"
        yield "            ;;"
    yield from (
        "    esac",
        "}",
        "# In a directory of fpath this file is the function itself; else it is sourced.",
        "if [[ $funcstack[1] == _npu-agent ]]; then",
        '    _npu_agent "$@"',
        "else",
        "    compdef _npu_agent npu-agent",
        "fi",
    )


def _zsh_value(value: Value) -> str:
    if value.words:
        return f"compadd -- {' '.join(value.words)}"
    if value.files:
        return "_files"
    return "_files -/" if value.directories else "true"


def _fish(places: list[Place]) -> Iterator[str]:
    known = ((place.name, word) for place in places for word, _ in place.commands)
    yield from (
        "# fish completion for npu-agent; made by `npu-agent completion fish`",
        "function __npu_agent_at",
        "    set -l found ''",
        "    set -l value",
        "    for word in (commandline -opc)[2..-1]",
        "        # What follows an option that takes a value is no command.",
        "        if set -q value[1]",
        "            set value",
        "            continue",
        "        end",
        "        switch $word",
        f"            case {' '.join(_with_value(places))}",
        "                set value 1",
        "                continue",
        "        end",
        '        switch "$found $word"',
        f"            case {' '.join(_fish_quoted(f'{name} {word}') for name, word in known)}",
        '                set found (string trim -- "$found $word")',
        "        end",
        "    end",
        '    test "$found" = "$argv"',
        "end",
        "complete -c npu-agent -f",
    )
    for place in places:
        here = f"complete -c npu-agent -n '__npu_agent_at {place.name}'"
        for word, about in place.commands:
            yield f"{here} -a {word} -d {_fish_quoted(about)}"
        for value in place.arguments:
            if value != Value():
                yield f"{here} {_fish_value(value)}"
        for option in place.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            takes = "" if option.value is None else f" {_fish_value(option.value, ' -x')}"
            yield f"{here} {names}{takes} -d {_fish_quoted(option.about)}"


def _fish_value(value: Value, only: str = "") -> str:
    """`only` is what says that nothing else may stand there: for the value of an option."""
    if value.files:
        return "-rF" if only else "-F"
    if value.words:
        only += f" -a {_fish_quoted(' '.join(value.words))}"
    elif value.directories:
        only += " -a '(__fish_complete_directories)'"
    return only.strip()


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
