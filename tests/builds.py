"""Which models a run builds, and how."""

from torpor.megatron.models import build_model


def record_builds(monkeypatch, describe):
    """Have runs build as ever, and note of every model what `describe(options, chunks)` says, in order."""
    built = []

    def build(*args, **options):
        chunks = build_model(*args, **options)
        built.append(describe(options, chunks))
        return chunks

    for run in ("distill", "sft"):
        monkeypatch.setattr(f"torpor.runs.{run}.build_model", build)
    return built


def record_impls(monkeypatch):
    """Note the `transformer_impl` that every model of a run is built with."""
    return record_builds(monkeypatch, lambda options, _: options["transformer_impl"])
