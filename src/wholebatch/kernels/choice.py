"""The choices between kernels and plain PyTorch that the ranks have made, each at the first call of its form.

A form is what decides which kernels a call starts, and about how long it takes: the loss, the dtype and number of the
features, the kinds of its pairs, and the class of its size, which is the power of two of the entries of S that a rank
computes. Ranks make each choice together, in a handshake. Kernels are chosen by time; `kernel="torch"` or
`kernel="triton"` fixes the choice.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from zlib import crc32

from .._base.warnings import warn as warn_user

_LOG = logging.getLogger("wholebatch")


@dataclass(frozen=True)
class Choice:
    """The choice for one form of call.

    Attributes:
        call: the loss.
        form: its form, for people.
        in_kernels: whether kernels compute its tiles.
        why: why they do not; "" if they do.
        kernels: the kernels that were checked and gave the right results; the names of those that load features by
            pointers, not by tensor descriptors, end in "_by_pointers".
        milliseconds: of a sweep in kernels and in plain PyTorch, by the slowest rank; None: not measured.
        failed: whether a kernel failed its check.
        cached: whether this rank found kernels and times in a file of an earlier run (see `kernels.verdicts`).
    """

    call: str
    form: str
    in_kernels: bool
    why: str = ""
    kernels: tuple[str, ...] = ()
    milliseconds: tuple[float, float] | None = None
    failed: bool = False
    cached: bool = False

    def __str__(self) -> str:
        times = ""
        if self.milliseconds is not None:
            times = "; {:.3g} ms in kernels, {:.3g} ms in PyTorch".format(*self.milliseconds)
        computed_by = "kernels" if self.in_kernels else f"PyTorch ({self.why})"
        return f"{self.call}, {self.form}: {computed_by}{times}{'; from an earlier run' if self.cached else ''}"


_made: dict[str | None, dict[Hashable, Choice]] = {}  # by group
_digests: dict[str | None, int] = {}  # of a group's choices
_warned: set[str] = set()
_off: list[str] = []  # why kernels were switched off in this process


def choices() -> list[Choice]:
    """Return the choices of this process so far, in the order in which they were made."""
    return [choice for group_choices in _made.values() for choice in group_choices.values()]


def found(group: str | None, form: Hashable) -> Choice | None:
    """Return the choice of a group's ranks for a form; None if they have not made it."""
    return _made.get(group, {}).get(form)


def digest(group: str | None) -> int:
    """Return a number that ranks have in common if they have made the same choices as a group, in the same order."""
    return _digests.get(group, 0) if group in _made else 0


def forget(group: str | None) -> None:
    """Forget the choices of a group's ranks, so that they make them again."""
    _made.pop(group, None)


def note(group: str | None, form: Hashable, choice: Choice, *, reports: bool) -> None:
    """Note a choice; the rank that reports logs it, and warns, once for each reason, where kernels cannot be used.

    A form consists of numbers and texts, whose representation is the same in every process.
    """
    before = digest(group)
    _made.setdefault(group, {})[form] = choice
    _digests[group] = crc32(repr((form, choice.in_kernels)).encode(), before)
    if not reports:
        return
    _LOG.info("%s", choice)
    if choice.failed:
        warn(choice.why)


def warn(why: str) -> None:
    """Warn that plain PyTorch computes instead of kernels, once in a process for each reason."""
    if why in _warned:
        return
    _warned.add(why)
    warn_user(
        f"wholebatch computes in plain PyTorch, without its kernels: {why}. Results are right, and take longer. Please "
        "report this with the output of `wholebatch doctor`; kernel='torch' does without kernels and this warning"
    )


def switch_off(why: str) -> None:
    """Do without kernels in this process from now on."""
    _off.append(why)
    _made.clear()


def switched_off() -> str | None:
    """Return why kernels were switched off; None if they were not."""
    return _off[0] if _off else None
