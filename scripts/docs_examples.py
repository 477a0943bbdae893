"""An extension of griffe, which reads docstrings for the site: examples are blocks of code."""

from typing import Any

import griffe

from scripts.docs_site import with_example


class Examples(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = with_example(obj.docstring.value)
