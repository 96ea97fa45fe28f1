"""The host side of a bundle, in NumPy over ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollkv.runtime.bundle import Bundle, open_bundle
    from rollkv.runtime.chat import Chat
    from rollkv.runtime.loaded import LoadedBundle
    from rollkv.runtime.prefix_store import PrefixStore
    from rollkv.runtime.sampling import SamplingOptions
    from rollkv.runtime.session import Session
    from rollkv.runtime.speculation import DraftModel, PromptLookup

__all__ = [
    "Bundle",
    "Chat",
    "DraftModel",
    "LoadedBundle",
    "PrefixStore",
    "PromptLookup",
    "SamplingOptions",
    "Session",
    "open_bundle",
]

_HOME = {
    "Bundle": "bundle",
    "Chat": "chat",
    "DraftModel": "speculation",
    "LoadedBundle": "loaded",
    "PrefixStore": "prefix_store",
    "PromptLookup": "speculation",
    "SamplingOptions": "sampling",
    "Session": "session",
    "open_bundle": "bundle",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts fast."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rollkv.runtime.{_HOME[name]}"), name)
