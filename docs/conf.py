"""Settings of the documentation: ``python -m sphinx docs site`` writes ``site/index.html``, with search."""

import funcckpt

project = "funcckpt"
release = funcckpt.__version__
html_theme = "furo"
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # the docstrings say it in words
napoleon_google_docstring = False
