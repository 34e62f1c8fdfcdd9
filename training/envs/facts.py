"""The facts of a state and conjunctive queries over them, in TextWorld's order.

TextWorld keeps every proposition of every game it ever met; here a fact is a row of names under its signature.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from textworld.logic import Rule, Type, TypeHierarchy

Row = tuple[str, ...]  # arguments of a fact
Signature = tuple[str, tuple[str, ...]]  # predicate, types of its arguments
Typed = tuple[str, str]  # a variable or a placeholder: (name, type)
Binding = dict[Typed, Typed]  # placeholder -> variable
Types = tuple[tuple[str, tuple[str, ...]], ...]  # a domain's types: name, supertypes
PARSERS = threading.RLock()  # TextWorld's parsers are module globals with state


class Facts:
    """The true facts by signature: rows of argument names, with a sorted view kept until the set changes."""

    def __init__(self, rows: Mapping[Signature, frozenset[Row]]):
        self.rows: dict[Signature, frozenset[Row] | set[Row]] = dict(rows)
        self._sorted: dict[Signature, list[Row]] = {}

    def _own(self, signature: Signature) -> set[Row]:
        rows = self.rows.get(signature, frozenset())
        if not isinstance(rows, set):  # still shared with the game's initial facts
            rows = self.rows[signature] = set(rows)
        self._sorted.pop(signature, None)
        return rows

    def add(self, signature: Signature, row: Row) -> None:
        if row not in self.rows.get(signature, ()):
            self._own(signature).add(row)

    def remove(self, signature: Signature, row: Row) -> None:
        if row in self.rows.get(signature, ()):
            self._own(signature).discard(row)

    def sorted(self, signature: Signature) -> list[Row]:
        rows = self._sorted.get(signature)
        if rows is None:
            rows = self._sorted[signature] = sorted(self.rows.get(signature, ()))
        return rows


@lru_cache(64)
def _hierarchy(types: Types) -> TypeHierarchy:
    hierarchy = TypeHierarchy()
    for name, supertypes in types:
        with contextlib.suppress(ValueError):  # declared twice: the first one stands, as in TextWorld
            hierarchy.add(Type(name, supertypes))
    return hierarchy


@dataclass(frozen=True)
class Query:
    """A conjunction of predicates: for each, its placeholders and the signatures its facts may have."""

    predicates: tuple[tuple[tuple[Typed, ...], tuple[Signature, ...]], ...]

    def bindings(self, facts: Facts, binding: Binding, depth: int = 0) -> Iterator[Binding]:
        """Every way to bind the open placeholders to distinct variables, in TextWorld's order."""
        if depth == len(self.predicates):
            yield binding
            return
        placeholders, signatures = self.predicates[depth]
        if all(placeholder in binding for placeholder in placeholders):  # look the fact up instead of trying all
            known = [binding[placeholder] for placeholder in placeholders]
            row, kinds = tuple([name for name, _ in known]), tuple([kind for _, kind in known])
            for signature in signatures:
                if signature[1] == kinds and row in facts.rows.get(signature, ()):
                    yield from self.bindings(facts, binding, depth + 1)
            return
        for signature in signatures:
            types = signature[1]
            for row in facts.sorted(signature):
                extended = binding
                for placeholder, name, kind in zip(placeholders, row, types, strict=True):
                    variable = (name, kind)
                    bound = extended.get(placeholder)
                    if bound is None:
                        if variable in extended.values():
                            break
                        extended = {**extended, placeholder: variable}
                    elif bound != variable:
                        break
                else:
                    yield from self.bindings(facts, extended, depth + 1)


@lru_cache(1024)
def compile_query(expression: str, types: Types) -> Query:
    with PARSERS:
        rule = Rule.parse_conjunctive_query(expression)
    hierarchy = _hierarchy(types)
    predicates = []
    for predicate in rule.preconditions:
        subtypes = hierarchy.multi_subtypes([hierarchy.get(t) for t in predicate.signature.types])
        signatures = tuple((predicate.name, tuple(t.name for t in kinds)) for kinds in subtypes)
        predicates.append((tuple((ph.name, ph.type) for ph in predicate.parameters), signatures))
    return Query(tuple(predicates))
