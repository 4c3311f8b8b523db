"""A JSON schema -> one that says the same in the few keywords whose enforcement is sure; or its refusal, by name.

References, allOf, anyOf and provable oneOf are multiplied out, so that every node left has one type and no siblings:
llguidance then never has to intersect anything. What is left to it are regular expressions. Knows no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tgi.router.validation.schema_assembly import PREFIX, Node, any_of, assembled
from tgi.router.validation.schema_document import ANNOTATIONS, Document
from tgi.router.validation.schema_literals import common_literals, literal_fits
from tgi.router.validation.schema_numbers import number_node
from tgi.router.validation.schema_overlap import Overlap
from tgi.router.validation.schema_shapes import array_shape, object_shape
from tgi.router.validation.schema_site import JSON_TYPES, Case, Refused, Site, common_types, written_types
from tgi.router.validation.schema_strings import string_limits, string_node

MAX_STATES = 2_000
"""Parts of a schema that differ. Each costs about 0.2 ms here."""

MAX_CASES = 1_000
"""How often anyOf may be multiplied out in one place: 10 choices of 2 beside each other are 1,024."""

MAX_ALL_CASES = 2_000

MAX_COMPARISONS = 10_000
"""A hundred members of one `oneOf`, each with each."""

MAX_TRAIL = 64
"""How deep `$ref`, `allOf`, `anyOf` and `oneOf` of one value may stand in each other."""

MAX_TOTAL_ITEMS = 20_000
"""The sum of all bounds on the number of items: llguidance spells each item out."""

MAX_PATTERNS = 64
"""Of `patternProperties`: each is compared with each other one of its object, for no name may match two."""

_APPLICATORS = {"$ref", "allOf", "anyOf", "dependentRequired", "not", "oneOf", "propertyNames"}


def enforceable(schema: Any, effort: float = 1.0) -> dict[str, Any]:
    """The schema that llguidance is to compile, `x-guidance` and definitions included. Raises Refused.

    `effort`: how much of the limits on parts, cases and comparisons may be used; all of it is half a second.
    """
    return _Rewriting(Document(schema), effort).run()


class _Rewriting:
    """A state is a set of places in the schema that one value has to satisfy; each becomes one definition."""

    def __init__(self, document: Document, effort: float) -> None:
        self._document = document
        self._overlap = Overlap(self._cases, int(MAX_COMPARISONS * effort))
        self._max_states = int(MAX_STATES * effort)
        self._max_cases = int(MAX_ALL_CASES * effort)
        self._names: dict[tuple[str, ...], str] = {}
        self._waiting: list[tuple[str, tuple[Site, ...]]] = []
        self._nodes: dict[str, Node] = {}
        self._cached: dict[str, list[Case]] = {}
        self._num_items = 0
        self._num_cases = 0
        self._num_patterns = 0

    def run(self) -> dict[str, Any]:
        root = self._refer([self._document.root])
        while self._waiting:
            name, sites = self._waiting.pop()
            self._nodes[name] = self._compiled(sites)
        return assembled(self._nodes, root["$ref"].removeprefix(PREFIX))

    def _refer(self, sites: Iterable[Site]) -> dict[str, Any]:
        """A reference to the definition of what satisfies all of `sites`, which is compiled later."""
        places = map(self._document.followed, sites)
        held = {site.path: site for site in places if not _says_nothing(site.schema)}
        key = tuple(held)
        name = self._names.get(key)
        if name is None:
            if len(self._names) == self._max_states:
                raise Refused(f"the schema has more than {self._max_states} parts")
            name = self._names[key] = str(len(self._names))
            self._waiting.append((name, tuple(held.values())))
        return {"$ref": PREFIX + name}

    def _compiled(self, sites: Sequence[Site]) -> Node:
        options: list[Node] = []
        cases = self._cases(sites)
        self._num_cases += len(cases)
        if self._num_cases > self._max_cases:
            raise Refused(f"the choices of the schema make more than {self._max_cases} cases")
        for case in cases:
            found = self._options(case)
            if found and case.denied:
                self._overlap.check_denied(case)
            options += [node for node in found if node not in options] if len(options) < 64 else found
        return any_of(options)

    # What holds together, anyOf by anyOf.

    def _cases(self, sites: Sequence[Site]) -> list[Case]:
        cases = [Case()]
        for site in sites:
            cases = _both(cases, self._cases_of(site, ()), site.path)
        return cases

    def _cases_of(self, site: Site, trail: tuple[str, ...]) -> list[Case]:
        if site.schema is True:
            return [Case()]
        if site.schema is False:
            return []
        found = self._cached.get(site.path)
        if found is None:
            if site.path in trail:
                raise Refused("a reference leads back to itself", site.path)
            if len(trail) == MAX_TRAIL:
                raise Refused(f"more than {MAX_TRAIL} references and choices lead into each other", site.path)
            self._document.check(site)
            found = self._cached[site.path] = self._multiplied(site, (*trail, site.path))
        return found

    def _multiplied(self, site: Site, trail: tuple[str, ...]) -> list[Case]:
        cases = [Case()]
        # The order of properties is the schema's: what stands before them in the text goes before them in the answer.
        own_at = "properties" if "properties" in site.schema else next(iter(site.schema), None)
        for keyword, value in site.schema.items():
            if keyword == own_at:
                cases = _both(cases, [Case((site,))], site.path)
            if keyword not in _APPLICATORS:
                continue
            if keyword == "$ref":
                cases = _both(cases, self._cases_of(self._document.resolve(value, site), trail), site.path)
            elif keyword == "not":
                cases = _both(cases, [Case((), (site.at("not"),))], site.path)
            elif keyword == "allOf":
                for member in site.members(keyword):
                    cases = _both(cases, self._cases_of(member, trail), site.path)
            elif keyword in ("anyOf", "oneOf"):
                cases = _both(cases, self._choices(site, keyword, trail), site.path)
            elif keyword == "propertyNames" and (names := self._document.listed_names(site)) is not None:
                listed = Site(f"{site.path}/{keyword}/enum", {"propertyNames": {"enum": names}})
                cases = _both(cases, [Case((listed,))], site.path)
            elif keyword == "dependentRequired":
                for name, needed in value.items():
                    present = Site(f"{site.path}/{keyword}/{name}", {"required": [name, *needed]})
                    absent = Site(f"{site.path}/{keyword}/{name}/absent", {"properties": {name: False}})
                    cases = _both(cases, [Case((absent,)), Case((present,))], site.path)
        return cases

    def _choices(self, site: Site, keyword: str, trail: tuple[str, ...]) -> list[Case]:
        members = site.members(keyword)
        if keyword == "anyOf":
            return [case for member in members for case in self._cases_of(member, trail)]
        return [
            Case(case.sites, (*case.denied, *(other for other in members if other is not member)))
            for member in members
            for case in self._cases_of(member, trail)
        ]

    # One case, type by type.

    def _options(self, case: Case) -> list[Node]:
        literals = common_literals(case.sites)
        if literals is not None:
            return self._literals(case.sites, literals)
        types = written_types(case.sites)
        found: list[Node] = []
        for kind in JSON_TYPES:
            if kind not in types:
                continue
            if kind in ("null", "boolean"):
                node: Node = {"type": kind}
            elif kind in ("integer", "number"):
                node = number_node(case.sites, kind == "integer")
            elif kind == "string":
                node = string_node(case.sites)
            elif kind == "array":
                node = self._array(case.sites)
            else:
                node = self._object(case.sites)
            if node is not False:
                found.append(node)
        return found

    def _literals(self, sites: Sequence[Site], literals: list[Any]) -> list[Node]:
        types = common_types(sites)
        fitting = [value for value in literals if literal_fits(value, types, sites)]
        patterns = string_limits(sites).patterns
        texts = [value for value in fitting if isinstance(value, str)] if patterns else []
        rest = [value for value in fitting if not (patterns and isinstance(value, str))]
        # Whether a text matches is for the engine of the regular expressions to say: it drops what does not.
        nodes: list[Node] = [string_node(sites, literal=text) for text in texts]
        return [*nodes, {"enum": rest}] if rest else nodes

    def _array(self, sites: Sequence[Site]) -> Node:
        shape = array_shape(sites)
        if shape is None:
            return False
        spelled = max(shape.min_items, shape.max_items or 0)
        self._num_items += spelled
        if self._num_items > MAX_TOTAL_ITEMS:
            raise Refused(f"`minItems` and `maxItems` add up to more than {MAX_TOTAL_ITEMS}", sites[0].path)
        node: dict[str, Any] = {"type": "array"}
        if shape.prefix:
            node["prefixItems"] = [self._refer(item) for item in shape.prefix]
        node["items"] = False if shape.rest is None else self._refer(shape.rest)
        if shape.min_items:
            node["minItems"] = shape.min_items
        if shape.max_items is not None:
            node["maxItems"] = shape.max_items
        return node

    def _object(self, sites: Sequence[Site]) -> Node:
        shape = object_shape(sites)
        if shape is None:
            return False
        node: dict[str, Any] = {"type": "object"}
        if shape.properties:
            node["properties"] = {name: self._refer(held) for name, held in shape.properties.items()}
        self._num_patterns += len(shape.patterns)
        if self._num_patterns > MAX_PATTERNS:
            raise Refused(f"more than {MAX_PATTERNS} `patternProperties`", sites[0].path)
        if shape.patterns:
            node["patternProperties"] = {pattern: self._refer(held) for pattern, held in shape.patterns.items()}
        node["additionalProperties"] = False if shape.additional is None else self._refer(shape.additional)
        if shape.required:
            node["required"] = shape.required
        if shape.min_properties:
            node["minProperties"] = shape.min_properties
        if shape.max_properties is not None:
            node["maxProperties"] = shape.max_properties
        return node


def _says_nothing(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= ANNOTATIONS)


def _both(first: list[Case], second: list[Case], path: str) -> list[Case]:
    if len(first) * len(second) > MAX_CASES:
        raise Refused(f"combined choices make more than {MAX_CASES} cases", path)
    return [one.joined(other) for one in first for other in second]
