"""Exceptions with a message for a person, and the exit statuses of every distap process.

| status | name     | meaning                                          | start it again?         |
|--------|----------|--------------------------------------------------|-------------------------|
| 0      | FINISHED | all steps are done                               | nothing is left to do   |
| 1      | FAILED   | a crash, a lost or hung rank, a broken network   | yes, a few times        |
| 2      | MISTAKE  | a DistapError: a person must change the recipe,  | no, it would fail again |
|        |          | the data or the machine                          |                         |
| 75     | RESTART  | stopped on request, after a checkpoint of the    | yes, as often as needed |
|        |          | steps done if the grace time was long enough     |                         |
|        |          | (EX_TEMPFAIL of sysexits)                        |                         |
"""

import difflib
import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("distap")  # of the whole package
F = TypeVar("F", bound=Callable[..., Any])
FINISHED = 0
FAILED = 1
MISTAKE = 2
RESTART = 75
# Why numbers are not finite, or all descriptors become alike.
CAUSES = "too high a learning rate, or damaged weights"
# Descriptors are all alike if their mean squared distance to their mean is below this.
COLLAPSED = 1e-5
# Similarities tie if they differ by at most so many epsilons of the descriptors' type: equal ones
# are rounded differently in each tile.
TIE_WIDTH = 16
# Descriptors may differ from length 1 by this: bfloat16 rounds their length by up to 0.4%.
LENGTH_TOLERANCE = 0.02
# Expected values, by the beginning of the type of pydantic's error.
WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string_type": "text",
    "path": "a path",
    "tuple": "a list",
    "list": "a list",
    "dict": "keys with values",
    "model": "keys with values",
    "dataclass": "keys with values",
}
# The words of torch, oneDNN and the system when memory ran out: on a CPU the error has no class.
NO_MEMORY = (
    "DefaultCPUAllocator",
    "could not create a primitive",
    "annot allocate memory",
    "memory ran out",
)
# Characters of a message, and of a line of it. A message may repeat the text of a file, or list
# many files in as many lines.
LONGEST_MESSAGE = 2**17
LONGEST_LINE = 4000
# A place on another machine; pathlib makes one slash of two.
_PLACE = r"((?:(?:https?|s3|gs|gcs|ftp|hf):/|(?<![\w+.-])[A-Za-z][\w+.-]{0,30}://)/*+"
# The user of a URL, whose password may hold the signs that end a host; any query with a value,
# which may be a signature; and values of such names in a text that is no URL. Messages of ours
# write `...` for a user.
_USER = re.compile(
    rf"{_PLACE})(?!\.\.\.@|\[[0-9A-Fa-f:.]+\])(?:[^\s/?#:@\"]+:(?!\d+(?:[/?#\s]|$))[^\s\"'`]{{0,2000}}|[^\s/?#\"]{{0,2000}})@"
)
_QUERY = re.compile(rf"{_PLACE}[^\s?'\"`]{{0,1000}})\?[^\s'\"`]{{0,1000}}(?:=|%3D)[^\s'\"`]*")
_SECRETS = "signature|credential|token|secret|passwd|password|api_?key|accesskeyid"
_BEGINS = r"(?:(?<=[?&;#])|(?<=%3F)|(?<=%26))"  # of a name in a query
_SIGNED = re.compile(
    rf"{_BEGINS}((?:[\w.-]{{0,30}}(?:{_SECRETS})|sig|pwd)(?:=|%3D))[^\s&'\"`]+", re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """Remove the users and signatures of all URLs in a text that others will read."""
    return _SIGNED.sub(r"\1", _QUERY.sub(r"\1", _USER.sub(r"\1", text)))


def holds_secret(text: str) -> bool:
    """Return whether a text holds a URL with a user, a password or a signature."""
    return bool(_USER.search(text) or _SIGNED.search(text))


class DistapError(Exception):
    """A mistake that the user can mend.

    The message says what was wrong, where, what was expected and what to do. `code` names the
    problem for programs, such as `data.too_few_classes`: docs/reference/errors.md lists all codes.
    The commands print both without a traceback and exit with `status`. Secrets in the message are
    removed, and a very long text in it, such as that of a file, loses its middle.
    """

    status = MISTAKE
    is_on_all_ranks = False  # if so, only one rank of a host prints the error

    def __init__(self, code: str, message: object) -> None:
        super().__init__(code, _presentable(message))
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


class CollectiveError(DistapError):
    """The ranks can no longer work together: one is lost or hangs, or the network is broken.

    Nobody made a mistake, so starting again may help.
    """

    status = FAILED


class AnswerError(DistapError):
    """Raised if a server's answer is not acceptable; another attempt would not help."""


def _presentable(message: object) -> object:
    """Return a message without secrets and without the middle of very long texts."""
    if not isinstance(message, str):
        return message
    lines = without_secrets(_cut(message, LONGEST_MESSAGE)).split("\n")
    return "\n".join(_cut(line, LONGEST_LINE) for line in lines)


def _cut(text: str, length: int) -> str:
    """Replace the middle of a text longer than `length`, since its end says what to do."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]} [{len(text) - length:,} characters] {text[-half:]}"


def memory_ran_out(error: BaseException) -> bool:
    """Return whether Python, NumPy, torch, a GPU or the system raised this for lack of memory."""
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or any(text in str(error) for text in NO_MEMORY)


def first_cause(error: BaseException) -> BaseException:
    """Return the error at the end of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def suggestion(word: str, words: Collection[str]) -> str:
    """Return the end of a message about an unknown word: the closest of `words`, or all of them."""
    close = difflib.get_close_matches(word, words, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"expected one of {', '.join(words)}" if words else "it has none"


def problems_of(errors: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each wrong value of pydantic's errors: its keys, it, what was expected.

    Errors about one value of a union type are joined: `size: 'a': must be a number or 'auto'`.
    """
    problems: dict[str, str] = {}
    for problem in map(_problem_of, errors):
        value, _, expected = problem.partition(": must be ")
        earlier = problems.get(value)
        if not (expected and earlier):
            problems[value] = problem
        elif expected not in earlier:
            problems[value] = f"{earlier} or {expected}"
    return [*problems.values()]


def _problem_of(error: Mapping[str, Any]) -> str:
    place = ".".join(map(str, error["loc"]))
    kind = error["type"]
    value = error["input"]
    expected = str(error["msg"]).removeprefix("Value error, ")
    if kind.startswith("missing"):
        return f"{place}: missing; a value is needed"
    if not place or "unexpected" in kind or kind == "unknown_key":
        return f"{place}: {expected}".removeprefix(": ")

    wanted = [words for beginning, words in WANTED.items() if kind.startswith(beginning)]
    expected = f"must be {wanted[0]}" if wanted else expected.replace("Input should be", "must be")
    if kind == "literal_error" and isinstance(value, str):
        close = difflib.get_close_matches(value, expected.split("'")[1::2], n=1)
        expected += f"; did you mean {close[0]}?" if close else ""
    expected = expected[:1].lower() + expected[1:]

    # The keys are enough for a whole section: its value may be long, or secret.
    is_quoted = isinstance(value, str) and repr(value) in expected
    if is_quoted or isinstance(value, Mapping):
        return f"{place}: {expected}"
    return f"{place}: {value!r}: {expected}"


def checked(function: F) -> F:
    """Check the arguments of a public function by their annotations.

    A DistapError names each wrong argument.
    """
    # Imported here, since not every process checks arguments.
    from pydantic import ConfigDict, ValidationError, validate_call

    names = list(inspect.signature(function).parameters)
    validated = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return validated(*arguments, **keywords)
        except ValidationError as error:
            # pydantic calls an argument without keyword by its position.
            positions: dict[Any, str] = dict(enumerate(names))
            problems = problems_of(
                {**problem, "loc": [positions.get(key, key) for key in problem["loc"][:1]]}
                for problem in error.errors()
            )
            raise DistapError("recipe.value", "; ".join(problems)) from error
        except DistapError as error:
            # The function hands unknown keywords on, to a loss for example, which rejects them.
            # One may be a misspelt argument of the function itself.
            for keyword in keywords.keys() - set(names):
                for name in difflib.get_close_matches(keyword, names, n=1):
                    owner = function.__qualname__.split(".")[0]
                    raise DistapError(error.code, f"{error}; {owner} itself has {name}") from error
            raise

    return cast(F, call)


def tensor_given(value: Any, name: str) -> "Tensor":
    """Return a tensor of a caller's tensor, array, list of tensors or nested lists of numbers.

    Raises:
        DistapError: it is none of these; the message calls the argument `name`.
    """
    import numpy as np  # here, so that recipes can be read without them
    import torch

    if isinstance(value, torch.Tensor):
        return value
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if is_list and all(isinstance(item, torch.Tensor) for item in value):
        with suppress(RuntimeError):  # of different shapes
            return torch.stack(list(value))
    else:
        with suppress(TypeError, ValueError):
            # A copy, since torch takes neither reversed nor read-only arrays.
            return torch.from_numpy(np.array(value))

    kind = type(value).__name__
    if is_list:
        kind += f" of {len(value)} {type(value[0]).__name__}"
    hint = "; number them first (numpy.unique(labels, return_inverse=True)[1])"
    raise DistapError(
        "data.not_numbers",
        f"{name}: a {kind} makes no tensor of numbers{hint if name == 'labels' else ''}",
    )
