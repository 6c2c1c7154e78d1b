"""A small data set on disk, as a user would have one: real characters from a real font."""

from __future__ import annotations

import csv
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

BLOCKS = [range(0x41, 0x5B), range(0x61, 0x7B), range(0x391, 0x3A2), range(0x3B1, 0x3CA), range(0x410, 0x450)]


def write_pairs(folder: Path, name: str = "pairs.csv", *, faces: Sequence[str] = ("DejaVuSans",)) -> Path:
    """Write about 160 characters in each face as PNG files, and a .csv or .jsonl file of (image, text) pairs."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for face in faces:
        path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
        font = ImageFont.truetype(str(path), 12, layout_engine=ImageFont.Layout.BASIC)
        for code in (code for block in BLOCKS for code in block):
            image = Image.new("L", (16, 16))
            ImageDraw.Draw(image).text((8, 8), chr(code), fill=255, font=font, anchor="mm")
            stem = f"{code:x}" if len(faces) == 1 else f"{face}-{code:x}"
            image.save(folder / "images" / f"{stem}.png")
            rows.append({"image": f"images/{stem}.png", "text": unicodedata.name(chr(code))})
    target = folder / name
    with target.open("w", newline="", encoding="utf-8") as file:
        if target.suffix == ".csv":
            writer = csv.DictWriter(file, ["image", "text"])
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return target


# Options of a model and a split that suit this data set and train in about a second. Some characters of one face have
# equal pictures (A, Α, А), so that 127 groups are left: 87 for training, two batches in a pass.
SMALL = [
    "--image-size", "16", "--validation-texts", "16", "--test-texts", "24", "--batch-size", "40",
    "--model.image-width", "8", "--model.text-width", "32", "--model.embedding-size", "32",
    "--model.text-buckets", "512", "--warmup-steps", "2",
]  # fmt: skip
