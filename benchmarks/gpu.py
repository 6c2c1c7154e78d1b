"""The losses on one GPU, in bfloat16, at the sizes that the kernels are made for: speed, memory, peers.

    pip install '.[triton,train]' open_clip_torch cut-cross-entropy liger-kernel inf-cl memeff
    python benchmarks/gpu.py [NAME ...]

Losses are checked against the dense float64 reference before they are timed; peers that are missing are left out.
"blocks" times the two softmax kernels alone. Figures go to results/gpu.json, gpu_partial_fc.json and gpu_blocks.json,
with card, versions and commit.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch import kernels
from wholebatch._measure import rise_of_peak, seconds_of
from wholebatch.bench.config import LossConfig
from wholebatch.bench.records import about
from wholebatch.bench.run_loss import run_loss

RESULTS = Path(__file__).parent / "results" / "gpu.json"
BLOCKS_RESULTS = Path(__file__).parent / "results" / "gpu_blocks.json"
CLASSES_RESULTS = Path(__file__).parent / "results" / "gpu_partial_fc.json"
_ON = {"dtypes": ("bfloat16",), "device": "cuda", "results": RESULTS}
CASES = {
    "clip": LossConfig(
        losses=("clip",), batch_size=65536, embedding_size=512, keep=(0.0, 2.0), kernels=("triton", "torch"), **_ON
    ),
    "clip 1024": LossConfig(
        losses=("clip",), batch_size=65536, embedding_size=1024, keep=(0.0,), kernels=("triton", "torch"), **_ON
    ),
    "largest of open_clip": LossConfig(
        losses=("clip",), batch_size=49152, embedding_size=512, keep=(0.0,), kernels=("triton",), **_ON
    ),
    "nt_xent": LossConfig(
        losses=("nt_xent",), batch_size=32768, embedding_size=512, keep=(0.0,), kernels=("triton", "torch"), **_ON
    ),
    "siglip": LossConfig(losses=("siglip",), batch_size=65536, embedding_size=512, kernels=("triton", "torch"), **_ON),
    "million": LossConfig(
        losses=("clip",),
        batch_size=2**20,
        embedding_size=512,
        keep=(0.0,),
        kernels=("triton",),
        peers=False,
        steps=3,
        **_ON,
    ),
}


def partial_fc(rows: int = 8192, classes: int = 1_250_000, dim: int = 512) -> None:
    """Measure a margin softmax over all classes and over a sample: effective speed at 8 B C d, and memory."""
    _check_partial_fc()
    comm, device, found = wb.comm.LocalCommunicator(), torch.device("cuda"), []
    for rate in (1.0, 0.1):
        for kernel in ("triton", "torch"):
            head = wb.PartialFC(
                dim, classes, sample_rate=rate, memory="flat", kernel=kernel, device=device, dtype=torch.bfloat16
            )
            x = normalize(torch.randn(rows, dim, device=device), dim=1).bfloat16().requires_grad_()
            labels = torch.randint(0, classes, (rows,), device=device)

            def step(head: wb.PartialFC = head, x: torch.Tensor = x, labels: torch.Tensor = labels) -> None:
                head.zero_grad(set_to_none=True)
                head(x, labels).backward()

            step()
            peak = rise_of_peak(comm, step, device)
            took = median(seconds_of(comm, step, device) for _ in range(5))
            row = {"rows": rows, "classes": classes, "dim": dim, "sample_rate": rate, "kernel": kernel}
            speed = 8 * rows * rate * classes * dim / took / 1e12
            row |= {"step_ms": 1e3 * took, "tflops": speed, "transient_mb": None if peak is None else peak / 1e6}
            found.append({**row, "device": torch.cuda.get_device_name(device), **about()})
            print(found[-1])
    CLASSES_RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


def _check_partial_fc() -> None:
    """Compare value and gradients with the dense float64 reference, on more classes than a tile has."""
    generator = torch.Generator().manual_seed(0)
    whole = [normalize(torch.randn(n, 64, generator=generator), dim=1).cuda().bfloat16() for n in (300, 20000)]
    labels = torch.randint(0, 20000, (300,), generator=generator).cuda()
    true = [z.double().requires_grad_() for z in whole]
    expected = wb.reference.partial_fc_loss(true[0], labels, true[1], margin=wb.ArcFace())
    expected.backward()
    for kernel in ("triton", "torch"):
        mine = [z.clone().requires_grad_() for z in whole]
        loss = wb.functional.partial_fc_loss(mine[0], labels, mine[1], margin=wb.ArcFace(), kernel=kernel)
        loss.backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
        for got, of in zip(mine, true, strict=True):
            assert (got.grad.double() - of.grad).norm() < 1e-2 * of.grad.norm(), kernel


def _check_blocks(name: str, found: object, gradient: torch.Tensor, tile: kernels.TileInputs) -> None:
    """Compare sums, or dS, of the first rows with plain PyTorch's."""
    s = 14.3 * tile.x[:256].float() @ tile.y.float().T
    local = torch.eye(256, len(tile.y), device=s.device)
    if name == "tile_sums":
        assert isinstance(found, tuple)
        torch.testing.assert_close(found[0]["sum"][:256].float(), (s.exp() * (1 - local)).sum(1), rtol=1e-3, atol=0)
    else:
        torch.testing.assert_close(gradient[:256].float(), 2 * s.exp() * (1 - local) - local, rtol=1e-2, atol=1e-5)


