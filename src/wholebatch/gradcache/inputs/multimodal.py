"""Inputs of texts with images or videos, whose pixels do not have the batch's rows.

    input_ids, attention_mask, ...   (rows, length)
    pixel_values                     (patches, d) with image_grid_thw (images, 3): image i has t_i h_i w_i patches;
                                     without a grid (images, ...)
    image_sizes, ...                 (images, ...)

Each image belongs to a row, and has t_i h_i w_i / merge_size^2 tokens in it. A chunk gets the images of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..._base.checks import check_count, check_dense, check_integer, check_items, shown
from ..._base.trees import LEFT_OUT, leaves, map_leaves_by_path, tensors_of
from .image_counts import INPUT, OF_ROWS, Kind, RowItems, items_of, rows_in
from .parts import Part, cut_tensor, index_of, split_tree
from .token_budget import TokenBudget, TokenChunk, check_tensor_name, even, is_named, mask_in
from .trees import check_no_graph, check_no_list_of_rows, is_flat_list

_POSITIONS = "position_ids"  # may have shape (3, rows, length)


@dataclass(frozen=True, kw_only=True)
class MultimodalSplit:
    """A `split_input_fn` for texts with images or videos, as processors of transformers return them.

    An input is a mapping, or a tree with one, in which each image belongs to a row, in the order of the rows:
    `pixel_values` of all patches with `image_grid_thw` (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V), or of all images, with
    or without `image_sizes` (LLaVA, Gemma 3); likewise for videos. A chunk has the images of its rows, and no
    `pixel_values` if there are none. Other tensors have the batch's rows, or one row for each image if `per_image`
    names them. An input without pixels is split as usual. Chunk sizes are numbers of rows, or a :class:`TokenBudget`.

    The images of a row are counted by `images_per_row` or by `image_token_id`; without both, each row has one. Where
    `pixel_values` has the batch's rows, as for Idefics 3 and SmolVLM, this class is not needed.

    Args:
        image_token_id: the token that stands in `input_ids` for each part of an image: `config.image_token_id`.
        video_token_id: likewise for videos.
        merge_size: so many by so many patches are one token: `config.vision_config.spatial_merge_size`.
        images_per_row: the name of a tensor of shape (rows,) in the input, the number of images of each row. It is left
            out of the chunks.
        videos_per_row: likewise for videos.
        per_image: names of further tensors or lists with one row for each image.
        per_video: likewise for videos.

    Raises:
        ValueError: if an argument is invalid.

    >>> import torch, wholebatch as wb
    >>> split = wb.gradcache.MultimodalSplit(image_token_id=7, merge_size=1)
    >>> batch = {
    ...     "input_ids": torch.tensor([[1, 7, 7], [1, 1, 1], [7, 1, 1]]),
    ...     "pixel_values": torch.rand(3, 5),
    ...     "image_grid_thw": torch.tensor([[1, 1, 2], [1, 1, 1]]),
    ... }
    >>> for chunk in split(batch, 2):
    ...     print({name: tuple(x.shape) for name, x in chunk.tree.items()})
    {'input_ids': (2, 3), 'pixel_values': (2, 5), 'image_grid_thw': (1, 3)}
    {'input_ids': (1, 3), 'pixel_values': (1, 5), 'image_grid_thw': (1, 3)}
    """

    image_token_id: int | None = None
    video_token_id: int | None = None
    merge_size: int = 2
    images_per_row: str | None = None
    videos_per_row: str | None = None
    per_image: Sequence[str] = ()
    per_video: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("image_token_id", "video_token_id"):
            if getattr(self, name) is not None:
                check_integer(
                    name, getattr(self, name), minimum=-(2**63), maximum=2**63 - 1, detail="a token of input_ids"
                )
        check_count("merge_size", self.merge_size, "patches along each side of a token")
        for name in ("images_per_row", "videos_per_row"):
            if getattr(self, name) is not None:
                check_tensor_name(name, getattr(self, name))
        for name in ("per_image", "per_video"):
            names = check_items(name, getattr(self, name), "names of tensors in the input")
            if not all(isinstance(x, str) and x for x in names):
                raise ValueError(f"{name} must be a list of names of tensors in the input, got {shown(names)}")
            object.__setattr__(self, name, (*names,))

    def __call__(self, model_input: object, chunk_size: int | TokenBudget) -> Sequence[object]:
        """Return the chunks of an input.

        Args:
            model_input: the input of one model.
            chunk_size: rows of a chunk, or a budget of tokens.

        Raises:
            ValueError: if images, tokens and rows do not add up.
        """
        if not isinstance(chunk_size, TokenBudget):
            check_count("chunk_size", chunk_size, "rows of a chunk (or a TokenBudget)")
        images = ("image_sizes", "image_position_ids", *self.per_image)
        videos = ("second_per_grid_ts", *self.per_video)
        kinds = [
            Kind("image", "pixel_values", "image_grid_thw", images, self.images_per_row, self.image_token_id),
            Kind("video", "pixel_values_videos", "video_grid_thw", videos, self.videos_per_row, self.video_token_id),
        ]
        by_path = dict(leaves(model_input, is_leaf=is_flat_list))
        kinds = [kind for kind in kinds if any(is_named(path, name) for path in by_path for name in kind.names)]
        if not kinds and not any(is_named(path, name) for path in by_path for name in OF_ROWS):
            return split_tree(model_input, chunk_size, INPUT)
        for x in tensors_of(model_input):
            check_dense(f"a tensor of {INPUT}", x)
        check_no_graph(model_input, INPUT)
        rows = rows_in(by_path)
        items = {kind: items_of(by_path, kind, rows, self.merge_size) for kind in kinds}
        unused = [name for name in (self.images_per_row, self.videos_per_row) if name is not None]
        if isinstance(chunk_size, TokenBudget):
            mask = mask_in(model_input, chunk_size, INPUT)
            if len(mask) != rows:
                raise ValueError(f"{INPUT} has {rows} rows, and its mask {chunk_size.mask!r} has {len(mask)}")
            split = _Split(by_path, rows, items, unused, chunk_size, length=mask.shape[1])
            plan = chunk_size.chunks(mask)
        else:
            split, plan = _Split(by_path, rows, items, unused), even(rows, chunk_size)
        return [Part(model_input, *chunk, cut=split, holds=split.kinds(chunk)) for chunk in plan]


_Cut = Callable[[Any, TokenChunk], Any]  # (a leaf of the input, rows and columns) -> the leaf of the chunk


class _Split:
    """Cut chunks from an input: rows, and the images of these rows."""

    def __init__(
        self,
        by_path: Mapping[str, Any],  # the leaves of the input
        rows: int,
        items: Mapping[Kind, RowItems],
        unused: Sequence[str],  # names of tensors that only count images
        budget: TokenBudget | None = None,  # cuts the columns of tokens as well
        *,
        length: int = -1,  # by which tensors with columns of tokens are known
    ) -> None:
        self._rows, self._items, self._unused = rows, items, unused
        self._budget, self._length = budget, length
        self._cuts = {path: self._cut_of(path, x) for path, x in by_path.items()}

    def kinds(self, chunk: TokenChunk) -> list[str]:
        """Return the kinds of pixels that a chunk has."""
        return [kind.name for kind, items in self._items.items() if items.numbers(chunk.rows)]

    def __call__(self, tree: Any, chunk: TokenChunk) -> Any:
        """Return the chunk of these rows and columns."""
        return map_leaves_by_path(lambda path, x: self._cuts[path](x, chunk), tree, is_leaf=is_flat_list)

    def _cut_of(self, path: str, x: Any) -> _Cut:
        """Return how a leaf is cut, or raise ValueError if its rows are neither the batch's nor those of the images."""
        for kind, items in self._items.items():
            if any(is_named(path, name) for name in kind.names):
                return partial(_cut_items, path, items.patch_numbers if is_named(path, kind.pixels) else items.numbers)
        if any(is_named(path, name) for name in self._unused):
            return lambda _x, _chunk: _placeholder(path)
        if isinstance(x, list | tuple):
            check_no_list_of_rows(x, self._rows, INPUT, 1)
        are_positions = isinstance(x, Tensor) and is_named(path, _POSITIONS) and x.dim() == 3
        dim = 1 if are_positions and x.shape[1] == self._rows else 0
        if isinstance(x, Tensor) and x.dim() and x.shape[dim] != self._rows:
            images = (f"{sum(items.items_per_row)} {kind.name}s" for kind, items in self._items.items())
            counts = " and ".join([f"{self._rows} texts", *images])
            raise ValueError(
                f"{path!r} of {INPUT} has {len(x)} rows, and there are {counts}: if it has a row "
                "for each image, name it in per_image="
            )
        return lambda x, chunk: cut_tensor(path, x, chunk, self._budget, self._length, dim)


def _cut_items(path: str, numbers_of: Callable[[Sequence[int]], list[int]], x: Any, chunk: TokenChunk) -> Any:
    """Return what a leaf has for the images, or the patches, of the chunk's rows."""
    numbers = numbers_of(chunk.rows)
    if not numbers:
        return _placeholder(path)
    return x[index_of(numbers, x.device)] if isinstance(x, Tensor) else type(x)(x[number] for number in numbers)


def _placeholder(path: str) -> object:
    """Return what stands for a leaf that the model does not get: nothing in a mapping, None in a list."""
    return None if path.endswith("]") else LEFT_OUT
