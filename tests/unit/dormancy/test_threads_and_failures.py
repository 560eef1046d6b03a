"""Exceptions, several models and several threads: nothing is left behind and nobody gets a silent mixture.

`InferenceMode` and `handle.awake()` hold for the whole process, upstream's and ours alike. So what holds is:
models do not affect each other; sleeping forwards of one model may overlap; and a sleeping forward that would
overlap with an awake or inference forward of the same model is refused, whichever begins second.
"""

import threading

import pytest
import torch

from parity import assert_same, run
from tiny_models import GPT, GPT_MOE, HYBRID, HYBRID_MOE, batch, build, build_pair, differing, same_bytes
from torpor import TorporError, freeze_mtp


def everything(model):
    """Return all there is to a model: attributes, hooks, trainability, names."""
    hooks = [name for name in vars(torch.nn.Module()) if name.endswith("_hooks")]
    return {
        name: (dict(vars(module)), [dict(getattr(module, hook)) for hook in hooks])
        for name, module in model.named_modules()
    } | {name: p.requires_grad for name, p in model.named_parameters()}


class TestFailures:
    """An exception inside forward, of any kind and anywhere, leaves no trace."""

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
    @pytest.mark.parametrize("place", ["embedding", "decoder", "output_layer"])
    @pytest.mark.parametrize("kind", [GPT, HYBRID_MOE], ids=str)
    def test_inside_forward(self, kind, place, error):
        """Config, hooks, attributes and keys are as before, and the next step is right."""
        dormant, reference = build_pair(kind)
        handle = freeze_mtp(dormant)
        keys = list(dormant.state_dict())

        def fail(*_):
            raise error

        hook = getattr(dormant, place).register_forward_pre_hook(fail)
        before = everything(dormant)
        with pytest.raises(error):
            dormant(**batch())
        assert everything(dormant) == before
        hook.remove()
        assert list(dormant.state_dict()) == keys
        assert dormant.config.mtp_num_layers == kind.depths
        assert_same(dormant, reference)
        handle.check()

    def test_inside_awake(self):
        """The heads fall asleep again."""
        dormant, reference = build_pair(GPT)
        handle = freeze_mtp(dormant)
        with pytest.raises(RuntimeError, match="on purpose"), handle.awake():
            raise RuntimeError("on purpose")
        assert_same(dormant, reference)

    def test_out_of_memory_in_backward(self):
        """Backward is not ours at all."""
        dormant, reference = build_pair(GPT)
        freeze_mtp(dormant)
        output = dormant(**batch())
        output.register_hook(lambda grad: (_ for _ in ()).throw(torch.OutOfMemoryError("on purpose")))
        with pytest.raises(torch.OutOfMemoryError):
            output.sum().backward()
        assert_same(dormant, reference)


@pytest.mark.parametrize("kind", [GPT, GPT_MOE, HYBRID, HYBRID_MOE], ids=str)
def test_after_remove_nothing_tells_the_model_from_one_that_was_never_frozen(kind):
    """Attributes, hooks, outputs and every gradient, after sleeping steps in between."""
    model, twin = build(kind), build(kind)
    before = everything(model)
    handle = freeze_mtp(model)
    run(model)
    model.zero_grad()
    handle.remove()
    assert everything(model) == before
    torch.manual_seed(0)
    output, grads = run(model)
    torch.manual_seed(0)
    expected, expected_grads = run(twin)
    assert any(name.startswith("mtp.") for name in grads)
    assert same_bytes(output, expected)
    assert differing(grads, expected_grads) == []
    assert (
        differing(
            {n: t for n, t in model.state_dict().items() if t is not None},
            {n: t for n, t in twin.state_dict().items() if t is not None},
        )
        == []
    )


class TestTwoModels:
    """One frozen and one not, in one process."""

    @pytest.mark.parametrize("kind", [GPT, HYBRID_MOE], ids=str)
    def test_steps_in_turn(self, kind):
        """The free one runs its heads, the frozen one does not, in any order."""
        dormant, reference = build_pair(kind)
        free, twin = build(kind, seed=4), build(kind, seed=4)
        handle = freeze_mtp(dormant)
        for _ in range(2):
            assert_same(free, twin)
            assert_same(dormant, reference)
        assert any(n.startswith("mtp.") for n, p in free.named_parameters() if p.grad is not None)
        handle.check()

    def test_a_config_they_share(self):
        """Two models built from one config object: only the frozen one's view of it changes."""
        dormant, reference = build_pair(GPT)
        free, twin = build(GPT, seed=4), build(GPT, seed=4)
        free.config = dormant.config
        freeze_mtp(dormant)

        def run_the_free_one(*_):
            assert_same(free, twin)

        hook = dormant.decoder.register_forward_hook(run_the_free_one)
        output = dormant(**batch())
        hook.remove()
        assert same_bytes(output, reference(**batch()))


