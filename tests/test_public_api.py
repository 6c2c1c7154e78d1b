"""The public names are a decision: this list and the package agree, and each is documented."""

import inspect

import wholebatch as wb

LOSSES = ["clip_loss", "info_nce_loss", "nt_xent_loss", "siglip_loss"]
PUBLIC = {
    wb: [
        "CLIPLoss",
        "InfoNCELoss",
        "NTXentLoss",
        "SigLIPLoss",
        "WholeBatch",
        "__version__",
        "comm",
        "functional",
        "partition",
        "reference",
        "testing",
    ],
    wb.functional: LOSSES,
    wb.partition: ["Diagonal", "Partition", "Tile", "tiles"],
    wb.reference: LOSSES,
    wb.testing: ["RankError", "RankTimeoutError", "run_ranks"],
    wb.comm: [
        "CommunicationError",
        "Communicator",
        "Group",
        "Handle",
        "LocalCommunicator",
        "MPICommunicator",
        "TorchCommunicator",
        "handshake",
        "select_communicator",
    ],
}


def test_exported_names():
    for module, names in PUBLIC.items():
        assert sorted(module.__all__) == sorted(names)
        assert all(hasattr(module, name) for name in names)


def test_every_public_name_is_documented():
    for module, names in PUBLIC.items():
        for name in names:
            value = getattr(module, name)
            if inspect.ismodule(value) or inspect.isclass(value) or inspect.isfunction(value):
                assert value.__doc__, name
            if inspect.isclass(value):
                for method, function in inspect.getmembers(value, inspect.isfunction):
                    assert method.startswith("_") or inspect.getdoc(function), f"{name}.{method}"


def test_functions_and_their_twins_have_the_same_arguments():
    for name in wb.functional.__all__:
        ours = list(inspect.signature(getattr(wb.functional, name)).parameters)
        twin = list(inspect.signature(getattr(wb.reference, name)).parameters)
        assert [p for p in ours if p in twin] == twin
