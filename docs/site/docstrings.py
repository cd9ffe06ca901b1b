"""What the reference takes from the code besides plain docstrings."""

import re

import griffe


class HouseStyle(griffe.Extension):
    """Comments on fields, such as shapes, are their descriptions; `a, b: text` describes two arguments."""

    def on_package(self, *, pkg, **kwargs):
        """A subpackage's `__all__` says which names of its modules are public, of modules without one."""
        for package in pkg.modules.values():
            for module in package.modules.values():
                if package.exports and module.exports is None and module.name not in package.exports:
                    for name, member in module.members.items():
                        member.public = name in package.exports

    def on_attribute_instance(self, *, attr, **kwargs):
        """A trailing comment, or else, of a field, the comment above, where there is no docstring."""
        if attr.docstring is None and attr.lines:
            _, _, comment = attr.lines[-1].partition("  # ")
            if isinstance(attr.parent, griffe.Class) and not comment:
                above = attr.parent.parent.lines_collection[attr.filepath][: attr.lineno - 1]
                comment = " ".join(_comments_at_the_end(above))
            if comment:
                attr.docstring = griffe.Docstring(_as_markdown(comment), parent=attr)

    def on_function_instance(self, *, func, **kwargs):
        """Each of several arguments that share a line gets one of its own; the checks of a dataclass are not shown."""
        func.public = False if func.name == "__post_init__" else func.public
        if func.docstring is not None:
            func.docstring.value = re.sub(
                r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 .*)*)", _one_by_one, func.docstring.value, flags=re.MULTILINE
            )


def _comments_at_the_end(lines):
    comments = []
    while lines and lines[-1].strip().startswith("#"):
        lines, comments = lines[:-1], [lines[-1].strip("# "), *comments]
    return comments


def _as_markdown(comment):
    """Shapes at the beginning are code: Markdown would read their brackets as a link."""
    return re.sub(r"\[[^\]]*\](?! or \[)", lambda shape: f"`{shape[0]}`", comment)


def _one_by_one(match):
    indent, names, text = match.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))
