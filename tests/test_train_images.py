"""Pictures of a user in every mode that Pillow reads, with pixels whose right value is known."""

import logging
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL import __version__ as pillow_version

from wholebatch._base.user_error import UserError
from wholebatch_train.data.open_table import open_table
from wholebatch_train.data.reading import open_picture
from wholebatch_train.data.sides import FilePictures
from wholebatch_train.encoders.small import Pad

SIZE = 8


@pytest.fixture(autouse=True)
def _nothing_reaches_the_terminal():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def read_image(path, *, size, channels):
    """Return the pixels of a picture as the built-in encoder reads it."""
    picture, mode = open_picture(path), "L" if channels == 1 else "RGB"
    return Pad(size, channels)([picture if picture.mode == mode else picture.convert(mode)])[0]


def read(folder, image, channels=3, name="picture.png", **options):
    image.save(folder / name, **options)
    return read_image(folder / name, size=SIZE, channels=channels)


def png_of(width, height, rows=b"", *, depth=8, kind=0, more=b""):
    """Return a PNG file, or a few bytes that claim to have that size; `more` is a chunk that starts with its name."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    chunks = [header, *([more] if more else []), b"IDAT" + zlib.compress(rows), b"IEND"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


def ramp(dtype, top):
    """Return 64 values from 0 to `top`."""
    return np.linspace(0, top, SIZE * SIZE).reshape(SIZE, SIZE).astype(dtype)


def expected_ramp():
    return torch.from_numpy(np.linspace(0, 255, SIZE * SIZE).reshape(1, SIZE, SIZE))


def with_alpha(beneath):
    """Return a picture with a green left half, a transparent right half of this color, and one half-opaque pixel."""
    pixels = np.zeros((SIZE, SIZE, 4), np.uint8)
    pixels[:, :4] = (0, 200, 0, 255)
    pixels[:, 4:] = (*beneath, 0)
    pixels[0, 0] = (0, 200, 0, 128)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("channels", [1, 3])
def test_colors_of_transparent_pixels_have_no_effect(tmp_path, channels):
    found = [read(tmp_path, with_alpha(beneath), channels) for beneath in ((0, 0, 0), (255, 0, 17))]
    assert torch.equal(*found)
    assert (found[0][:, :, 4:] == 255).all(), "white"
    green = (0, 200, 0) if channels == 3 else (round(200 * 0.587),)
    assert found[0][:, 3, 1].tolist() == list(green)
    half = [round(value * 128 / 255 + 255 * 127 / 255) for value in green]
    assert (found[0][:, 0, 0].float() - torch.tensor(half)).abs().max() <= 1, "half of each"
    naive = np.asarray(with_alpha((255, 0, 17)).convert("RGB"))
    assert (naive[:, 4:] == (255, 0, 17)).all(), "the plausible wrong answer differs"


@pytest.mark.parametrize("mode", ["LA", "PA", "La", "RGBa"])
def test_other_modes_with_transparency(tmp_path, mode, monkeypatch):
    gray = Image.new("L", (SIZE, SIZE), 40)
    alpha = Image.fromarray(np.repeat(np.array([[0] * 4 + [255] * 4], np.uint8), SIZE, axis=0))
    image = Image.merge("LA", (gray, alpha))
    if mode in ("LA", "PA"):
        image = image.convert("RGBA").quantize(4).convert("PA") if mode == "PA" else image
    else:
        image = (image.convert("RGBA") if mode == "RGBa" else image).convert(mode)
    if mode == "LA":
        found = read(tmp_path, image)
    else:  # no file format has this mode
        monkeypatch.setattr(Image, "open", lambda *_, **formats: image)
        (tmp_path / "none").touch()
        found = read_image(tmp_path / "none", size=SIZE, channels=3)
    assert (found[:, :, :4] == 255).all()
    assert (found[:, :, 4:].int() - 40).abs().max() <= 1


@pytest.mark.parametrize("transparency", [1, bytes([255, 0]), bytes([255, 128])])
@pytest.mark.parametrize("channels", [1, 3])
def test_palettes_with_transparency(tmp_path, transparency, channels):
    image = Image.new("P", (SIZE, SIZE))
    image.putpalette([0, 0, 100, 90, 90, 90])
    image.paste(1, (4, 0, SIZE, SIZE))
    found = read(tmp_path, image, channels, transparency=transparency)
    left = 100 * (1 if channels == 3 else 0.114)
    assert abs(found[-1, 0, 0].item() - left) <= 1
    right = 255 if transparency != bytes([255, 128]) else round(90 * 128 / 255 + 127)
    assert (found[:, :, 4:].int() - right).abs().max() <= 1


@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_one_transparent_color(tmp_path, mode):
    key = {"1": 0, "L": 7, "RGB": (7, 0, 0)}[mode]
    image = Image.new(mode, (SIZE, SIZE), key)
    image.paste({"1": 1, "L": 99, "RGB": (99, 99, 99)}[mode], (0, 0, 4, SIZE))
    found = read(tmp_path, image, transparency=key)
    assert (found[:, :, 4:] == 255).all()
    assert (found[:, :, :4] == (255 if mode == "1" else 99)).all()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("I;16.png", ramp(np.uint16, 65535)),
        ("I;16.tif", ramp(np.uint16, 65535)),
        ("I;16B.tif", ramp(">u2", 65535)),
        ("I.tif", ramp(np.int32, 65535)),
        ("I.pgm", ramp(np.int32, 65535)),
        ("F.tif", ramp(np.float32, 1.0)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_more_than_eight_bits_are_scaled(tmp_path, name, array, channels):
    found = read(tmp_path, Image.fromarray(array), channels, name)
    assert (found.double() - expected_ramp()).abs().max() <= 0.51, "rounded"
    with Image.open(tmp_path / name) as image:
        clipped = np.asarray(image.convert("L"))
    assert clipped.mean() < 10 or clipped.mean() > 240 or name.startswith("I;16.p"), "Pillow's conversion is wrong"


def test_sixteen_bits_with_a_transparent_color(tmp_path):
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in ramp(np.uint16, 65535))
    key = b"tRNS" + struct.pack(">H", 0)
    (tmp_path / "key.png").write_bytes(png_of(SIZE, SIZE, rows, depth=16, more=key))
    found = read_image(tmp_path / "key.png", size=SIZE, channels=1)
    assert found[0, 0, 0] == 255
    assert (found.double() - expected_ramp()).abs().flatten()[1:].max() <= 0.51


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (ramp(np.int32, 2**20), r"int32 must hold integers from 0 to 65535, got 0 to 1048576; write it with 8 or 16"),
        (ramp(np.int32, 9) - 5, "got -5 to 4"),
        (ramp(np.float32, 255.0), r"float32 must hold floats from 0 to 1, got 0.0 to 255.0"),
        (np.full((2, 2), np.nan, np.float32), "got nan to nan"),
    ],
)
def test_an_unknown_range_of_values_is_an_error(tmp_path, array, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, Image.fromarray(array), name="range.tif")


def pillow_reads(image, path):
    """Return whether Pillow opens what it has saved; 12.3 does not for TIFF files with YCbCr."""
    image.save(path)
    try:
        with Image.open(path) as again:
            again.load()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "CMYK", "YCbCr", "P"])
def test_opaque_modes_are_read(tmp_path, mode):
    """White and black are right in every mode."""
    image = Image.new("RGB", (SIZE, SIZE), "white")
    image.paste("black", (0, 0, 4, SIZE))
    image = image.quantize(2) if mode == "P" else image.convert(mode)
    name = "picture.tif" if mode in ("CMYK", "YCbCr") else "picture.png"
    if not pillow_reads(image, tmp_path / f"of_pillow_{name}"):
        pytest.skip(f"Pillow {pillow_version} cannot read the {mode} that it writes")
    for channels in (1, 3):
        found = read(tmp_path, image, channels, name)
        assert (found[:, :, :4] <= 2).all()
        assert (found[:, :, 4:] >= 253).all()


def test_sixteen_bits_of_each_color(tmp_path):
    values = ramp(np.uint16, 65535)
    rows = b"".join(b"\0" + np.stack([row, row[::-1], row], axis=1).astype(">u2").tobytes() for row in values)
    (tmp_path / "deep.png").write_bytes(png_of(SIZE, SIZE, rows, depth=16, kind=2))
    found = read_image(tmp_path / "deep.png", size=SIZE, channels=3).double()
    assert (found[:1] - expected_ramp()).abs().max() <= 1
    assert (found[1:2] - expected_ramp().flip(2)).abs().max() <= 1


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("name", ["turned.jpg", "turned.png", "turned.tif"])
def test_pictures_stand_upright(tmp_path, orientation, name):
    pixels = np.zeros((SIZE, SIZE), np.uint8)
    pixels[:4], pixels[:4, :4] = 120, 240
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / name, exif=exif, **({"quality": 100} if name.endswith("jpg") else {}))
    found = read_image(tmp_path / name, size=SIZE, channels=1)
    with Image.open(tmp_path / name) as image:
        image.load()
        right = np.asarray(ImageOps.exif_transpose(image).convert("L"))
    assert (found[0].int() - torch.from_numpy(right.astype(np.int32))).abs().max() == 0
    stays = orientation in (0, 1, 9)
    assert (np.abs(right.astype(int) - pixels).max() < 5) == stays, "other orientations must differ"


def test_damaged_metadata_do_not_rotate_a_picture(tmp_path):
    Image.new("L", (SIZE, SIZE), 77).save(tmp_path / "exif.jpg", exif=b"Exif\0\0nonsense" * 4)
    assert (read_image(tmp_path / "exif.jpg", size=SIZE, channels=1) == 77).all()


def test_a_wide_picture_is_padded(tmp_path):
    found = read(tmp_path, Image.new("L", (64, 16), 200), 1)
    assert (found[0, 3:5] == 200).all()
    assert (found[0, :2] == 0).all()


def test_files_that_are_not_pictures_give_one_line_with_their_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8))
    files = {"bomb.png": png_of(60_000, 60_000), "wide.png": png_of(2**31 - 1, 1), "empty.png": b""}
    for kind in ("png", "jpg", "gif", "tif", "webp", "bmp"):
        noise.save(tmp_path / f"whole.{kind}")
        whole = (tmp_path / f"whole.{kind}").read_bytes()
        files |= {f"cut.{kind}": whole[: len(whole) // 2], f"start.{kind}": whole[:12]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / "pairs.csv").write_text(f"image,text\n{name},A\n")
        pictures = FilePictures(open_table(str(tmp_path / "pairs.csv")), "image")
        with pytest.raises(UserError, match=rf"line 2: '.*{name}' cannot be read as an image \(.+\)") as caught:
            pictures.items(torch.tensor([0]))
        assert "\n" not in str(caught.value)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match="Is a directory"):
        read_image(tmp_path / "folder.png", size=SIZE, channels=1)


def test_messages_that_pillow_logs_are_not_printed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "picture.tif"
    Image.new("RGB", (SIZE, SIZE)).save(path)
    samples = struct.pack("<HHI", 277, 3, 1)  # the entry of the number of samples per pixel, which is 3
    content = path.read_bytes()
    assert content.count(samples) == 1
    path.write_bytes(content.replace(samples + b"\x03\x00", samples + b"\x00\x08"))
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a program; pytest's own would take them
    with pytest.raises(ValueError, match="no picture of a known format"):
        open_picture(path)
    assert capsys.readouterr().err == ""


def test_a_picture_just_over_pillows_limit_is_read_silently(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    assert (read(tmp_path, Image.new("L", (SIZE, SIZE), 5), 1) == 5).all()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    with pytest.raises(ValueError, match="decompression bomb"):
        read_image(tmp_path / "picture.png", size=SIZE, channels=1)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_bytes_give_pictures_or_errors(tmp_path, seed):
    rng = np.random.default_rng(seed)
    for kind in ("png", "jpg", "gif", "tif", "webp", "bmp"):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(tmp_path / f"x.{kind}")
        content = np.frombuffer((tmp_path / f"x.{kind}").read_bytes(), np.uint8).copy()
        content[rng.integers(0, len(content), 8)] = rng.integers(0, 256, 8)
        (tmp_path / f"x.{kind}").write_bytes(content.tobytes())
        try:
            found = read_image(tmp_path / f"x.{kind}", size=SIZE, channels=3)
        except ValueError:
            continue
        assert found.shape == (3, SIZE, SIZE)
