"""Toolchains: what each NPU compiler of the Python package index needs, as frozen data; finding one, installing one.

Each lives in an environment of its own, is never a dependency of rollkv, and is installed only on request. Knows
nothing of graphs; `toolchain_try.py` drives what is found here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollkv.models.presets import cache_folder

MARK = "rollkv-toolchain"  # a file in an environment that was begun here: it may be made anew
CPU_TORCH = "https://download.pytorch.org/whl/cpu"


class ToolchainError(RuntimeError):
    """A toolchain that cannot be installed, or a tool that fails."""

    exit_code = 1


class ToolchainChoiceError(ValueError):
    """A toolchain that is not known, not installed or not asked for clearly; a folder or a Python that will not do."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """One compiler. Its packages are all that it takes: they are installed without asking for their dependencies."""

    name: str
    requirement: str  # distribution==version, as `Target.tool` has it
    script: str  # of rollkv.export.kit
    pythons: tuple[str, ...]  # versions that its wheels are for, the best first
    packages: tuple[str, ...]  # name==version, in the order of installation; the requirement is the last
    megabytes: int  # of the environment
    licence: str
    systems: tuple[str, ...] = ("linux",)  # sys.platform
    aside: tuple[str, ...] = ()  # files below site-packages to move away
    compiles_to_simulate: bool = False  # its simulator runs only what the same process compiled


TOOLCHAINS: Mapping[str, Toolchain] = {
    toolchain.name: toolchain
    for toolchain in (
        Toolchain(
            name="rknn",
            requirement="rknn-toolkit2==2.5.0",
            script="build_rknn.py",
            pythons=("3.11", "3.10", "3.12"),
            packages=(
                "setuptools==80.10.2", "numpy==1.26.4", "protobuf==4.25.4", "onnx==1.18.0", "flatbuffers==25.12.19",
                "packaging==26.4", "mpmath==1.3.0", "sympy==1.14.0", "onnxruntime==1.26.0", "psutil==7.2.2",
                "ruamel.yaml==0.19.1", "scipy==1.17.1", "tqdm==4.70.1", "opencv-python-headless==4.11.0.86",
                "fast-histogram==0.14", "filelock==4.3.1", "fsspec==2026.9.0", "MarkupSafe==3.0.4", "Jinja2==3.1.6",
                "networkx==3.6.1", "typing_extensions==4.16.0", "torch==2.13.0", "rknn-toolkit2==2.5.0",
            ),
            megabytes=1500,
            licence="Rockchip's own: for work with Rockchip products only",
            compiles_to_simulate=True,
        ),
        Toolchain(
            name="qnn",
            requirement="onnxruntime-qnn==2.7.0",
            script="build_qnn.py",
            pythons=("3.11", "3.12", "3.13"),
            packages=(
                "numpy==2.4.6", "flatbuffers==25.12.19", "packaging==26.4", "protobuf==7.36.2", "onnxruntime==1.32.0",
                "onnxruntime-qnn==2.7.0",
            ),
            megabytes=480,
            licence="MIT; Qualcomm's own for the libraries in it: development and benchmarking, no redistribution",
            systems=("linux", "win32"),
        ),
        Toolchain(
            name="sophgo",
            requirement="tpu-mlir==1.30.2",
            script="build_sophgo.py",
            pythons=("3.10",),
            packages=(
                "setuptools==65.5.0", "numpy==1.24.3", "protobuf==3.20.3", "onnx==1.14.1", "flatbuffers==25.12.19",
                "packaging==26.4", "mpmath==1.3.0", "sympy==1.14.0", "humanfriendly==10.0", "coloredlogs==15.0.1",
                "onnxruntime==1.16.3", "Pygments==2.21.0", "mdurl==0.1.2", "markdown-it-py==4.3.0", "rich==15.0.0",
                "onnxsim==0.4.17", "six==1.16.0", "pytz==2024.1", "tzdata==2024.1", "python-dateutil==2.9.0.post0",
                "pandas==2.0.3", "tenacity==8.2.3", "plotly==5.15.0", "Pillow==10.0.0", "filelock==4.1.0",
                "psutil==5.9.8", "tqdm==4.65.0", "typing_extensions==4.16.0", "opencv-python-headless==4.8.0.76",
                "tpu-mlir==1.30.2",
            ),
            megabytes=1560,
            licence="BSD-2-Clause, and those of the libraries in it",
            aside=("tpu_mlir/lib/third_party/libc.so.6", "tpu_mlir/lib/third_party/libm.so.6"),
        ),
        Toolchain(
            name="openvino",
            requirement="openvino==2026.4.0",
            script="build_openvino.py",
            pythons=("3.11", "3.12", "3.10", "3.13"),
            packages=("numpy==2.2.6", "openvino==2026.4.0"),
            megabytes=280,
            licence="Apache-2.0",
            systems=("linux", "win32", "darwin"),
        ),
        Toolchain(
            name="mnn",
            requirement="MNN==3.6.1",
            script="build_mnn.py",
            pythons=("3.11", "3.12", "3.10", "3.13"),
            packages=("numpy==2.2.6", "MNN==3.6.1"),
            megabytes=160,
            licence="Apache-2.0 (its package says BSD-3)",
            systems=("linux", "win32", "darwin"),
        ),
    )
}  # fmt: skip


def find_toolchain(name: str) -> Toolchain:
    """The toolchain of that name. Raises ToolchainChoiceError that lists those there are."""
    if name not in TOOLCHAINS:
        raise ToolchainChoiceError(f"toolchain {name!r} is unknown; allowed: {', '.join(TOOLCHAINS)}")
    return TOOLCHAINS[name]


def toolchain_of(requirement: str) -> Toolchain | None:
    """The toolchain whose distribution that is, whatever the version: "rknn-toolkit2==2.5.0"."""
    wanted = requirement.partition("==")[0].lower()
    return next((t for t in TOOLCHAINS.values() if t.requirement.partition("==")[0].lower() == wanted), None)


def default_environment(toolchain: Toolchain) -> Path:
    """Its environment below $ROLLKV_TOOLCHAINS, else below toolchains/ in the folder of fetched presets."""
    given = os.environ.get("ROLLKV_TOOLCHAINS")
    return (Path(given) if given else cache_folder() / "toolchains") / toolchain.name


def python_of(environment: Path) -> Path:
    """The interpreter of an environment."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def fault_of(toolchain: Toolchain, environment: Path) -> str | None:
    """What keeps an environment from being used, in words; None: it is complete."""
    if not python_of(environment).is_file():
        return "there is no Python in it" if environment.is_dir() else "there is no such folder"
    sites = [*environment.glob("lib/python3*/site-packages"), *environment.glob("Lib/site-packages")]
    name, _, version = toolchain.requirement.lower().replace("-", "_").partition("==")
    if not any(i.name.lower() == f"{name}-{version}.dist-info" for site in sites for i in site.glob("*.dist-info")):
        return f"{toolchain.requirement} is not in it"
    left = [file for site in sites for file in toolchain.aside if (site / file).exists()]
    return f"{left[0]} was not moved away" if left else None


