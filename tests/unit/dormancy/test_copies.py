"""Copies of a sleeping model, deep copies and pickles, sleep by themselves and share nothing with it."""

import copy
import copyreg
import gc
import io
import pickle
import types

import pytest
import torch

from parity import assert_same, run
from tiny_models import GPT, GPT_MOE, GPT_TIED, HYBRID, batch, build, build_pair, same_bytes
from torpor import MTPExecutedError, freeze_mtp

# What cannot be copied and stands for itself in a copy.
_KEPT = []


def _keep(item):
    _KEPT.append(item)
    return _kept, (len(_KEPT) - 1,)


def _kept(index):
    return _KEPT[index]


class Pickler(pickle.Pickler):
    """Pickles a Megatron model, which holds process groups and functions defined inside functions."""

    def reducer_override(self, item):
        is_local = isinstance(item, types.FunctionType) and "<locals>" in item.__qualname__
        return _keep(item) if is_local else NotImplemented


@pytest.fixture(autouse=True)
def _copyable_process_groups(megatron_rank):
    """Let copies of a model stand for the same process groups: they can be neither copied nor pickled."""
    copyreg.pickle(torch.distributed.ProcessGroup, _keep)
    yield
    del copyreg.dispatch_table[torch.distributed.ProcessGroup]
    _KEPT.clear()


def pickled(model):
    stream = io.BytesIO()
    Pickler(stream).dump(model)
    return pickle.loads(stream.getvalue())


def reachable(root):
    """Return every object that can be reached from one, other than through classes and Python modules."""
    seen, todo = {}, [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType | torch.distributed.ProcessGroup):
            continue
        seen[id(item)] = item
        todo += gc.get_referents(item) if not callable(item) or hasattr(item, "__dict__") else []
    return seen


COPY = pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])


@COPY
@pytest.mark.parametrize("kind", [GPT, GPT_TIED, GPT_MOE, HYBRID], ids=str)
def test_a_copy_sleeps_like_the_original(kind, make_copy):
    """Same bytes out, no gradient for the heads, and its guards stand."""
    dormant, reference = build_pair(kind)
    handle = freeze_mtp(dormant)
    copied = make_copy(dormant)
    assert_same(copied, reference)
    assert not any(p.requires_grad for p in copied.mtp.parameters())
    with pytest.raises(MTPExecutedError):
        copied.mtp(hidden_states=None, **{n: t for n, t in batch().items() if n != "labels"})
    assert handle.executions == 0
    assert all(p.grad is None for p in dormant.parameters())
    handle.check()


@COPY
def test_a_copy_is_on_its_own(make_copy):
    """It outlives the original's dormancy, and does not hold the original."""
    dormant, reference = build_pair(GPT)
    handle = freeze_mtp(dormant)
    copied = make_copy(dormant)
    ours = {id(m) for m in dormant.modules()} | {id(p) for p in dormant.parameters()}
    assert ours.isdisjoint(reachable(copied))
    handle.remove()
    assert any(n.startswith("mtp.") for n in run(dormant)[1])
    assert_same(copied, reference)


@COPY
def test_waking_the_original_leaves_the_copy_asleep(make_copy):
    """Each has its own switch."""
    dormant, reference = build_pair(GPT)
    handle = freeze_mtp(dormant)
    copied = make_copy(dormant)
    with handle.awake():
        assert_same(copied, reference)


@COPY
def test_a_copy_made_before_is_awake(make_copy):
    """An EMA or reference model copied earlier runs its heads as ever."""
    model = build(GPT)
    copied = make_copy(model)
    freeze_mtp(model)
    assert any(n.startswith("mtp.") for n in run(copied)[1])


def test_loading_into_a_copy_does_not_move_the_originals_baseline():
    """The proof of the original is about the original."""
    model = build(GPT)
    handle = freeze_mtp(model)
    before = handle.fingerprint()
    copied = copy.deepcopy(model)
    copied.load_state_dict(build(GPT, seed=3).state_dict())
    assert handle.fingerprint() == before
    handle.check()
    assert not same_bytes(copied.mtp.layers[0].eh_proj.weight, model.mtp.layers[0].eh_proj.weight)


def test_the_trunk_alone_can_be_copied():
    """Without taking the heads or the model along."""
    model = build(GPT)
    freeze_mtp(model)
    decoder = copy.deepcopy(model.decoder)
    assert {id(m) for m in model.modules()}.isdisjoint(reachable(decoder))
