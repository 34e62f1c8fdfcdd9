"""ALFWorld's text grammar, parsed once and compiled to closures; TextWorld parses and deep-copies it at every step.

Texts are parsed by TextWorld's own parsers. Expressions such as `o.indefinite + ' ' + o.name` are read as a tiny
language (names, attributes, text, `+`, `or`) and never evaluated as Python: game files are data.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from textworld.envs.pddl import logic, textgen
from textworld.envs.pddl.logic.model import ActionTypeNode

from training.envs.facts import PARSERS, Binding, Facts, Types, compile_query

Expression = Callable[[Mapping[str, Any]], Any]  # of the variables


@lru_cache(4096)
def _symbols(text: str) -> tuple[textgen.Symbol, ...]:
    with PARSERS:
        return tuple(textgen._parse_and_convert(text, rule_name="symbols"))


def _first_true(options: list[Expression]) -> Expression:
    def value(variables: Mapping[str, Any]) -> Any:
        for option in options:
            found = option(variables)
            if found:
                break
        return found

    return value


@lru_cache(1024)
def _expression(text: str) -> Expression:
    """The value of a grammar expression as a function of its variables. Raises ValueError on anything but text."""

    def build(node: ast.AST) -> Expression:
        match node:
            case ast.Expression(body=body):
                return build(body)
            case ast.Name(id=name):
                return lambda variables: variables[name]
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if not attribute.startswith("_"):
                return lambda variables: getattr(variables[name], attribute)
            case ast.Constant(value=str(value)):
                return lambda variables: value
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                first, second = build(left), build(right)
                return lambda variables: first(variables) + second(variables)
            case ast.BoolOp(op=ast.Or(), values=values):
                return _first_true([build(value) for value in values])
        raise ValueError(f"grammar expression {text!r}: only names, attributes, texts, `+` and `or` are understood")

    try:
        return build(ast.parse(text.strip(), mode="eval"))
    except SyntaxError as error:
        raise ValueError(f"grammar expression {text!r} is not understood") from error


@dataclass(frozen=True, slots=True)
class Context:
    """Where a text is derived: facts, bindings, and the entities that the bindings name."""

    facts: Facts
    entities: Mapping[str, Any]
    binding: Binding
    variables: Mapping[str, Any]

    @classmethod
    def of(cls, facts: Facts, entities: Mapping[str, Any], binding: Binding) -> Context:
        return cls(facts, entities, binding, {ph[0]: entities[var[0]] for ph, var in binding.items()})


Writer = Callable[[Context], str]


Rules = dict[str, list[dict[str, Any]]]


class Grammar:
    """Rules of a context-sensitive grammar; `derive` writes the text of a start string in a context."""

    def __init__(self, rules: Rules, types: Types):
        self._rules = rules
        self._types = types
        self._writers: dict[str, Writer] = {}
        self._nonterminals: dict[str, Writer] = {}

    def derive(self, start: str, context: Context) -> str:
        writer = self._writers.get(start)
        if writer is None:
            writer = self._writers[start] = self._sequence(_symbols(start))
        return writer(context)

    def _sequence(self, symbols: tuple[textgen.Symbol, ...]) -> Writer:
        writers = [self._writer(symbol) for symbol in symbols]
        if len(writers) == 1:
            return writers[0]
        return lambda context: "".join([write(context) for write in writers])

    def _writer(self, symbol: textgen.Symbol) -> Writer:
        match symbol:
            case textgen.TerminalSymbol():
                text = str(symbol)
                return lambda context: text
            case textgen.NonterminalSymbol():
                name = str(symbol)
                return lambda context: self._nonterminal(name)(context)
            case textgen.EvalSymbol():
                value = _expression(symbol.expression)
                return lambda context: str(value(context.variables))
            case textgen.ConditionalSymbol():
                items = self._items(symbol)
                return lambda context: "".join(items(context))
            case textgen.ListSymbol():
                return self._list(symbol)
        raise NotImplementedError(f"Unknown symbol: {type(symbol)}")

    def _items(self, symbol: textgen.ConditionalSymbol) -> Callable[[Context], list[str]]:
        write, given = self._writer(symbol.expression), symbol.given
        if not given:
            return lambda context: [write(context)]
        query = compile_query(given, self._types)

        def items(context: Context) -> list[str]:
            facts, entities = context.facts, context.entities
            return [write(Context.of(facts, entities, b)) for b in query.bindings(facts, context.binding)]

        return items

    def _list(self, symbol: textgen.ListSymbol) -> Writer:
        items = self._items(symbol.symbol)

        def write(context: Context) -> str:
            texts = items(context)
            if not texts:
                return self._nonterminal("list_empty")(context)
            if len(texts) == 1:
                return texts[0]
            separator = self._nonterminal("list_separator")(context)
            return separator.join(texts[:-1]) + self._nonterminal("list_last_separator")(context) + texts[-1]

        return write

    def _nonterminal(self, name: str) -> Writer:
        writer = self._nonterminals.get(name)
        if writer is None:
            writer = self._nonterminals[name] = self._first_applicable(name)
        return writer

    def _first_applicable(self, name: str) -> Writer:
        rules = self._rules.get(name)
        if not rules:
            raise textgen.CSGUnknownSymbolError(name)
        options = []
        for rule in rules:
            condition = rule.get("condition", "")
            query = compile_query(condition, self._types) if condition else None
            options.append((query, self._sequence(_symbols(rule["rhs"]))))

        def write(context: Context) -> str:
            for query, sequence in options:
                if query is None or next(query.bindings(context.facts, context.binding), None) is not None:
                    return sequence(context)
            raise IndexError(f"no rule of #{name}# applies")

        return write


@dataclass(frozen=True)
class ActionText:
    template: str
    feedback_rule: str


_LEADING_BLOCK = re.compile(r'\s*grammar\s*::\s*"""((?:.|\n)*?)"""\s*;')


@lru_cache(16)
def _document(text: str) -> tuple[dict[str, ActionText], Rules]:
    """Actions and grammar rules of a .twl2 text, by TextWorld's parser."""
    with PARSERS:
        document = logic._PARSER.parse(text, rule_name="pddlStart")
    convert = logic._ModelConverter()
    actions: dict[str, ActionText] = {}
    rules: Rules = {}
    for part in document.parts:
        if isinstance(part, ActionTypeNode):
            action = convert.walk(part)
            actions[action.name.lower()] = ActionText(action.template, action.feedback_rule)
            code = "\n".join(line for line in action.grammar.split("\n") if not line.lstrip().startswith("#"))
        else:
            code = convert._unescape_block(part.code)
        rules.update(json.loads(code))
    return actions, rules


@dataclass(frozen=True)
class Logic:
    """Texts of a game: the counterpart of TextWorld's GameLogic."""

    actions: Mapping[str, ActionText]
    grammar: Grammar


@lru_cache(64)
def load_logic(text: str, types: Types) -> Logic:
    """Actions and grammar of a game. Games differ in the leading block (the goal's sentence); the rest is shared."""
    leading = _LEADING_BLOCK.match(text)
    actions, rules = _document(text[leading.end() :] if leading else text)
    if leading:
        rules = {**json.loads(textwrap.dedent(leading.group(1))), **rules}
    return Logic(actions, Grammar(rules, types))
