"""What the site of the guide is made of beside Markdown: links out of ``docs/``, docstrings, nothing of other hosts."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from documents import ROOT

pytest.importorskip("mkdocstrings", reason="make venv installs it")


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module(name)


def page(uri: str) -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=uri))


@pytest.mark.parametrize(
    ("uri", "link", "shown"),
    [
        ("guide/plan.md", "[a](budgets.md#activations)", "[a](budgets.md#activations)"),
        ("guide/plan.md", "[a](../../README.md#what-it-costs)", "[a](../overview.md#what-it-costs)"),
        ("integrations.md", "[options](../offload/config.py)", "[options](reference/options.md)"),
        ("integrations.md", "[examples/](../examples)", "[examples/](examples.md)"),
        ("overview.md", "[QLoRA](examples/qlora.py)", "[QLoRA](examples.md#qlorapy)"),
        ("overview.md", "[ours](docs/swap.md#words)", "[ours](swap.md#words)"),
        ("results.md", "![curves](../docs/loss_curves.png)", "![curves](loss_curves.png)"),
        ("architecture.md", "of [the planner](../offload/planning/planner.py)", "of the planner"),
        ("architecture.md", "[gone](../offload/gone.py)", "[gone](../offload/gone.py)"),  # mkdocs tells of it
        (
            "gpu.md",
            "[there](https://pytorch.org) and [here](#above)",
            "[there](https://pytorch.org) and [here](#above)",
        ),
    ],
)
def test_links(uri: str, link: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = script("guide", monkeypatch)
    assert guide.on_page_markdown(link, page=page(uri), config=None, files=None) == shown


def test_nothing_comes_from_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = script("guide", monkeypatch)
    plugin_error = importlib.import_module("mkdocs.exceptions").PluginError
    fine = '<a href="https://pytorch.org">torch</a><img src="curves.png"><link rel="stylesheet" href="site.css">'
    assert guide.on_post_page(fine, page=page("index.md"), config=None) == fine
    for foreign in (
        '<script src="https://unpkg.com/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        "<img alt='' src='http://example.org/badge.svg'>",
    ):
        with pytest.raises(plugin_error, match=r"index\.md: expected files of the site alone but got"):
            guide.on_post_page(fine + foreign, page=page("index.md"), config=None)


def test_docstrings_as_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    markdown = script("guide_docstrings", monkeypatch).markdown
    link = '<autoref identifier="{}" optional>`{}`</autoref>'
    assert markdown("See :meth:`gather`.", "offload.Engine") == f"See {link.format('offload.Engine.gather', 'gather')}."
    assert markdown(":class:`offload.Config`", "x") == link.format("offload.Config", "offload.Config")
    assert markdown("So::\n\n    a = 1", "x") == "So:\n\n    a = 1"
    assert markdown("Text.\n\n::\n\n    a = 1", "x") == "Text.\n\n\n\n    a = 1"


def test_each_example_is_on_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = script("guide", monkeypatch).examples()
    for example in Path(ROOT / "examples").glob("*.py"):
        assert f"## {example.name}\n" in text and example.read_text(encoding="utf-8") in text
