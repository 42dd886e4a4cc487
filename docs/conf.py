"""Configuration of the documentation site. The source folder is the repository, so that pages can link to results/."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "csda"
author = "The csda developers"
copyright = f"2026, {author}"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "results/*.md", "results/**/*.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
exclude_patterns = [".*", "build", "dist", "src", "tests", "runs", "demo", "docs/templates", "docs/_*", "**/.*"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # a test executes the notebook

autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
default_role = "code"  # docstrings write code in single backticks

templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme = "pydata_sphinx_theme"
html_title = "csda"
html_additional_pages = {"index": "redirect.html"}
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
