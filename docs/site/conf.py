"""The site of the documentation: `make docs`.

Pages are the Markdown files of docs/ and benchmarks/, as they are read on a code host.
Their Python blocks are executed while the site is built, those of one page after
another in one kernel, and what they print and draw stands below them. A block that a
reader should see and no build can run is preceded by a comment that says why:
`<!-- not run: why -->`.
"""

import importlib.util
import re
import sys
from pathlib import Path

import bilevax

sys.path.insert(0, str(Path(__file__).parent))

project = "bilevax"
author = "The bilevax authors"
copyright = "the bilevax authors, Apache-2.0"
release = version = bilevax.__version__

extensions = ["myst_nb", "sphinx_gallery.gen_gallery"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/gallery/*.rst", "benchmarks/*.md", "*.md"]
exclude_patterns = ["README.md", "**/sg_execution_times.rst"]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}

# The gallery is made from the examples that are part of the package, which are run.
sphinx_gallery_conf = dict(
    examples_dirs="src/bilevax/examples",
    gallery_dirs="docs/gallery",
    filename_pattern=r"/[a-z]\w*\.py$",
    ignore_pattern=r"__init__",
    abort_on_example_error=True,
    show_signature=False,
    remove_config_comments=True,
    image_srcset=["2x"],
    matplotlib_animations=False,
)
# Links to headings, as code hosts make them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Tables of benchmarks quote one heading in several places.
suppress_warnings = ["myst.header"]

nb_execution_mode = "force"
nb_execution_timeout = 900
# Pages write files.
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_show_tb = True
# What libraries say on standard error while they compile is no result.
nb_output_stderr = "remove"
nb_merge_streams = True

# Formulas and shells are no Python.
highlight_language = "text"

html_theme = "furo"
html_title = f"bilevax {release}"
html_static_path = ["static"]
html_css_files = ["bilevax.css"]
html_extra_path = ["extra"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = dict(
    light_css_variables={
        "color-brand-primary": "#0b6e99",
        "color-brand-content": "#0b6e99",
    },
    dark_css_variables={
        "color-brand-primary": "#6cb8dd",
        "color-brand-content": "#6cb8dd",
    },
    navigation_with_keys=True,
)

_KERNEL = """---
file_format: mystnb
kernelspec:
  name: python3
language_info:
  name: python
  pygments_lexer: ipython3
---
"""
_BLOCK = re.compile(r"(<!-- not run:[^>]*-->\s*\n)?```python\n")
# What is shown is made from the code, or is a record of runs.
_SHOWN = re.compile(r"docs/reference|benchmarks/|[A-Z]+$")


# Pages about other packages, whose code is shown and not run where these are missing.
_ABOUT = {"docs/cvxpy": "cvxpy", "docs/torch": "torch"}


def as_notebook(app, name: str, source: list[str]) -> None:
    """Turn the Python blocks of a page into cells."""
    text = source[0].replace("](../README.md", "](index.md")
    missing = name in _ABOUT and importlib.util.find_spec(_ABOUT[name]) is None
    if missing:
        print(f"{name}: its code is not run, for {_ABOUT[name]} is not installed")
    if missing or _SHOWN.match(name) or not _BLOCK.search(text):
        source[0] = text
        return
    cell = lambda found: found[0] if found[1] else "```{code-cell} ipython3\n"
    source[0] = _KERNEL + _BLOCK.sub(cell, text)


def setup(app):
    app.connect("source-read", as_notebook)
