"""Names of ``ds_ext`` and their documentation."""

from __future__ import annotations

import inspect
import operator
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import deepspeed.pipe
import pytest

import ds_ext
from ds_ext.engine.engine import PipelineEngine
from ds_ext.engine.module import PipelineModule


def test_dir_lists_the_api_and_imports_nothing() -> None:
    code = "import sys, ds_ext; print(*dir(ds_ext), *{'torch', 'deepspeed'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(ds_ext.__all__)


def test_every_name_exists() -> None:
    assert all(getattr(ds_ext, name) is not None for name in ds_ext.__all__)
    assert ds_ext.PipelineModule is PipelineModule
    assert ds_ext.LayerSpec is deepspeed.pipe.LayerSpec
    assert ds_ext.TiedLayerSpec is deepspeed.pipe.TiedLayerSpec
    with pytest.raises(AttributeError, match="PipelineModul'"):
        operator.attrgetter("PipelineModul")(ds_ext)


def test_the_help_of_the_module_is_ours() -> None:
    text = pydoc.plain(pydoc.render_doc(ds_ext.PipelineModule))
    assert "schedule_options" in text and "Initialize internal Module state" not in text


def test_the_page_has_the_methods_of_the_engine() -> None:
    """Its own ones: those that DeepSpeed's engine has too are documented there, unless they are on the page."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    block = page.partition("PipelineEngine\n")[2].partition("\n:::")[0]
    (members,) = (set(re.findall(r"\w+", text)) for text in re.findall(r"members: \[(.*)\]", block))
    documented = {
        name
        for name, value in vars(PipelineEngine).items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__doc__
    }
    assert documented - members <= {"use_transport", "gather_numbers", "average_buffers"}
    assert members <= documented
