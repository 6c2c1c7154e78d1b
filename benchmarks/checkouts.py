"""Frameworks that are not on the package index: environment variables name the folders of their checkouts."""

from __future__ import annotations

import os
import subprocess

NAMES = {"grad_cache": "GradCache", "tevatron": "Tevatron", "insightface": "insightface"}


def folder(name: str) -> str:
    """Return the folder of a checkout."""
    variable = f"WHOLEBATCH_{name.upper()}"
    if variable not in os.environ:
        raise SystemExit(f"{NAMES[name]} needs a checkout: set {variable} to its folder")
    return os.environ[variable]


def commit(name: str) -> str:
    """Return the commit of a checkout, as in "commit 7fadd42"."""
    command = ["git", "-C", folder(name), "rev-parse", "--short=7", "HEAD"]
    return "commit " + subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
