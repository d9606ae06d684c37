"""Errors: their codes, their texts, and the arguments that they name."""

import pickle
import re
from collections import defaultdict

import pytest

from distap.errors import CollectiveError, DistapError, checked
from docs.error_codes import AREAS, made_errors

MADE = made_errors()


@pytest.mark.parametrize("package", ["distap", "benchmarks"])
def test_every_error_has_a_code(package):
    assert [str(error) for error in made_errors(package) if error.code is None] == []


@pytest.mark.parametrize("package", ["distap", "benchmarks"])
def test_every_code_is_a_problem_of_a_known_area(package):
    code = re.compile(rf"({'|'.join(AREAS)})\.[a-z0-9_]+")
    wrong = [error for error in made_errors(package) if not code.fullmatch(error.code or "")]
    assert [str(error) for error in wrong] == []


def stems(text: str) -> set[str]:
    """The beginnings of the longer words of a message, without its {placeholders}."""
    return {word[:4] for word in re.findall(r"[a-z]{4,}", re.sub(r"\{[^}]*\}", " ", text.lower()))}


def test_one_code_has_not_two_unrelated_messages():
    """Messages of different rooms share a word with each other, or with the words of the code.

    Messages of one room are one author's; those made of placeholders alone cannot be compared.
    """
    rooms = defaultdict(lambda: defaultdict(set))
    for error in MADE:
        if stems(error.message):
            rooms[error.code][error.path.parts[1]] |= stems(error.message)
    unrelated = [
        (code, room)
        for code, words in rooms.items()
        for room in words
        if len(words) > 1
        and not words[room] & stems(code).union(*(words[other] for other in words if other != room))
    ]
    assert unrelated == []


@pytest.mark.parametrize("kind", [DistapError, CollectiveError])
def test_an_error_keeps_code_and_message_when_it_is_pickled(kind):
    error = pickle.loads(pickle.dumps(kind("data.too_few", "3 images: expected 4")))
    assert (type(error), error.code, str(error)) == (kind, "data.too_few", "3 images: expected 4")


@checked
def shrink(size: int, factor: float = 2.0) -> float:
    return size / factor


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        (("large",), {}, ["size", "'large'", "a whole number"]),
        ((), {}, ["size", "missing"]),
        ((8, 2.0, 1), {}, ["2", "positional"]),
        ((8,), {"factr": 1.0}, ["factr"]),
    ],
)
def test_a_wrong_argument_is_named(arguments, keywords, words):
    with pytest.raises(DistapError) as raised:
        shrink(*arguments, **keywords)
    assert raised.value.code == "recipe.value"
    assert [word for word in words if word not in str(raised.value)] == []
