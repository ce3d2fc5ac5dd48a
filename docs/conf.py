# SPDX-License-Identifier: Apache-2.0
"""How Sphinx builds these pages: `python -m sphinx -W docs docs/_build/html`; the notebooks are executed."""

import nccl_m2n

project = "nccl_m2n"
author = "The nccl_m2n developers"
copyright = "2026, the nccl_m2n developers"
version = release = nccl_m2n.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"nccl_m2n {release}"
html_static_path = ["_static"]

# A notebook that fails, or hangs, fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "code"  # `name` in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say shape and unit, which a type cannot
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
