"""The same pairs in every form that `--data` reads."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

TEXTS = ("a red fox", "two trees; one house, or more", 'the "blue" boat', "snow", "über den Wolken", "a red sun")
"""Texts with separators, quotes and letters beyond ASCII."""


def picture(number: int, size: int = 12) -> Image.Image:
    """Return a picture that only this number has."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), np.uint8)
    return Image.fromarray(pixels)


def png(number: int) -> bytes:
    content = io.BytesIO()
    picture(number).save(content, format="PNG")
    return content.getvalue()


def write_pictures(folder: Path, count: int = len(TEXTS)) -> list[str]:
    """Write pictures 0, 1, ... into folder/images, and return their names relative to the folder."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    names = [f"images/{number}.png" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(png(number))
    return names


def rows(folder: Path) -> list[dict[str, str]]:
    return [{"image": name, "text": text} for name, text in zip(write_pictures(folder), TEXTS, strict=True)]


def separated(folder: Path, name: str, delimiter: str) -> Path:
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["image", "text"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows(folder))
    return folder / name


def json_lines(folder: Path) -> Path:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(folder)))
    return folder / "pairs.jsonl"


def parquet_of_paths(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows(folder))
    table = table.set_column(1, "text", table["text"].dictionary_encode())  # as pandas writes a category
    pq.write_table(table, folder / "paths.parquet", row_group_size=4)
    return folder / "paths.parquet"


def parquet_of_bytes(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [{"bytes": png(number), "path": f"{number}.png"} for number in range(len(TEXTS))]
    pq.write_table(pa.table({"image": images, "text": list(TEXTS)}), folder / "bytes.parquet")
    return folder / "bytes.parquet"


def parquet_of_classes(folder: Path) -> Path:
    """As the library datasets writes a data set of images with class labels."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [{"bytes": png(number), "path": None} for number in range(len(TEXTS))]
    features = {"image": {"_type": "Image"}, "label": {"names": list(TEXTS), "_type": "ClassLabel"}}
    table = pa.table({"image": images, "label": list(range(len(TEXTS)))})
    about = json.dumps({"info": {"features": features}})
    pq.write_table(table.replace_schema_metadata({"huggingface": about}), folder / "classes.parquet")
    return folder / "classes.parquet"


def texts_beside(folder: Path) -> Path:
    where = folder / "beside"
    for name, text in zip(write_pictures(where), TEXTS, strict=True):
        (where / name).with_suffix(".txt").write_text(f"{text}\n", encoding="utf-8")
    return where


def in_names(folder: Path) -> Path:
    """Pictures whose names are their texts, with _ for spaces; punctuation is a part of a file's name."""
    where = folder / "names"
    where.mkdir()
    for number, text in enumerate(TEXTS):
        (where / f"{text.replace(' ', '_')}.png").write_bytes(png(number))
    return where


def in_classes(folder: Path) -> Path:
    where = folder / "classes"
    for number, text in enumerate(TEXTS):
        (where / text).mkdir(parents=True)
        (where / text / "1.png").write_bytes(png(number))
    return where


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def shard(path: Path, numbers: range, *, fields: str = "txt") -> Path:
    """Write a shard as img2dataset does, with a pickle in each row, which nobody may load."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            add(tar, f"part/{number:06d}.png", png(number))
            if "json" in fields:
                about = {"caption": TEXTS[number], "width": 12, "url": "https://example.org", "exif": None}
                add(tar, f"part/{number:06d}.json", json.dumps(about).encode())
            if "txt" in fields:
                add(tar, f"part/{number:06d}.txt", TEXTS[number].encode())
            add(tar, f"part/{number:06d}.pyd", b"cos\nsystem\n(S'touch executed'\ntR.")
    return path


def one_shard(folder: Path) -> Path:
    return shard(folder / "one.tar", range(len(TEXTS)))


def shards_with_both(folder: Path) -> Path:
    """A folder of shards with the text in .txt and in .json, as img2dataset writes it."""
    where = folder / "shards"
    where.mkdir()
    for number in range(3):
        shard(where / f"{number:03d}.tar", range(2 * number, 2 * number + 2), fields="txt, json")
    return where


def pattern_of_shards(folder: Path) -> Path:
    for number in range(3):
        shard(folder / f"p-{number:03d}.tar", range(2 * number, 2 * number + 2), fields="json")
    return folder / "p-{000..002}.tar"


def saved_data_set(folder: Path) -> Path:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    images = [{"bytes": png(number), "path": None} for number in range(len(TEXTS))]
    found = datasets.Dataset.from_dict({"image": images, "text": list(TEXTS)}, features=features)
    datasets.DatasetDict({"train": found, "test": found.select([0])}).save_to_disk(str(folder / "saved"))
    return folder / "saved"


FORMS = {
    "csv": lambda folder: separated(folder, "pairs.csv", ","),
    "semicolons": lambda folder: separated(folder, "pairs.csv", ";"),
    "tsv": lambda folder: separated(folder, "pairs.tsv", "\t"),
    "jsonl": json_lines,
    "parquet of paths": parquet_of_paths,
    "parquet of bytes": parquet_of_bytes,
    "parquet of classes": parquet_of_classes,
    "texts beside": texts_beside,
    "names": in_names,
    "classes": in_classes,
    "a shard": one_shard,
    "shards": shards_with_both,
    "a pattern of shards": pattern_of_shards,
    "a saved data set": saved_data_set,
}
"""Functions that write the pairs into a folder in one form, and return what `--data` then names."""
