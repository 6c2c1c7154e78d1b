"""Bad inputs: every argument of everything public, replaced by a value that few arguments accept.

    python tests/faults/inputs.py --seed 0 --count 10000 [--json OUT] [--only NAME] [--jax]

A case replaces one or two arguments of a right call, which is found from the signature, by values of a pool.
Outcomes:

    refused                 ValueError or TypeError, or what the function documents
    accepted                it returns, and each replaced argument is known to be legal (inputs_legal)
    accepted, not reviewed  it returns, and the value is not listed as legal                  (forbidden)
    accepted, not a number  a loss that returns NaN                                           (forbidden)
    refused by accident     an error that Python or torch raised inside; its text does not concern the argument
    other exception         neither ValueError nor TypeError, and not documented              (forbidden)
    warning, hang, no right call                                                              (forbidden)
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import io
import json
import os
import random
import re
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from inputs_calls import SLOW, Entry, UserFunctionError, entries, scratch
from inputs_legal import DOCUMENTED, USERS_OWN, is_legal
from inputs_pool import POOL

FORBIDDEN = (
    "accepted, not reviewed",
    "accepted, not a number",
    "refused by accident",
    "other exception",
    "warning",
    "hang",
    "no right call",
)
_SECONDS = 30  # for one case
_BYTES = 12 * 2**30  # of address space: arguments that need more must have been refused
_ACCIDENT = re.compile(r"(?:^|: )(?!OSError)(?:[A-Z]\w*(?:Error|Exception)): ")


class HangError(BaseException):
    """A case that takes too long."""


@dataclass(frozen=True)
class Case:
    """A call with nonsense among its arguments: {parameter: name of a value of the pool}."""

    entry: str
    replaced: dict[str, str]

    def __str__(self) -> str:
        return f"{self.entry}({', '.join(f'{name}={kind}' for name, kind in self.replaced.items())})"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case."""

    case: Case
    what: str
    text: str = ""


def cases(rng: random.Random, known: Sequence[Entry], count: int) -> Iterator[Case]:
    """Yield random cases."""
    weights = [0.01 if entry.name in SLOW else 1.0 + len(entry.parameters) / 4 for entry in known]
    with_arguments = [entry for entry in known if entry.parameters]
    weights = [weight for weight, entry in zip(weights, known, strict=True) if entry.parameters]
    for _ in range(count):
        entry = rng.choices(with_arguments, weights)[0]
        names = rng.sample([*entry.parameters], min(rng.choice((1, 1, 1, 2)), len(entry.parameters)))
        yield Case(entry.name, {name: rng.choice([*POOL]) for name in names})


def all_cases(known: Sequence[Entry]) -> Iterator[Case]:
    """Yield every value of the pool for every argument, one at a time; for slow calls, only values to be refused."""
    for entry in known:
        for name in entry.parameters:
            for kind in POOL:
                if entry.name not in SLOW or not is_legal(entry, name, kind):
                    yield Case(entry.name, {name: kind})


def run(entry: Entry, case: Case) -> Outcome:
    """Make the call."""
    arguments = entry.right_arguments()
    for name, kind in case.replaced.items():
        value = POOL[kind]()
        parameter = entry.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            value = (value, *arguments.get(name, ())[1:])
        elif parameter.kind is parameter.VAR_KEYWORD:
            value = {"nonsense": value}
        arguments[name] = value
    with warnings.catch_warnings(record=True) as warned, _within(_SECONDS), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        try:
            found = entry.call(arguments)
        except HangError:
            return Outcome(case, "hang", f"after {_SECONDS} s")
        except (ValueError, TypeError) as error:
            users = any((entry.name, name) in USERS_OWN for name in case.replaced)
            outcome = Outcome(case, "refused" if users else _how_refused(error), _text(error))
        except DOCUMENTED.get(entry.name, ()) as error:
            outcome = Outcome(case, "refused", _text(error))
        except Exception as error:
            if entry.module.endswith(".reference"):
                return Outcome(case, "refused by torch (reference)", _text(error))
            outcome = Outcome(case, "other exception", _text(error) + _place(error))
        else:
            new = [name for name, kind in case.replaced.items() if not is_legal(entry, name, kind)]
            if entry.module.endswith(".reference"):
                outcome = Outcome(case, "accepted (reference)")
            elif entry.name.lower().replace(".forward", "").endswith("loss") and has_nan(found):
                outcome = Outcome(case, "accepted, not a number")
            else:
                outcome = Outcome(case, "accepted, not reviewed" if new else "accepted")
    if warned and not entry.module.endswith(".reference"):
        return Outcome(case, "warning", f"{warned[0].category.__name__}: {warned[0].message}")
    if outcome.what == "refused by accident" and entry.module.endswith(".reference"):
        return Outcome(case, "refused by torch (reference)", outcome.text)
    return outcome


