"""The catalog of losses: entries are called like their functions; planner, benchmarks and presets derive from them."""

import inspect
import pkgutil
from importlib import import_module

import pytest
import torch
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch._cli.declared_names import EXCHANGE_NAMES, LABELED_LOSSES, LOSS_NAMES, SWEPT_LOSSES
from wholebatch.auditing import presets
from wholebatch.bench import config as bench
from wholebatch.exchange import EXCHANGES
from wholebatch.losses.catalog import CATALOG, Declaration, Sweep
from wholebatch.planning.form import built_in
from wholebatch.planning.sizes import LOSSES, num_towers


def test_every_public_loss_is_in_the_catalog_or_needs_more_arguments():
    others = {*wb.functional.__all__} - {f"{name}_loss" for name in CATALOG}
    assert len(others) + len(CATALOG) == len(wb.functional.__all__)
    for name in others - {"max_sim_loss"}:  # which takes several vectors for each example
        with pytest.raises(ValueError, match="which no standard call passes"):
            Declaration(getattr(wb.functional, name), None)


@pytest.mark.parametrize("name", CATALOG)
def test_a_call_gives_the_value_of_the_reference(name):
    torch.manual_seed(0)
    x, y = (normalize(torch.randn(16, 8, dtype=torch.float64), dim=1) for _ in range(2))
    labels, entry = torch.arange(16) // 2, CATALOG[name]
    values = [
        entry.call(functions, x, y, scale=5.0, bias=-3.0, labels=labels) for functions in (wb.functional, wb.reference)
    ]
    assert values[0].item() == pytest.approx(values[1].item(), rel=1e-9)
    scaled = entry.call(wb.functional, x, y, scale=7.0, bias=-3.0, labels=labels)
    assert (scaled.item() != values[0].item()) == (entry.scale_argument is not None)


@pytest.mark.parametrize("name", CATALOG)
def test_the_module_of_an_entry_takes_the_settings_of_its_function(name):
    entry = CATALOG[name]
    module = entry.module(**entry.required_settings(8))
    assert set(inspect.signature(type(module)).parameters) <= set(inspect.signature(entry.function).parameters)


def test_kinds_follow_from_signatures():
    kinds = {name: entry.kind for name, entry in CATALOG.items()}
    assert {kinds[name] for name in ("clip", "info_nce", "siglip", "matryoshka")} == {"towers"}
    assert {kinds[name] for name in ("nt_xent", "dcl", "barlow_twins", "w_mse")} == {"views"}
    assert {kinds[name] for name in ("sup_con", "triplet", "smooth_ap")} == {"labeled"}
    assert (CATALOG["siglip"].needs_bias, CATALOG["clip"].needs_bias) == (True, False)


def test_planner_and_benchmarks_offer_the_losses_of_the_catalog():
    swept = {name for name, entry in CATALOG.items() if entry.sweep is not None}
    assert {"clip", "info_nce", "siglip", "nt_xent", "sup_con"} <= swept
    assert {*LOSSES} == swept | {"partial_fc", "max_sim"}
    assert {*bench.LOSSES} == {name for name in swept if CATALOG[name].kind != "labeled"}
    assert {entry.module.__name__ for entry in CATALOG.values()} <= {*presets.settings("wholebatch")}
    assert [built_in(name).work_units for name in ("clip", "info_nce", "siglip", "nt_xent")] == [4, 4, 3, 2]


def test_names_for_command_lines_are_those_of_the_modules():
    modules = [module.name for module in pkgutil.iter_modules(wb.losses.__path__)]
    declared = {name for name in modules if hasattr(import_module(f"wholebatch.losses.{name}"), "DECLARATION")}
    assert declared == {*LOSS_NAMES} == {*CATALOG}
    assert {name for name, entry in CATALOG.items() if entry.sweep is not None} == {*SWEPT_LOSSES}
    assert {name for name, entry in CATALOG.items() if entry.kind == "labeled"} == {*LABELED_LOSSES}
    assert EXCHANGES == EXCHANGE_NAMES
    assert all(num_towers(name) == built_in(name).towers for name in LOSSES if name != "max_sim")


def test_a_loss_with_other_arguments_is_refused():
    with pytest.raises(ValueError, match="moco_loss requires queue, which no standard call passes: give settings="):
        Declaration(wb.functional.moco_loss, wb.MoCoLoss, Sweep())
