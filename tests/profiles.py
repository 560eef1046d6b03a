"""What a training step asks of torch and of the device, as torch.profiler records it."""

from torch.profiler import ProfilerActivity, profile

from parity import run

# Without cudaEventQuery: allocators ask by it whether memory is free again, as often as they get to it.
SYNCHRONISING = ("Synchronize", "cudaMemcpy")


def operators(model, **inputs):
    """Return the names of all operators of one forward and backward, autograd's nodes included, in order."""
    run(model, **inputs)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run(model, **inputs)
    events = sorted(recorded.events(), key=lambda event: event.id)
    return [event.name for event in events if not event.name.startswith("[")]


def kernels_and_synchronisations(model, **inputs):
    """Return the names of the device's kernels and copies, and how often the host waited for it.

    By name, not in order: Transformer Engine's grouped products run on several streams.
    """
    import torch
    from torch.autograd import DeviceType

    run(model, **inputs)
    model.zero_grad()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run(model, **inputs)
    kernels = [event.name for event in recorded.events() if event.device_type == DeviceType.CUDA]
    waits = [event.name for event in recorded.events() if any(w in event.name for w in SYNCHRONISING)]
    return sorted(kernels), sorted(waits)