def installed_python(toolchain: Toolchain, environment: Path | None = None) -> Path:
    """The interpreter of the environment, by default the one that `install` makes.

    Raises ToolchainChoiceError with the command that makes it.
    """
    folder = environment or default_environment(toolchain)
    fault = fault_of(toolchain, folder)
    if fault:
        into = f" --into {environment}" if environment else ""
        raise ToolchainChoiceError(
            f"toolchain {toolchain.name} is not installed in {folder} ({fault}): "
            f"rollkv toolchain install {toolchain.name}{into} "
            f"({toolchain.megabytes} MB; licence: {toolchain.licence})"
        )
    return python_of(folder)


def install(
    toolchain: Toolchain, environment: Path, python: str | None, torch_index: str | None, report: Callable[[str], None]
) -> None:
    """Make the environment; one that is complete stays, one that was begun here is made anew.

    python: the interpreter to make it with, None: this one or one on the PATH. torch_index: wheel index for the CPU
    build of torch, None: the usual one, or on Linux the PyTorch project's where the usual one has a CUDA build.
    Raises ToolchainChoiceError for a folder or a Python that will not do, ToolchainError when pip fails, OSError when
    the disk is full.
    """
    if fault_of(toolchain, environment) is None:
        report(f"{toolchain.requirement} is installed in {environment}")
        return
    if sys.platform not in toolchain.systems:
        raise ToolchainChoiceError(
            f"toolchain {toolchain.name} has no packages for {sys.platform}; there are some for "
            f"{', '.join(toolchain.systems)}"
        )
    if environment.exists() and not (environment / MARK).is_file() and not _is_empty(environment):
        raise ToolchainChoiceError(
            f"{environment} is there and was not made by rollkv toolchain install; take another folder with --into"
        )
    base = base_python(toolchain, python)
    environment.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(environment).free >> 20
    if free < toolchain.megabytes:
        if _is_empty(environment):
            environment.rmdir()
        text = f"No space left: {toolchain.name} takes {toolchain.megabytes} MB, {free} MB are free"
        raise OSError(28, text, str(environment))
    (environment / MARK).write_text(toolchain.requirement + "\n", encoding="utf-8")
    try:
        report(f"making {environment} with {base}")
        _run([base, "-m", "venv", "--clear", str(environment)], "venv", environment)
        (environment / MARK).write_text(toolchain.requirement + "\n", encoding="utf-8")
        pip = [
            str(python_of(environment)),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--disable-pip-version-check",
        ]
        plain = [package for package in toolchain.packages if not package.startswith("torch==")]
        torch = [package for package in toolchain.packages if package.startswith("torch==")]
        for packages in (torch, plain[:-1], plain[-1:]):  # the tool itself last: with it the environment is complete
            if packages:
                report(f"installing {', '.join(packages)}")
                index = torch_index or _cpu_index(pip, packages[0]) if packages is torch else None
                _run([*pip, *(["--index-url", index] if index else []), *packages], "pip", environment)
        for site in environment.glob("lib/python3*/site-packages"):
            for file in toolchain.aside:
                if (site / file).exists():
                    (site / file).rename(environment / Path(file).name)
    except BaseException:
        shutil.rmtree(environment, ignore_errors=True)
        raise
    fault = fault_of(toolchain, environment)
    if fault:
        raise ToolchainError(f"toolchain {toolchain.name}: pip ended well, but {fault} ({environment})")
    report(f"{toolchain.requirement} is installed in {environment}")


