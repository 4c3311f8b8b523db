"""What a chat template expects of messages, read off its syntax tree; renders nothing.

Templates disagree on content as a text or a list, on content that is null, and on a call's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import meta, nodes

# Filters through which a list is still the same list.
_LIST_FILTERS = frozenset({"list", "reject", "rejectattr", "reverse", "select", "selectattr"})


@dataclass(frozen=True, slots=True)
class Dialect:
    uses_tools: bool  # reads the variable `tools`
    content_as_parts: bool  # loops over content and never asks whether it is a text
    null_content: bool  # asks whether content is none, so that none means something to it
    arguments_as_text: bool  # writes arguments as they are: JSON text, not an object


def dialect_of(tree: nodes.Template) -> Dialect:
    """Raises jinja2.TemplateError for a tree that cannot be compiled."""
    content, arguments = _Field("content", tree), _Field("arguments", tree)
    return Dialect(
        uses_tools="tools" in meta.find_undeclared_variables(tree),
        content_as_parts=content.is_looped_over() and not content.is_tested("string"),
        null_content=content.is_tested("none"),
        arguments_as_text=arguments.is_written_plainly() and not arguments.is_tested("string", "mapping"),
    )


class _Field:
    """Where a template reads one field, also by a variable or macro parameter of that name or set to it."""

    def __init__(self, name: str, tree: nodes.Template) -> None:
        self._name = name
        self._tree = tree
        self._aliases = {name}
        # In the order of the text: an alias of an alias is found as well.
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and self._is_read_by(assign.node):
                self._aliases.add(assign.target.name)

    def is_looped_over(self) -> bool:
        return any(self._is_list_of(loop.iter) for loop in self._tree.find_all(nodes.For))

    def is_tested(self, *names: str) -> bool:
        return any(test.name in names and self._is_read_by(test.node) for test in self._tree.find_all(nodes.Test))

    def is_written_plainly(self) -> bool:
        """Printed or joined to other text without a filter."""
        written: list[nodes.Node] = []
        for node in self._tree.find_all((nodes.Output, nodes.Concat)):
            written += node.nodes
        for node in self._tree.find_all(nodes.Add):
            written += (node.left, node.right)
        return any(self._is_read_by(node) for node in written)

    def _is_read_by(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == self._name
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == self._name
        return isinstance(node, nodes.Name) and node.name in self._aliases

    def _is_list_of(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Filter) and node.node is not None and node.name in _LIST_FILTERS:
            return self._is_list_of(node.node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._is_list_of(node.node)
        return self._is_read_by(node)
