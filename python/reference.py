"""Prints docs/python-api.md, the reference of the package shoal, from its docstrings: see `make docs`."""

import inspect
import sys
from unittest import mock
sys.modules.update(numpy=mock.MagicMock(), grpc=mock.MagicMock())  # only names and texts are read
import shoal  # noqa: E402

HEAD = """# The Python reference

After this page you can look up every public name of the package `shoal`: its signature, shapes, units and errors.

Generated from the docstrings by `make docs`; a test holds it to them. [python.md](python.md) is the manual.
"""


class Annotation(str):
    """An annotation as it stands in the source, without quotation marks."""
    def __repr__(self):
        return self.replace('"', "").replace("'", "")


def plain(annotation):
    text = getattr(annotation, "__forward_arg__", annotation)  # a NamedTuple has objects there
    return Annotation(text) if isinstance(text, str) else annotation


def signature(name, function):
    """The call as Python code, one argument a line where it is long."""
    found = inspect.signature(function)
    given = [p.replace(annotation=plain(p.annotation))
             for p in found.parameters.values() if p.name not in ("self", "_cls")]
    text = name + str(inspect.Signature(given, return_annotation=plain(found.return_annotation)))
    if len(text) <= 110:
        return text
    lines = ["    " + str(inspect.Signature([p]))[1:-1].replace("*, ", "") + "," for p in given]
    at = sum(p.kind is not p.KEYWORD_ONLY for p in given)
    lines[at:at] = ["    *,"] if at < len(given) else []
    return "\n".join([f"{name}(", *lines, text[text.rindex(")"):]])


def section(level, title, code, thing):
    text = inspect.getdoc(thing) or sys.exit(f"shoal: {title} has no docstring")
    title = title.replace("__", "\\_\\_")
    print(f"\n{'#' * level} {title}\n\n```python\n{code}\n```\n\n```text\n{text}\n```")


print(HEAD, end="")
for name in (n for n in shoal.__all__ if n != "__version__"):
    thing = getattr(shoal, name)
    if not inspect.isclass(thing):
        section(2, name, signature(f"shoal.{name}", thing), thing)
    else:
        call = signature(f"shoal.{name}", vars(thing).get("__init__", thing.__new__)).replace(" -> None", "")
        section(2, name, f"class {call}", thing)
    for inner, value in vars(thing).items():  # a function has none
        if isinstance(value, property):
            section(3, f"{name}.{inner}", signature(inner, value.fget).replace("() ->", ":", 1), value)
        elif inspect.isfunction(value) and (inner[0] != "_" or inner == "__len__"):
            section(3, f"{name}.{inner}", signature(inner, value), value)
print("\n## \\_\\_version\\_\\_\n\nThe version of the client, a `str`.")