def base_python(toolchain: Toolchain, given: str | None) -> str:
    """An interpreter of a version that the toolchain takes. Raises ToolchainChoiceError when there is none."""
    wanted = " or ".join(toolchain.pythons)
    if given is not None:
        found = _version(given)
        if found not in toolchain.pythons:
            raise ToolchainChoiceError(
                f"--python {given}: is {f'Python {found}' if found else 'no Python'}; {toolchain.name} needs {wanted}"
            )
        return given
    for version in toolchain.pythons:
        if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
            return sys.executable
        candidate = shutil.which(f"python{version}")
        if candidate is not None and _version(candidate) == version:
            return candidate
    raise ToolchainChoiceError(
        f"toolchain {toolchain.name} needs Python {wanted}, which is not on the PATH: pass --python PATH"
    )


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _version(python: str) -> str | None:
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_index(pip: list[str], package: str) -> str | None:
    """The index that has a CPU build of torch; None: the usual one has."""
    if sys.platform != "linux":
        return None
    done = subprocess.run([*pip, "--dry-run", "--report", "-", package], capture_output=True, text=True, check=False)
    return None if "+cpu" in done.stdout else CPU_TORCH


def _run(command: list[str], what: str, environment: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        if any("No space left" in line for line in said):
            raise OSError(28, "No space left on device", str(environment))
        errors = [line for line in said if line.startswith("ERROR")] or said or ["it said nothing"]
        raise ToolchainError(f"{what} could not make {environment}: {errors[-1].removeprefix('ERROR: ')}")
