"""The handle: names and keys stay, weights stay, the proof fails when it should, and remove() undoes all."""

import subprocess
import sys
import threading

import pytest
import torch

from tiny_models import (
    GPT,
    GPT_MOE,
    HYBRID,
    HYBRID_MOE,
    KINDS,
    batch,
    build,
    differing,
    same_bytes,
)
from torpor import (
    MTPChangedError,
    MTPExecutedError,
    MTPTrainedError,
    TorporError,
    UnsupportedModelError,
    freeze_mtp,
)

pytestmark = pytest.mark.usefixtures("megatron_rank")


def mtp_tensors(model):
    return {n: t.detach().clone() for n, t in [*model.mtp.named_parameters(), *model.mtp.named_buffers()]}


def sharded_keys(model):
    sharded = model.sharded_state_dict()
    return {n: (getattr(t, "key", None), getattr(t, "global_shape", None)) for n, t in sharded.items()}


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(**batch(seed=step)).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_names_and_keys_stay(kind):
    """Checkpoints of a dormant model are those of the model, in both directions and strictly."""
    model = build(kind)
    state, sharded, modules = model.state_dict(), sharded_keys(model), [n for n, _ in model.named_modules()]
    freeze_mtp(model)
    model(**batch())
    assert list(model.state_dict()) == list(state)
    assert sharded_keys(model) == sharded
    assert [n for n, _ in model.named_modules()] == modules
    other = build(kind, seed=9)
    other.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(build(kind, seed=10).state_dict(), strict=True)


@pytest.mark.parametrize("kind", [GPT, GPT_MOE, HYBRID, HYBRID_MOE], ids=str)
def test_fifty_steps_with_weight_decay_leave_every_mtp_tensor_as_it_was(kind):
    """Not a bit moves, router expert biases included, while the trunk trains."""
    model = build(kind)
    before = mtp_tensors(model)
    trunk = model.embedding.word_embeddings.weight.detach().clone()
    handle = freeze_mtp(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.1)
    train(model, optimizer, steps=50)
    assert differing(mtp_tensors(model), before) == []
    report = handle.check(optimizer)
    assert (report.executions, report.num_tensors, report.optimizer_checked) == (0, len(before), True)
    assert report.num_bytes == sum(t.nbytes for t in before.values())
    assert len(report.fingerprint) == len(before)
    assert not same_bytes(model.embedding.word_embeddings.weight, trunk)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed-optimizer"])
