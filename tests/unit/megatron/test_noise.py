"""Upstream notices stay off the screen; errors, and everything of Torpor's own, stay on it."""

import os
import subprocess
import sys
import textwrap

import pytest

CODE = """
    import logging, warnings
    from torpor.megatron.noise import silence_upstream_notices
    silence_upstream_notices()
    silence_upstream_notices()
    for module in ("megatron.core.models.backends", "modelopt.torch.distill", "torpor.training", "torch.nn"):
        space = {"__name__": module, "warnings": warnings, "logging": logging}
        exec("warnings.warn('warning of ' + __name__)", space)
        exec("logging.getLogger(__name__).warning('log of ' + __name__)", space)
        exec("logging.getLogger(__name__).error('error of ' + __name__)", space)
"""


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | environment,
    )
    return result.stdout + result.stderr


def test_upstream_warnings_are_hidden_and_errors_and_torpors_own_are_not() -> None:
    printed = run_python(CODE)
    for module in ("megatron.core.models.backends", "modelopt.torch.distill"):
        assert f"warning of {module}" not in printed
        assert f"log of {module}" not in printed
        assert f"error of {module}" in printed
    for module in ("torpor.training", "torch.nn"):
        assert f"warning of {module}" in printed
        assert f"log of {module}" in printed


def test_warnings_of_the_compiler_are_hidden_for_upstream_files_only() -> None:
    printed = run_python(
        r"""
        from torpor.megatron.noise import silence_upstream_notices
        silence_upstream_notices()
        for path in ("/lib/megatron/core/a.py", "/lib/torpor/megatron_like.py"):
            compile(r"'\-'", path, "exec")
        """
    )
    assert "megatron/core/a.py" not in printed
    assert "torpor/megatron_like.py" in printed


def test_an_environment_variable_shows_all() -> None:
    printed = run_python(CODE, TORPOR_UPSTREAM_NOTICES="1")
    assert "warning of megatron.core.models.backends" in printed
    assert "log of modelopt.torch.distill" in printed


def test_a_level_that_the_application_set_is_kept() -> None:
    assert "log of megatron.core.models.backends" in run_python(
        'import logging; logging.getLogger("megatron").setLevel("INFO")\n' + textwrap.dedent(CODE)
    )


@pytest.mark.parametrize(("shown", "silent"), [("0", True), ("1", False)])
def test_megatrons_real_notices(shown: str, silent: bool) -> None:
    """Importing Megatron, building a GPTModel: silent for Torpor's users, and not silent by itself."""
    printed = run_python(
        """
        from torpor.megatron.host import prepare_host
        prepare_host()
        from torpor.megatron import parallel
        parallel.initialize(parallel.Layout(), seed=1)
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer import TransformerConfig
        from torpor.megatron import specs
        import megatron.core.optimizer
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        GPTModel(config, specs.gpt_layer_spec(config), 8, 8)
        parallel.shutdown()
        """,
        TORPOR_UPSTREAM_NOTICES=shown,
    )
    assert (printed == "") == silent, printed
