"""A state_dict of a head is one rank's part: it is never loaded as another rank's part or as the whole."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wholebatch as wb
from wholebatch.testing import run_ranks


def state_body(num_classes):
    """Return the states of a head after torch.save, as frameworks write them."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"backbone": nn.Linear(3, 4), "head": wb.PartialFC(4, num_classes)})
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getvalue()


def loaded(state):
    return torch.load(io.BytesIO(state), weights_only=True)


def test_one_ranks_part_is_not_loaded_as_the_whole():
    states = [loaded(state) for state in run_ranks(state_body, 2, 10)]
    model = nn.ModuleDict({"backbone": nn.Linear(3, 4), "head": wb.PartialFC(4, 10)})
    before = model["head"].weight.clone()
    for state, classes in zip(states, ("classes 0 to 5 of 10", "classes 5 to 10 of 10"), strict=True):
        for strict in (True, False):
            with pytest.raises(
                ValueError, match=f"'head.weight' has {classes}, and this rank has classes 0 to 10 of 10"
            ):
                model.load_state_dict(state, strict=strict)
        with pytest.raises(ValueError, match=r"'head\.weight' has 5 classes, and this rank has classes 0 to 10"):
            model.load_state_dict(dict(state))  # without the metadata beside the tensors
    assert torch.equal(model["head"].weight, before)

    # The state of a head with twice the classes, whose part has the shapes of this whole head.
    half = nn.ModuleDict({"backbone": nn.Linear(3, 4), "head": wb.PartialFC(4, 5)})
    assert half.state_dict().keys() == states[0].keys()
    with pytest.raises(ValueError, match="has classes 0 to 5 of 10, and this rank has classes 0 to 5 of 5"):
        half.load_state_dict(states[0])


def test_the_local_part_is_loaded():
    state = loaded(run_ranks(state_body, 1, 10)[0])
    model = nn.ModuleDict({"backbone": nn.Linear(3, 4), "head": wb.PartialFC(4, 10, seed=1)})
    model.load_state_dict(state)
    assert torch.equal(model["head"].weight, state["head.weight"])
    assert state._metadata["head"]["classes"] == [0, 10, 10]
    nn.Module.load_state_dict(model["head"], {"step": torch.tensor(3)}, strict=False)
    assert int(model["head"].step) == 3


def another_ranks_body():
    """Load rank 0's part on all ranks, as a framework that saves on rank 0 only would: every use raises on all."""
    head = wb.PartialFC(4, 10)
    states = [None, None]
    dist.all_gather_object(states, head.state_dict())
    head.load_state_dict(states[0])
    uses = [
        lambda: head(torch.ones(2, 4), torch.tensor([0, 1])),
        head.full_weight,
        lambda: head.top_classes(torch.ones(2, 4)),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="the head holds another rank's centers"):
            use()
    with pytest.raises(ValueError, match="root must be the same on all ranks"):
        wb.PartialFC(4, 10).full_weight(root=dist.get_rank())


def test_another_ranks_part_is_refused_on_all_ranks():
    run_ranks(another_ranks_body, 2, timeout_s=60)