def test_megatrons_ddp_and_optimizers_hold_nothing_of_mtp(distributed):
    """Fifty steps with weight decay under DDP and Megatron's own optimizers."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from torpor.megatron.optimizer import build_optimizer

    model = build(HYBRID_MOE)
    before = mtp_tensors(model)
    handle = freeze_mtp(model)
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
    )
    optimizer = build_optimizer(
        [ddp],
        lr=1e-2,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        clip_grad=1.0,
        distributed=distributed,
        dtype=torch.float32,
    )
    for step in range(50):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        ddp(**batch(seed=step)).mean().backward()
        finalize_model_grads([ddp])
        optimizer.step()
    assert differing(mtp_tensors(model), before) == []
    handle.check(optimizer)
    buffered = {p for buffer in ddp.buffers + ddp.expert_parallel_buffers for p in buffer.params}
    assert buffered
    assert buffered.isdisjoint(model.mtp.parameters())
    assert buffered == {p for n, p in model.named_parameters() if not n.startswith("mtp.")}


class TestTheProofFails:
    """Each half of the proof, broken on purpose."""

    def test_skipping_without_freezing_lets_weight_decay_move_the_heads(self):
        """Why parameters are frozen too."""
        model = build(GPT)
        before = mtp_tensors(model)
        handle = freeze_mtp(model)
        for p in model.mtp.parameters():
            p.requires_grad_(True)
            p.grad = torch.zeros_like(p)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        optimizer.step()
        assert differing(mtp_tensors(model), before) != []
        with pytest.raises(MTPTrainedError, match=r"mtp\..* requires a gradient"):
            handle.check(optimizer)

    def test_a_flipped_bit_in_a_parameter(self):
        """Bytes, not values: -0.0 for 0.0 is a change."""
        model = build(GPT)
        with torch.no_grad():
            model.mtp.layers[0].enorm.weight[3] = 0.0
        handle = freeze_mtp(model)
        with torch.no_grad():
            model.mtp.layers[0].enorm.weight[3] = -0.0
        with pytest.raises(MTPChangedError, match=r"mtp\.layers\.0\.enorm\.weight changed while asleep"):
            handle.check()

    def test_a_moved_expert_bias(self):
        """Buffers that move outside autograd count."""
        model = build(HYBRID_MOE)
        handle = freeze_mtp(model)
        bias = next(t for n, t in model.mtp.named_buffers() if n.endswith("expert_bias"))
        bias += 1e-3
        with pytest.raises(MTPChangedError, match="expert_bias"):
            handle.check()

    @pytest.mark.parametrize(
        "call",
        [
            lambda model, inputs: model.forward(**inputs),
            lambda model, inputs: model.mtp(hidden_states=None, **inputs),
            lambda model, inputs: model.mtp.layers[0](hidden_states=None, **inputs),
            lambda model, inputs: model.mtp.layers[0].eh_proj(torch.zeros(1, 64)),
        ],
        ids=["model.forward", "block", "layer", "inner-module"],
    )
    def test_an_execution(self, call):
        """Whatever way leads to an MTP module, it is stopped and counted."""
        model = build(GPT)
        handle = freeze_mtp(model)
        inputs = {n: t for n, t in batch().items() if n != "labels"}
        with pytest.raises(MTPExecutedError, match=r"mtp.* was called outside inference"):
            call(model, inputs)
        assert handle.executions == 1
        with pytest.raises(MTPExecutedError, match="called 1 times"):
            handle.check()

    def test_a_gradient(self):
        """A gradient that something left behind."""
        model = build(GPT)
        handle = freeze_mtp(model)
        weight = model.mtp.layers[0].enorm.weight
        weight.grad = torch.zeros_like(weight)
        with pytest.raises(MTPTrainedError, match=r"mtp\.layers\.0\.enorm\.weight .* has a gradient"):
            handle.check()

    def test_a_ddp_buffer(self):
        """Megatron's DDP marks the parameters it holds with main_grad."""
        model = build(GPT)
        handle = freeze_mtp(model)
        model.mtp.layers[0].enorm.weight.main_grad = torch.zeros(32)
        with pytest.raises(MTPTrainedError, match="main_grad in a DDP buffer"):
            handle.check()

    def test_membership_in_a_torch_optimizer(self):
        """Frozen parameters given to an optimizer are found although it would skip them."""
        model = build(GPT)
        handle = freeze_mtp(model)
        with pytest.raises(MTPTrainedError, match="parameter groups"):
            handle.check(torch.optim.AdamW(model.parameters()))

    def test_a_view_in_an_optimizer(self):
        """Distributed optimizers hold shards: other tensors on the same storage."""
        model = build(GPT)
        handle = freeze_mtp(model)
        shard = model.mtp.layers[0].eh_proj.weight.detach().view(-1)[:8].requires_grad_(True)
        with pytest.raises(MTPTrainedError, match="view of its storage"):
            handle.check(torch.optim.AdamW([shard]))

    @pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed-optimizer"])
    def test_membership_in_a_megatron_optimizer(self, distributed):
        """A model that was frozen after its optimizer was built is found out by the next check."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from torpor.megatron.optimizer import build_optimizer

        model = build(GPT)
        ddp = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
        )
        optimizer = build_optimizer(
            [ddp], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0,
            distributed=distributed, dtype=torch.float32,
        )  # fmt: skip
        frozen = build(GPT)
        handle = freeze_mtp(frozen)
        handle.check(optimizer)
        for ours, theirs in zip(frozen.mtp.parameters(), model.mtp.parameters(), strict=True):
            ours.data = theirs.data
        with pytest.raises(MTPTrainedError, match="optimizer"):
            handle.check(optimizer)


def test_an_interrupt_inside_forward_leaves_no_trace():
    """Ctrl-C in the middle of a step, then an emergency checkpoint: it must be whole."""
    model = build(HYBRID)
    handle = freeze_mtp(model)
    config, keys = model.config, list(model.state_dict())

    def interrupt(*_):
        assert model.config.mtp_num_layers is None
        assert list(model.state_dict()) == keys
        raise KeyboardInterrupt

    hook = model.output_layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batch())
    hook.remove()
    assert model.config is config
    assert config.mtp_num_layers == 1
    assert list(model.state_dict()) == keys
    model(**batch())
    handle.check()


def test_overlapping_forwards_restore_the_config_once():
    """Two threads in one model's forward: the last one out puts the config back."""
    model = build(GPT)
    freeze_mtp(model)
    config = model.config
    first_inside, second_done = threading.Event(), threading.Event()

    def hold_the_first(*_):
        if not first_inside.is_set():
            first_inside.set()
            assert second_done.wait(30)

    model.decoder.register_forward_hook(hold_the_first)
    outputs = {}
    first = threading.Thread(target=lambda: outputs.update(first=model(**batch()).detach()))
    first.start()
    assert first_inside.wait(30)
    outputs["second"] = model(**batch()).detach()
    assert model.config is not config
    second_done.set()
    first.join()
    assert model.config is config
    assert same_bytes(outputs["first"], outputs["second"])


