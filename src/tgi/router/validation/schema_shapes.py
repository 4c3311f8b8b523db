"""What several schemas say together of an array and of an object: who has to satisfy what, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tgi.router.validation.schema_site import KEYWORDS, Refused, Site, said

MAX_ITEMS = 2_000


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Each item is the places that it has to satisfy. `rest`: of the items behind `prefix`; None: there are none."""

    prefix: list[list[Site]] = field(default_factory=list)
    rest: list[Site] | None = field(default_factory=list)
    min_items: int = 0
    max_items: int | None = None


def array_shape(sites: Sequence[Site]) -> ArrayShape | None:
    """None where no array is left."""
    low = max((int(value) for value in said(sites, "minItems")), default=0)
    high = min((int(value) for value in said(sites, "maxItems")), default=None)
    for value in (low, high):
        if value is not None and value > MAX_ITEMS:
            raise Refused(f"`minItems` and `maxItems` above {MAX_ITEMS} are not supported", sites[0].path)
    parts = [_items(site) for site in sites]
    width = max((len(prefix) for prefix, _ in parts), default=0)
    prefix = [
        [site for head, rest in parts for site in (head[index : index + 1] or rest[:1])] for index in range(width)
    ]
    rest = [site for _, tail in parts for site in tail]
    if any(site.schema is False for site in rest):
        rest, high = None, width if high is None else min(high, width)
    if high is not None and low > high:
        return None
    return ArrayShape(prefix if high is None else prefix[:high], rest, low, high)


def _items(site: Site) -> tuple[list[Site], list[Site]]:
    """-> the places of the first items, the place of all others (none or one)."""
    items = site.schema.get("items")
    if isinstance(items, list):  # until 2019-09
        rest = [site.at("additionalItems")] if "additionalItems" in site.schema else []
        return site.members("items"), rest
    prefix = site.members("prefixItems") if "prefixItems" in site.schema else []
    return prefix, [site.at("items")] if items is not None else []


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """`additional`: what any other property has to satisfy; None: there are no others."""

    properties: dict[str, list[Site]]
    patterns: dict[str, list[Site]]
    additional: list[Site] | None
    required: list[str]
    min_properties: int
    max_properties: int | None


def object_shape(sites: Sequence[Site]) -> ObjectShape | None:
    """None where no object is left.

    Properties that nobody names are left out where some are named and `additionalProperties` does not ask for others.
    """
    required = required_names(sites)
    low = max((int(value) for value in said(sites, "minProperties")), default=0)
    high = min((int(value) for value in said(sites, "maxProperties")), default=None)
    patterns = _patterns(sites)
    names = dict.fromkeys(name for found in said(sites, "properties") for name in found)
    if not patterns:
        names |= dict.fromkeys(required)
    properties = {name: property_sites(sites, name) for name in names}
    asked = [site.at("additionalProperties") for site in sites if "additionalProperties" in site.schema]
    is_named = any(value is not False for found in said(sites, "properties") for value in found.values())
    is_closed = not asked and (is_named or bool(patterns)) and low <= len(_possible(properties))
    additional = None if is_closed or any(site.schema is False for site in asked) else asked
    shape = ObjectShape(properties, patterns, additional, required, low, high)
    listed = _listed_names(sites)
    if listed is not None:
        shape = _with_names(shape, listed, sites)
    if not patterns and not _possible(shape.properties).issuperset(required):
        return None
    return _counted(shape, sites[0].path if sites else "#")


def _possible(properties: dict[str, list[Site]]) -> set[str]:
    return {name for name, held in properties.items() if not any(site.schema is False for site in held)}


def _with_names(shape: ObjectShape, listed: list[str], sites: Sequence[Site]) -> ObjectShape:
    """No names but those that are listed; these are properties then, and none of them comes twice."""
    if shape.patterns:
        raise Refused("`propertyNames` beside `patternProperties` is not supported", sites[0].path)
    never = Site("#/unlisted", False)
    properties = {name: held if name in listed else [*held, never] for name, held in shape.properties.items()}
    if shape.additional is not None:
        properties |= {name: property_sites(sites, name) for name in listed if name not in properties}
    return replace(shape, properties=properties, additional=None)


def _counted(shape: ObjectShape, path: str) -> ObjectShape | None:
    """`shape` with no more bounds on the number of properties than it needs; None where they exclude each other."""
    low, high, needed = shape.min_properties, shape.max_properties, len(shape.required)
    possible = _possible(shape.properties)
    if high is not None and high < max(low, needed):
        return None
    if high == needed and not shape.patterns:
        return replace(
            shape, properties=_only(shape, shape.required), additional=None, min_properties=0, max_properties=None
        )
    is_open = shape.additional is not None or bool(shape.patterns)
    if not is_open:
        if low > len(possible):
            return None
        if low == len(possible):
            required = [name for name in shape.properties if name in possible]
            return replace(shape, required=required, min_properties=0, max_properties=None)
        if high is not None and high >= len(possible):
            high = None
    if low <= needed:
        low = 0
    if is_open and low > needed + 1:
        raise Refused(f"`minProperties` of {low} is not supported: a name may come twice", path)
    # llguidance counts either optional properties, up to one, or others.
    if possible - set(shape.required) and (is_open or low not in (0, needed + 1) or high not in (None, needed + 1)):
        for name, value in (("minProperties", low), ("maxProperties", high)):
            if value:
                raise Refused(f"`{name}` beside optional properties is not supported", path)
    if high is not None and high > MAX_ITEMS:
        raise Refused(f"`maxProperties` above {MAX_ITEMS} is not supported", path)
    return replace(shape, min_properties=low, max_properties=high)


def _listed_names(sites: Sequence[Site]) -> list[str] | None:
    """The names that every list of `propertyNames` allows; None without a list."""
    found: list[str] | None = None
    for value in said(sites, "propertyNames"):
        if isinstance(value, dict) and "enum" in value:
            found = [name for name in value["enum"] if found is None or name in found]
    return found


def _only(shape: ObjectShape, names: Sequence[str]) -> dict[str, list[Site]]:
    return {name: held for name, held in shape.properties.items() if name in names}


def _patterns(sites: Sequence[Site]) -> dict[str, list[Site]]:
    holders = [site for site in sites if site.schema.get("patternProperties")]
    found: dict[str, list[Site]] = {}
    for site in holders:
        for pattern in site.schema["patternProperties"]:
            found.setdefault(pattern, []).append(site.at("patternProperties", pattern))
    if holders and any(
        site.schema.get("additionalProperties", True) is not True
        and (site is not holders[0] or any(other is not site and _speaks_of_objects(other) for other in sites))
        for site in sites
    ):
        raise Refused(
            "`patternProperties` and `additionalProperties` of several schemas are not supported", holders[0].path
        )
    return found


def _speaks_of_objects(site: Site) -> bool:
    return bool(KEYWORDS["object"] & site.schema.keys())


def required_names(sites: Sequence[Site]) -> list[str]:
    return list(dict.fromkeys(name for names in said(sites, "required") for name in names))


def property_sites(sites: Sequence[Site], name: str) -> list[Site]:
    """What the property `name` has to satisfy; patterns are left to the engine."""
    found: list[Site] = []
    for site in sites:
        if name in site.schema.get("properties", {}):
            found.append(site.at("properties", name))
        elif "additionalProperties" in site.schema and not site.schema.get("patternProperties"):
            found.append(site.at("additionalProperties"))
    return found
