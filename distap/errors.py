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
# of numbers that are not finite, and of a collapse
CAUSES = "too high a learning rate, or damaged weights"
# mean squared distance of descriptors to their mean, below which they are all alike
COLLAPSED = 1e-5
# Epsilons of the descriptors' type up to which similarities tie: rounding parts equal ones, in each
# tile otherwise.
TIE_WIDTH = 16
LENGTH_TOLERANCE = 0.02  # of descriptors: bfloat16 rounds their length by up to 0.4%
# Expected values, by the beginning of the type of pydantic's error.
WANTED = {
    **{"int": "a whole number", "float": "a number", "bool": "true or false"},
    **{"string_type": "text", "path": "a path"},
    **dict.fromkeys(("tuple", "list"), "a list"),
    **dict.fromkeys(("dict", "model", "dataclass"), "keys with values"),
}
# What torch, oneDNN and the system say when memory ran out, for which the CPU has no class of
# error.
NO_MEMORY = (
    "DefaultCPUAllocator",
    "could not create a primitive",
    "annot allocate memory",
    "memory ran out",
)
# Characters of an error and of a line of it, which may repeat what a file holds; a list of many
# files has many lines.
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
    """Tell whether a text names a place with a user, a password or a signature."""
    return bool(_USER.search(text) or _SIGNED.search(text))


class DistapError(Exception):
    """A mistake that the user can mend: the text says what was wrong, where, what was expected and
    what to do.

    The commands print it without a traceback and exit with `status`. Secrets in it are replaced,
    and of a long text, such as one that repeats a file, the middle is left out.
    """

    status = MISTAKE
    is_on_all_ranks = False  # so that one rank of a host tells it

    def __init__(self, code: str, message: object = None) -> None:
        if message is None:  # for as long as some places give no code
            code, message = "", code
        super().__init__(code, _told(message))
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


class CollectiveError(DistapError):
    """Raised when ranks can no longer work together: one is lost, hangs or never came, or the
    network is broken.

    Nobody made a mistake, so starting again may help.
    """

    status = FAILED


def _told(part: object) -> object:
    """Return a part of an error as it is told: without secrets, and not as long as the file that it
    repeats.
    """
    if not isinstance(part, str):
        return part
    lines = without_secrets(_cut(part, LONGEST_MESSAGE)).split("\n")
    return "\n".join(_cut(line, LONGEST_LINE) for line in lines)


def _cut(text: str, most: int) -> str:
    """Leave the middle of a long text out: its end says what to do."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [{len(text) - most:,} characters] {text[-most // 2 :]}"


def memory_ran_out(error: BaseException) -> bool:
    """Tell whether an error of Python, NumPy, torch, a GPU or the system says that memory ran
    out."""
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or any(text in str(error) for text in NO_MEMORY)


def suggestion(word: str, known: Collection[str]) -> str:
    """End a message about an unknown word: 'did you mean', or the known words."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"expected one of {', '.join(known)}" if known else "it has none"


def problems_of(errors: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say in one line for each wrong value its keys, the value, and what pydantic expected.

    Pydantic's errors about one value of a union type are joined: `size: 'a': must be a number or
    'auto'`.
    """
    found: dict[str, str] = {}
    for told in map(_problem_of, errors):
        start, _, wanted = told.partition(": must be ")
        known = found.get(start, "")
        found[start] = (
            (known if wanted in known else f"{known} or {wanted}") if wanted and known else told
        )
    return [*found.values()]


def _problem_of(error: Mapping[str, Any]) -> str:
    where = ".".join(map(str, error["loc"]))
    kind = error["type"]
    expected = str(error["msg"]).removeprefix("Value error, ")
    if kind == "missing":
        return f"{where}: missing; a value is needed"
    if not where or "unexpected" in kind or kind == "unknown_key":
        return f"{where}: {expected}".removeprefix(": ")
    wanted = [wanted for start, wanted in WANTED.items() if kind.startswith(start)]
    expected = f"must be {wanted[0]}" if wanted else expected.replace("Input should be", "must be")
    if kind == "literal_error" and isinstance(error["input"], str):
        close = difflib.get_close_matches(error["input"], expected.split("'")[1::2], n=1)
        expected += f"; did you mean {close[0]}?" if close else ""
    # For a whole section the message names the key; its value may be long, or secret.
    is_told = isinstance(error["input"], str) and repr(error["input"]) in expected
    value = "" if is_told or isinstance(error["input"], Mapping) else f"{error['input']!r}: "
    return f"{where}: {value}{expected[:1].lower()}{expected[1:]}"


def checked(function: F) -> F:
    """Check the arguments of a public function by their annotations; a DistapError names each wrong
    one.
    """
    # here, since not every process checks arguments
    from pydantic import ConfigDict, ValidationError, validate_call

    names = list(inspect.signature(function).parameters)
    validated = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return validated(*given, **named)
        except ValidationError as error:
            places = [item["loc"][0] for item in error.errors()]
            keys = [names[at] if isinstance(at, int) else at for at in places]
            wrong = [
                {**item, "loc": (key,)} for item, key in zip(error.errors(), keys, strict=True)
            ]
            raise DistapError("; ".join(problems_of(wrong))) from error
        except (
            DistapError
        ) as error:  # of an option that the function hands on, such as one of a loss
            near = [
                one
                for key in named.keys() - set(names)
                for one in difflib.get_close_matches(key, names, n=1)
            ]
            if not near:
                raise
            raise DistapError(
                f"{error}; {function.__qualname__.split('.')[0]} itself has {near[0]}"
            ) from error

    return cast(F, call)


def tensor_given(value: Any, name: str) -> "Tensor":
    """Convert to a tensor what a caller gave: a tensor, an array, numbers in lists, or a list of
    tensors.

    Raises:
        DistapError: it is none of these; messages call the argument `name`.
    """
    import numpy as np  # here, so that recipes can be read without them
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(one, torch.Tensor) for one in value)
    ):
        with suppress(RuntimeError):  # of different shapes
            return torch.stack(list(value))
    else:
        with suppress(TypeError, ValueError):
            # a copy, since torch takes neither reversed nor read-only ones
            return torch.from_numpy(np.array(value))
    kind = f"a {type(value).__name__}"
    if isinstance(value, list | tuple) and value:
        kind += f" of {len(value)} {type(value[0]).__name__}"
    number = (
        "; number them first (numpy.unique(labels, return_inverse=True)[1])"
        if name == "labels"
        else ""
    )
    raise DistapError(f"{name}: {kind} makes no tensor of numbers{number}")