def test_awake_runs_the_heads_and_does_not_count():
    """Inside awake() the model is the one from before the call, but for frozen parameters."""
    model = build(GPT)
    before = model(**batch())
    before.mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if not n.startswith("mtp.")}
    model.zero_grad()
    handle = freeze_mtp(model)
    with handle.awake():
        after = model(**batch())
        after.mean().backward()
    assert same_bytes(before, after)
    assert differing({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, grads) == []
    handle.check()


def test_remove_restores_everything():
    """After remove() the model is the one from before the call; the handle says so."""
    model = build(HYBRID)
    model.mtp.layers[0].enorm.weight.requires_grad_(True)
    attributes = [dict(vars(m)) for m in model.modules()]
    hooks = [(dict(m._forward_pre_hooks), dict(m._load_state_dict_post_hooks)) for m in model.modules()]
    trainable = [p.requires_grad for p in model.parameters()]
    handle = freeze_mtp(model)
    assert [p.requires_grad for p in model.parameters()] != trainable
    handle.remove()
    handle.remove()
    assert [dict(vars(m)) for m in model.modules()] == attributes
    assert [(m._forward_pre_hooks, m._load_state_dict_post_hooks) for m in model.modules()] == hooks
    assert [p.requires_grad for p in model.parameters()] == trainable
    with pytest.raises(TorporError, match="has ended"):
        handle.check()
    freeze_mtp(model).check()


def test_loading_a_checkpoint_after_the_call_is_the_new_baseline():
    """Megatron's usual order is freeze, wrap, load."""
    model, other = build(GPT), build(GPT, seed=7)
    handle = freeze_mtp(model)
    before = handle.fingerprint()
    model.load_state_dict(other.state_dict())
    assert handle.fingerprint() != before
    handle.check()
    with torch.no_grad():
        model.mtp.layers[0].enorm.weight += 1
    with pytest.raises(MTPChangedError):
        handle.check()


def test_loading_the_trunk_alone_does_not_hide_a_change():
    """Only what a state dict brings for the heads is a new baseline."""
    model = build(GPT)
    handle = freeze_mtp(model)
    trunk = {n: t for n, t in model.state_dict().items() if not n.startswith("mtp.")}
    with torch.no_grad():
        model.mtp.layers[0].enorm.weight += 1
    model.load_state_dict(trunk, strict=False)
    with pytest.raises(MTPChangedError, match=r"enorm\.weight changed while asleep"):
        handle.check()


@pytest.mark.parametrize(
    ("lose", "message"),
    [
        (lambda model: model.mtp.layers.__delitem__(0), r"mtp\.layers\.0\..* disappeared while asleep"),
        (lambda model: setattr(model, "mtp", None), "mtp is no longer the block that fell asleep"),
        (lambda model: setattr(model, "mtp", build(GPT, seed=4).mtp), "no longer the block"),
        (lambda model: model.mtp.register_buffer("extra", torch.zeros(1)), r"mtp\.extra appeared"),
    ],
    ids=["layer-deleted", "block-removed", "block-replaced", "buffer-added"],
)
def test_lost_heads_are_found_out(lose, message):
    """What is no longer there has not slept through."""
    model = build(GPT)
    handle = freeze_mtp(model)
    lose(model)
    with pytest.raises(MTPChangedError, match=message):
        handle.check()


class TestRefusals:
    """What cannot be honoured is refused, and the model is left as it was."""

    @pytest.fixture(autouse=True)
    def _nothing_is_left_behind(self, megatron_rank):
        self.model = build(GPT)
        self.expected = {n: p.requires_grad for n, p in self.model.named_parameters()}
        yield
        now = {n: p.requires_grad for n, p in self.model.named_parameters()}
        assert {n: now[n] for n in self.expected} == self.expected
        assert not any("_call_impl" in vars(m) or m._forward_pre_hooks for m in self.model.modules())

    def test_no_mtp(self):
        """Nothing to freeze is a mistake to hear about."""
        with pytest.raises(UnsupportedModelError, match="GPTModel has no MTP layers"):
            freeze_mtp(build(GPT, mtp=False))

    @pytest.mark.parametrize("argument", [None, [], ["model"]])
    def test_no_model(self, argument):
        """A clear message instead of an AttributeError."""
        with pytest.raises(UnsupportedModelError, match="freeze_mtp"):
            freeze_mtp(argument)

    def test_after_ddp(self):
        """DDP would already hold buffers for the heads."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        ddp = DistributedDataParallel(self.model.config, DistributedDataParallelConfig(), self.model)
        with pytest.raises(UnsupportedModelError, match=r"DistributedDataParallel.*\n.*before DDP"):
            freeze_mtp(ddp)
        with pytest.raises(UnsupportedModelError, match="already belongs to a DDP buffer"):
            freeze_mtp(self.model)

    def test_twice(self):
        """Two handles could not both be right."""
        model = build(GPT)
        handle = freeze_mtp(model)
        with pytest.raises(UnsupportedModelError, match="already asleep"):
            freeze_mtp(model)
        handle.check()

    def test_partly_frozen(self):
        """Half frozen by hand: which half is meant is not ours to guess."""
        self.model.mtp.layers[0].enorm.weight.requires_grad_(False)
        self.expected["mtp.layers.0.enorm.weight"] = False
        with pytest.raises(UnsupportedModelError, match=r"1 of \d+ parameters, the first layers\.0\.enorm"):
            freeze_mtp(self.model)

    def test_a_module_named_mtp_that_is_not_megatrons(self):
        """Unknown heads are not passed by on the strength of their name."""
        self.model.extra = torch.nn.ModuleDict({"mtp": torch.nn.Linear(2, 2)})
        with pytest.raises(UnsupportedModelError, match=r"extra\.mtp \(Linear\)"):
            freeze_mtp(self.model)

    def test_an_mtp_block_in_an_unknown_model(self):
        """The bypass is known for GPTModel and HybridModel only."""
        with pytest.raises(UnsupportedModelError, match=r"body \(MultiTokenPredictionBlock\)"):
            freeze_mtp(torch.nn.ModuleDict({"body": self.model.mtp}))

    def test_declared_but_not_built(self):
        """A spec without its MTP block loses the heads silently; not here."""
        model = build(GPT, mtp=False)
        model.config.mtp_num_layers = 1
        with pytest.raises(UnsupportedModelError, match="mtp_num_layers=1 but was built without"):
            freeze_mtp(model)

    def test_on_the_meta_device(self):
        """There are no bytes to retain yet."""
        model = build(GPT)
        model.mtp.to("meta")
        with pytest.raises(UnsupportedModelError, match="meta device"):
            freeze_mtp(model)

    def test_a_schedule_that_runs_mtp_without_forward(self):
        """Overlapped expert communication plans MTP layers by themselves."""
        self.model.config.overlap_moe_expert_parallel_comm = True
        with pytest.raises(UnsupportedModelError, match="schedule plan"):
            freeze_mtp(self.model)


def test_wrappers_are_seen_through():
    """Names in the proof are those from the root that was passed."""
    wrapper = torch.nn.ModuleDict({"vision": torch.nn.Linear(2, 2), "language_model": build(GPT)})
    names = freeze_mtp(wrapper).fingerprint()
    assert "language_model.mtp.layers.0.eh_proj.weight" in names


def test_chunks_are_told_apart():
    """A list of virtual pipeline chunks: names carry the chunk's index."""
    handle = freeze_mtp([build(GPT), build(GPT, seed=2)])
    assert {name.split(".")[0] for name in handle.fingerprint()} == {"0", "1"}


def test_importing_torpor_changes_nothing():
    """No import of torch, no patch: what is not called does not exist."""
    code = "import sys, torpor; assert 'torch' not in sys.modules and 'megatron' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
