"""The settings of InfoNCE, and the checks of their combinations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from .._base.checks import check_choice, check_flag, check_label_smoothing, check_number
from ._directions import DIRECTIONS, Direction
from ._pairs import EQUAL_IDS

PartitionOf = Literal["joint", "per_direction"]
PARTITIONS = ("joint", "per_direction")


@dataclass(eq=False)
class InfoNCESettings:
    """The settings of InfoNCE that are no tensors."""

    equal_ids: str
    directions: tuple[Direction, ...]
    partition: str
    margin: float
    hardness: float
    hard_negative_hardness: float | None
    exclude_above: float | None
    exclude_relative: bool
    exclude_directions: tuple[Direction, ...] | None
    label_smoothing: float

    @property
    def main(self) -> Direction:
        """The direction of the targets, and of the statistics of the batch."""
        return "query_to_key" if "query_to_key" in self.directions else "key_to_query"

    @property
    def are_plain(self) -> bool:
        """Whether the loss is the cross-entropy of each query's pair among all keys."""
        changed = (self.margin, self.hardness, self.label_smoothing, self.exclude_above)
        return tuple(self.directions) == ("query_to_key",) and changed == (0, 0, 0, None)

    @property
    def limited(self) -> tuple[Direction, ...]:
        """The directions in which `exclude_above` leaves out negatives."""
        if self.exclude_above is None:
            return ()
        return self.directions if self.exclude_directions is None else self.exclude_directions

    def check(self) -> None:
        """Raise ValueError unless each setting is valid and they can be combined."""
        check_choice("equal_ids", self.equal_ids, EQUAL_IDS)
        check_choice("partition", self.partition, PARTITIONS)
        for direction in self.directions:
            check_choice("directions", direction, DIRECTIONS)
        if not {"query_to_key", "key_to_query"} & set(self.directions):
            raise ValueError(
                f"directions must have 'query_to_key' or 'key_to_query' among them, got {self.directions}; only these "
                "two have positives"
            )
        if len(set(self.directions)) < len(self.directions):
            raise ValueError(f"directions must be different, got {self.directions}; name each once")
        check_label_smoothing(self.label_smoothing)
        check_flag("exclude_relative", self.exclude_relative)
        check_number("margin", self.margin)
        if check_number("hardness", self.hardness) < 0:
            raise ValueError(f"hardness must not be negative, got {self.hardness}; 0 turns it off")
        if self.hardness and "query_to_key" not in self.directions:
            raise ValueError(
                f"hardness requires 'query_to_key' in directions, got {self.directions}; add it, or leave hardness at 0"
            )
        hardness = self.hard_negative_hardness
        if hardness is not None and check_number("hard_negative_hardness", hardness) < 0:
            raise ValueError(
                f"hard_negative_hardness must not be negative, got {hardness}; None: as hardness, 0 turns it off"
            )
        if self.exclude_above is not None:
            check_number("exclude_above", self.exclude_above)
        elif self.exclude_relative:
            raise ValueError(
                "exclude_relative requires exclude_above, got None; exclude_above is the margin that it makes relative"
            )
        if self.exclude_directions is not None:
            self._check_exclude_directions(self.exclude_directions)

    def _check_exclude_directions(self, directions: tuple[Direction, ...]) -> None:
        if self.exclude_above is None:
            raise ValueError(
                "exclude_directions requires exclude_above, got None; exclude_above is the margin that holds in these "
                "directions"
            )
        for direction in directions:
            check_choice("exclude_directions", direction, DIRECTIONS)
        if not directions or not set(directions) <= set(self.directions) or len(set(directions)) < len(directions):
            raise ValueError(
                f"exclude_directions must be different directions of {self.directions}, at least one, got "
                f"{directions}; None: all of them"
            )

    def check_positives(self, several: bool, hard_negatives: Tensor | None) -> None:
        """Raise ValueError for settings that cannot be combined with several positives of a query."""
        is_set = {
            "margin": self.margin,
            "hardness": self.hardness,
            "exclude_above": self.exclude_above is not None,
            "hard_negatives": hard_negatives is not None,
            "directions": not set(self.directions) <= {"query_to_key", "key_to_query"},
            "partition='joint'": self.partition == "joint" and len(self.directions) > 1,
        }
        wrong = [name for name, value in is_set.items() if value]
        if several and wrong:
            raise ValueError(
                f"equal_ids='positive' does not go with {', '.join(wrong)}; it accepts the directions 'query_to_key' "
                "and 'key_to_query', and for both of them partition='per_direction'"
            )


def as_tuple(directions: Any) -> tuple[Direction, ...]:
    """Return directions as a tuple, a single name included; the check refuses anything else."""
    return tuple(directions) if isinstance(directions, list | tuple) else (directions,)
