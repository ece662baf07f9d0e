"""vLLM plugin: DeepSeek V4's DSpark draft keeps its embeddings 2-D into its first layer, without the repeat.

vLLM loads `register` in every process through the entry point group `vllm.general_plugins`. It imports nothing of vLLM:
a DSpark module is patched when vLLM imports it, so every other model is served as if this package were not there.
`python -m mhc vllm-status` says what would be changed in the installed vLLM, and why, without a GPU.

Environment:
    MHC_DISABLE: 1 turns the plugin off.
    MHC_FIRST_PRE: `auto` (default), `vllm`, `fused` or `table`, what computes the draft's first pre.
    MHC_POST_PRE: `vllm` (default) or `ours`, the kernel of every other post + pre of V4's target and draft.
"""

from __future__ import annotations

import logging
import os
from types import ModuleType

logger = logging.getLogger("vllm.plugins.mhc")


def register() -> None:
    """Arrange for the DSpark modules to be patched; calling it again changes nothing.

    Raises:
        ValueError: an environment variable has an unknown value.
    """
    from mhc.vllm_plugin import post_pre
    from mhc.vllm_plugin.after_import import after_import
    from mhc.vllm_plugin.first_pre import CHOICES
    from mhc.vllm_plugin.installed import MODELS, draft_module

    disabled = _one_of("MHC_DISABLE", ("0", "1"))
    choice = _one_of("MHC_FIRST_PRE", CHOICES)
    of_layers = _one_of("MHC_POST_PRE", post_pre.CHOICES)
    if disabled == "1":
        logger.info("mhc: off, MHC_DISABLE is 1")
        return
    after_import([draft_module(model) for model in MODELS], lambda module: _patch(module, choice, of_layers))


def _one_of(name: str, accepted: tuple[str, ...]) -> str:
    value = os.environ.get(name) or accepted[0]
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")
    return value


def _patch(module: ModuleType, choice: str, of_layers: str) -> None:
    """Patch or leave alone, with one line that says which; an unknown vLLM must still serve."""
    from mhc.vllm_plugin import installed
    from mhc.vllm_plugin.patch import patch
    from mhc.vllm_plugin.source import Mismatch

    version = (installed.find() or ("unknown",))[0]
    try:
        match, _ = patch(module, choice, of_layers)
    except Mismatch as error:
        logger.warning("mhc: vLLM %s left unpatched, %s: %s", version, module.__name__, error)
    except Exception as error:
        logger.warning("mhc: vLLM %s left unpatched, %s: %s: %s", version, module.__name__, type(error).__name__, error)
    else:
        logger.info("mhc: vLLM %s, %s line %d is now conditional: %s", version, module.__name__, match.line,
                    match.statement)  # fmt: skip
