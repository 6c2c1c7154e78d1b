"""Kernels and host calls of one loss, forward and backward, as text: `make gpu-profile LOSS=clip B=8192`.

The kernels come from torch's profiler: name, count and time. So do the host's operations. Python's calls are what its
own profiling hook sees, in all threads. Each is of one step after three that warm up.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .device import GPU, ROOT, about, name_of
from .libraries import libraries
from .peers import Shape, step_of

_LINES = 60  # of each table


def note(found: Counter[str], frame: FrameType, event: str, argument: Any) -> None:
    """Count an event of Python's profiling hook, if it is a call."""
    if event == "call":
        code = frame.f_code
        found[f"{frame.f_globals.get('__name__')}.{getattr(code, 'co_qualname', code.co_name)}"] += 1
    elif event == "c_call":
        found[f"built-in {getattr(argument, '__qualname__', argument)}"] += 1


def python_calls(call: Callable[[], object]) -> Counter[str]:
    """Return how often each Python function and built-in function was called, in all threads."""
    found: Counter[str] = Counter()
    hook, before = partial(note, found), sys.getprofile()
    threading.setprofile(hook)  # threads that a call starts
    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    return found


def table(title: str, rows: Iterable[tuple[str, int, float]]) -> list[str]:
    """Return lines of names, counts and microseconds, those that took longest first."""
    rows = sorted(rows, key=lambda row: (-row[2], -row[1], row[0]))
    count, total = sum(row[1] for row in rows), sum(row[2] for row in rows)
    lines = ["", f"{title}: {count}" + (f", {total / 1000:.3f} ms" if total else ""), f"{'count':>7} {'us':>10}  name"]
    lines += [f"{number:7} {f'{us:.1f}' if us else '':>10}  {name[:140]}" for name, number, us in rows[:_LINES]]
    return lines + ([f"... and {len(rows) - _LINES} more names"] if len(rows) > _LINES else [])


def profiled(library: str, loss: str, label: str, shape: Shape) -> str:
    """Return the profile of a method."""
    method = next(of for of in libraries()[library] if of.loss == loss and label in ("", of.label))
    if (why := method.missing(shape[-1])) is not None:
        raise SystemExit(f"{library}: {why}")
    step = step_of(method.build(), shape)
    for _ in range(3):
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])]
    with profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize() if GPU else None  # so that the profile has all kernels
    events = profiler.key_averages()
    on_device = [of for of in events if of.device_type != DeviceType.CPU]
    on_host = [of for of in events if of.device_type == DeviceType.CPU]
    calls = python_calls(step)
    lines = [json.dumps(about()), f"{library}, {loss}, {method.label}, {shape}, bfloat16: forward and backward"]
    lines += table("kernels and copies", ((of.key, of.count, of.self_device_time_total) for of in on_device))
    lines += table("operations of the host", ((of.key, of.count, of.self_cpu_time_total) for of in on_host))
    lines += table("Python's calls", ((name, number, 0.0) for name, number in calls.items()))
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, and write the profile to a file and its beginning to the screen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--loss", choices=["clip", "siglip", "max_sim"], default="clip")
    parser.add_argument("--batch-size", type=int, default=8192 if GPU else 64)
    parser.add_argument("--embedding-size", type=int, default=512 if GPU else 32)
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=(32, 180), help="of a query and of a document, for max_sim"
    )
    parser.add_argument("--library", choices=[*libraries()], default="wholebatch")
    parser.add_argument(
        "--method", default="", help="its label, as in `make gpu`: default, triton, torch, deferred, ..."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the file")
    given = parser.parse_args(arguments)
    labels = [of.label for of in libraries()[given.library] if of.loss == given.loss]
    if given.method not in ("", *labels) or not labels:
        parser.error(f"--method must be one of {labels} for --loss {given.loss}; got {given.method!r}")
    tokens = tuple(given.tokens) if given.loss == "max_sim" else ()
    text = profiled(given.library, given.loss, given.method, (given.batch_size, *tokens, given.embedding_size))
    parts = (given.library, given.loss, given.method or labels[0], given.batch_size, name_of(about()))
    path = given.out / f"gpu_profile_{'_'.join(map(str, parts)).replace(' ', '-')}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text[:4000])
    print(path)


if __name__ == "__main__":
    main()