def blocks() -> None:
    """Measure the speed of the two softmax kernels alone, with parts of several sizes."""
    comm, device, found = wb.comm.LocalCommunicator(), torch.device("cuda"), []
    for dim, rows in product((256, 512, 768, 1024), (8192, 16384)):
        x, y = (normalize(torch.randn(rows, dim, device=device), dim=1).bfloat16() for _ in range(2))
        named = torch.arange(rows, dtype=torch.int32, device=device)[None]
        tile = kernels.TileInputs(x, y, 14.3, kernels.Entries(named), kernels.Entries(), 0, 0)
        ones, gradient = torch.ones(rows, device=device), torch.empty(rows, rows, device=device, dtype=x.dtype)
        weights = {"sum": ones, "target": -ones}
        steps = {
            "tile_sums": partial(kernels.tile_sums, tile, shift=0.0, rows={"sum", "target"}, cols={"sum"}),
            "tile_gradient": partial(
                kernels.tile_gradient, tile, gradient, shift=0.0, rows=weights, cols={"sum": ones}
            ),
        }
        for shape, warps, stages in product(((128, 128), (128, 256), (256, 128), (64, 256)), (4, 8), (3, 4)):
            sizes = kernels.Blocks(*shape, 64, 8, warps, stages)
            for name, step in steps.items():
                row = {"kernel": name, "rows": rows, "dim": dim, "blocks": repr(sizes)}
                with kernels.using(sizes):
                    try:
                        _check_blocks(name, step(), gradient, tile)
                        took = median(seconds_of(comm, step, device) for _ in range(7))
                    except Exception as error:  # for instance too much shared memory: skip this size
                        row |= {"tflops": None, "note": str(error).splitlines()[0]}
                    else:
                        row["tflops"] = 2 * rows * rows * dim / took / 1e12
                found.append({**row, "device": torch.cuda.get_device_name(device), **about()})
                print(found[-1])
    BLOCKS_RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


OTHERS = {"partial_fc": partial_fc, "blocks": blocks}

if __name__ == "__main__":
    chosen = sys.argv[1:] or [*CASES, *OTHERS]
    if not {*chosen} <= {*CASES, *OTHERS}:
        sys.exit(f"usage: python benchmarks/gpu.py [NAME ...], names of {', '.join([*CASES, *OTHERS])}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a GPU, and torch finds none")
    for name in chosen:
        print(f"== {name}", flush=True)
        if name in OTHERS:
            OTHERS[name]()
        else:
            run_loss(CASES[name])