def has_nan(found: Any) -> bool:
    """Return whether a tensor among the results of a loss has an entry that is NaN."""
    if isinstance(found, torch.Tensor):
        return bool(found.isnan().any())
    return isinstance(found, tuple) and any(map(has_nan, found))


def _how_refused(error: Exception) -> str:
    """Classify a refusal: by a `raise` of the library, or by an accidental error inside."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = "wholebatch" in frame.filename and "raise " in (frame.line or "")
    signature = "argument" in _text(error) and isinstance(error, TypeError)  # Python's: missing or unknown
    of_torch = "/torch/optim/" in frame.filename or "/torch/nn/modules/" in frame.filename
    if not (ours or signature or of_torch) or (
        _ACCIDENT.search(_text(error).partition(": ")[2]) and UserFunctionError.__name__ not in _text(error)
    ):
        return "refused by accident"
    return "refused"


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # a number with too many digits for Python to print
        return type(error).__name__


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "src/wholebatch" in frame.filename]
    return "".join(f" < {Path(frame.filename).name}:{frame.lineno}" for frame in reversed(ours[-3:]))


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    def late(_number: int, _frame: Any) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def campaign(seed: int, count: int | None, *, known: Sequence[Entry] | None = None, only: str = "") -> list[Outcome]:
    """Make every right call once, then return the outcomes of random cases, or of all cases if `count` is None."""
    known = [*entries()] if known is None else [*known]
    known = [entry for entry in known if only in entry.name]
    outcomes, right = [], []
    torch.manual_seed(seed)
    for entry in known:
        try:
            if entry.name not in SLOW:
                entry.call(entry.right_arguments())
            right.append(entry)
        except Exception as error:
            text = _text(error) + _place(error)
            outcomes.append(Outcome(Case(entry.name, {}), "no right call", text))
    by_name = {entry.name: entry for entry in right}
    for case in all_cases(right) if count is None else cases(random.Random(seed), right, count):
        faulthandler.dump_traceback_later(4 * _SECONDS, exit=True)  # for cases that no signal can end
        outcomes.append(run(by_name[case.entry], case))
    faulthandler.cancel_dump_traceback_later()
    return outcomes


def report(outcomes: Sequence[Outcome], seed: int, *, most: int = 400) -> int:
    """Print the classes, and the cases of forbidden ones; return the exit code."""
    classes = collections.Counter(outcome.what for outcome in outcomes)
    print(f"seed {seed}: {len(outcomes)} cases")
    for what, count in sorted(classes.items(), key=lambda item: -item[1]):
        print(f"  {count:6d}  {what}{'   (forbidden)' if what in FORBIDDEN else ''}")
    wrong = [outcome for outcome in outcomes if outcome.what in FORBIDDEN]
    for outcome in sorted(wrong, key=lambda outcome: (outcome.what, str(outcome.case)))[:most]:
        print(f"{outcome.what}: {outcome.case}\n      {outcome.text[:300]}".rstrip())
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--all", action="store_true", help="each value for each argument, once")
    parser.add_argument("--only", default="", help="names of entries that contain this")
    parser.add_argument("--jax", action="store_true", help="wholebatch.jax instead of everything else")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    known = None
    if options.jax:
        import inputs_jax

        known = [*entries([inputs_jax.module()])]
    out = options.json and options.json.absolute()
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    torch.set_num_threads(1)
    os.chdir(scratch())  # some values of the pool are valid names of folders
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    outcomes = campaign(options.seed, None if options.all else options.count, known=known, only=options.only)
    code = report(outcomes, options.seed)
    if out:
        rows = [{"call": str(o.case), "outcome": o.what, "text": o.text[:1000]} for o in outcomes]
        out.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