class Paused:
    """A forward in another thread that stops inside the decoder until it is let go."""

    def __init__(self, model, **inputs):
        self.inside, self.go = threading.Event(), threading.Event()
        self.result = None
        self._hook = model.decoder.register_forward_hook(self._wait)
        self._thread = threading.Thread(target=self._run, args=(model, inputs))

    def _wait(self, *_):
        if threading.current_thread() is self._thread:
            self.inside.set()
            assert self.go.wait(60)

    def _run(self, model, inputs):
        try:
            self.result = model(**batch() | inputs)
        except BaseException as error:
            self.result = error
            self.inside.set()

    def __enter__(self):
        self._thread.start()
        assert self.inside.wait(60)
        return self

    def __exit__(self, *_):
        self.go.set()
        self._thread.join()
        self._hook.remove()


class TestThreads:
    """Forwards that overlap in time."""

    def test_inference_in_one_model_while_another_trains(self):
        """Upstream's flag is the process's: a training forward under it is refused by Megatron itself."""
        from megatron.core.inference.utils import InferenceMode

        dormant, reference = build_pair(GPT)
        server = build(GPT, seed=4).eval()
        handles = freeze_mtp(dormant), freeze_mtp(server)
        inference = {"labels": None, "runtime_gather_output": True}
        with Paused(dormant) as training, InferenceMode.active(), torch.no_grad():
            logits = server(**batch() | inference)
            with pytest.raises(AssertionError, match="Inference must always gather"):
                reference(**batch())
        assert same_bytes(training.result, reference(**batch()))
        with InferenceMode.active(), torch.no_grad():
            assert same_bytes(server(**batch() | inference), logits)
        for handle in handles:
            handle.check()

    def test_inference_in_the_model_that_trains_is_refused(self):
        """It would read the config without MTP and save nothing for the heads to draft from."""
        from megatron.core.inference.utils import InferenceMode

        dormant, reference = build_pair(GPT)
        handle = freeze_mtp(dormant)
        with Paused(dormant) as training:
            inputs = batch() | {"labels": None, "runtime_gather_output": True}
            with InferenceMode.active(), torch.no_grad(), pytest.raises(TorporError, match="another forward"):
                dormant(**inputs)
        assert same_bytes(training.result, reference(**batch()))
        handle.check()

    def test_training_in_the_model_that_infers_is_refused(self):
        """The other way round."""
        from megatron.core.inference.utils import InferenceMode

        model = build(GPT)
        handle = freeze_mtp(model)
        InferenceMode.set_active()
        try:
            with Paused(model, labels=None, runtime_gather_output=True) as inference:
                InferenceMode.unset_active()
                with pytest.raises(TorporError, match="runs its MTP layers, awake or in inference"):
                    model(**batch())
                InferenceMode.set_active()
        finally:
            InferenceMode.unset_active()
        assert inference.result.shape == (2, 16, 64)
        model(**batch())
        handle.check()

    def test_waking_the_heads_in_the_middle_of_a_sleeping_forward(self):
        """It was asleep when it began and stays so; before, it returned trunk and heads joined together."""
        dormant, reference = build_pair(GPT)
        handle = freeze_mtp(dormant)
        training = Paused(dormant, labels=None)
        training.__enter__()
        with handle.awake():
            with pytest.raises(TorporError, match="one with its MTP layers asleep"):
                dormant(**batch())
            training.__exit__()
        assert same_bytes(training.result, reference(**batch() | {"labels": None}))
        handle.check()

    def test_many_threads_train_two_models(self):
        """Sleeping forwards of one model overlap freely, beside a free model's."""
        dormant, reference = build_pair(HYBRID)
        free = build(HYBRID, seed=4)
        expected, expected_free = reference(**batch()), free(**batch())
        config = dormant.config
        handle = freeze_mtp(dormant)
        results = []

        def work(model, right):
            results.extend(same_bytes(model(**batch()), right) for _ in range(5))

        threads = [threading.Thread(target=work, args=(dormant, expected)) for _ in range(3)]
        threads.append(threading.Thread(target=work, args=(free, expected_free)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 20
        assert dormant.config is config
        handle.check()
