"""The host side of a bundle, in NumPy over ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollkv.runtime.align import LimitError, PromptError
    from rollkv.runtime.backend import BackendError
    from rollkv.runtime.bundle import Bundle, open_bundle
    from rollkv.runtime.chat import Chat
    from rollkv.runtime.generation import Generation
    from rollkv.runtime.loaded import LoadedBundle
    from rollkv.runtime.manifest import BundleError
    from rollkv.runtime.prefix import PrefixError
    from rollkv.runtime.prefix_store import PrefixStore
    from rollkv.runtime.sampling import NonFiniteLogits, SamplingError, SamplingOptions
    from rollkv.runtime.session import Session
    from rollkv.runtime.snapshot import Snapshot
    from rollkv.runtime.speculation import DraftModel, PromptLookup, SpeculationError

__all__ = [
    "BackendError",
    "Bundle",
    "BundleError",
    "Chat",
    "DraftModel",
    "Generation",
    "LimitError",
    "LoadedBundle",
    "NonFiniteLogits",
    "PrefixError",
    "PrefixStore",
    "PromptError",
    "PromptLookup",
    "SamplingError",
    "SamplingOptions",
    "Session",
    "Snapshot",
    "SpeculationError",
    "open_bundle",
]

_HOME = {
    "BackendError": "backend",
    "Bundle": "bundle",
    "BundleError": "manifest",
    "Chat": "chat",
    "DraftModel": "speculation",
    "Generation": "generation",
    "LimitError": "align",
    "LoadedBundle": "loaded",
    "NonFiniteLogits": "sampling",
    "PrefixError": "prefix",
    "PrefixStore": "prefix_store",
    "PromptError": "align",
    "PromptLookup": "speculation",
    "SamplingError": "sampling",
    "SamplingOptions": "sampling",
    "Session": "session",
    "Snapshot": "snapshot",
    "SpeculationError": "speculation",
    "open_bundle": "bundle",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts fast."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rollkv.runtime.{_HOME[name]}"), name)
