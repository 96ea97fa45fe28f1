import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rollkv.runtime.session

RUNTIME = Path(rollkv.runtime.session.__file__).parent
MODULES = sorted(RUNTIME.glob("*.py"))
LATE = {"onnxruntime", "tokenizers", "jinja2"}
BLOCKED = (
    "torch",
    "onnx",
    "onnxsim",
    "onnxscript",
    "transformers",
    "gguf",
    "safetensors",
    "rich",
    "accelerate",
    "matplotlib",
)

BLOCK = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r} or name.startswith(("rollkv.export", "rollkv.models")):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
"""


def python(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imports(tree):
    """(module, at top level) of every import, those under `if TYPE_CHECKING` left out."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.above = node
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        above, top, typing_only = node.above, True, False
        while not isinstance(above, ast.Module):
            top &= not isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef))
            typing_only |= isinstance(above, ast.If) and ast.unparse(above.test) == "TYPE_CHECKING"
            above = above.above
        if typing_only:
            continue
        assert not getattr(node, "level", 0), "relative import"
        for name in [node.module] if isinstance(node, ast.ImportFrom) else [item.name for item in node.names]:
            yield name, top


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.name)
def test_a_module_imports_only_the_runtime_numpy_and_the_standard_library(file):
    for name, top in imports(ast.parse(file.read_text("utf-8"))):
        if name.startswith("rollkv"):
            assert name.startswith("rollkv.runtime"), f"{file.name} imports {name}"
            continue
        package = name.split(".")[0]
        late = LATE | ({"matplotlib"} if file.name == "bench_plot.py" else set())
        allowed = package in sys.stdlib_module_names or package == "numpy" or (package in late and not top)
        assert allowed, f"{file.name} imports {name}"


def test_the_walk_over_imports_sees_what_it_should():
    code = (
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\ndef f():\n    import g\nclass H:\n    import i\n"
    )
    assert sorted(imports(ast.parse(code))) == [("a.b", True), ("c", True), ("g", False), ("i", True)]


def test_a_bundle_runs_where_nothing_of_the_exporter_is_installed(bundle):
    opened = bundle("llama")
    code = """
from rollkv.runtime import Session
session = Session(sys.argv[1], threads=1)
logits = session.prefill(range(1, 12))
logits = session.decode(3)
reply = session.generate([5], max_new_tokens=3, ignore_eos=True)
print(*list(reply))
"""
    here = rollkv.runtime.session.Session(opened, threads=1)
    here.prefill(range(1, 12))
    here.decode(3)
    want = list(here.generate([5], max_new_tokens=3, ignore_eos=True))
    assert [int(word) for word in python(BLOCK + code, str(opened.path)).split()] == want


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.name)
def test_a_module_imports_where_nothing_else_is_installed(file):
    name = "rollkv.runtime" if file.stem == "__init__" else f"rollkv.runtime.{file.stem}"
    blocked = repr((*BLOCKED, *sorted(LATE)))
    python(BLOCK.replace(repr(BLOCKED), blocked) + f"import {name}")


def test_importing_the_runtime_loads_nothing_heavy():
    code = """
import sys
import rollkv.runtime
assert "numpy" not in sys.modules
from rollkv.runtime import Chat, SamplingOptions, Session, open_bundle
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""
    loaded = set(python(code).split())
    assert "numpy" in loaded
    assert not loaded & {"torch", "onnx", "onnxruntime", "tokenizers", "jinja2", "transformers", "rich"}


def test_a_name_that_the_runtime_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'rollkv\.runtime' has no attribute 'Sesion'"):
        rollkv.runtime.Sesion  # noqa: B018


def test_every_public_name_can_be_imported():
    for name in rollkv.runtime.__all__:
        assert getattr(rollkv.runtime, name).__name__ == name
